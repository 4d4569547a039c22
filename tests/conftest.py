"""Process settings made before any import (threads, Triton interpreter, root on the path) and shared fixtures."""

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; gives identical sums on all machines
os.environ.setdefault("WANDB_MODE", "offline")  # tests do not connect to a server
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported: without a GPU they are interpreted

gc.disable()  # until all tests are collected, which creates millions of objects

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited by tests that a shell starts with `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Registers all built-in components, so that restoring a registry after a test does not remove them.
import arguments.read  # noqa: E402, F401
import megatron_moe.config.update_rules  # noqa: E402, F401
from megatron_moe.config import registry  # noqa: E402
from tests.helpers.sampling import LEFT_OUT, SAMPLED, sample  # noqa: E402

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],  # on a busy machine
)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases that CI leaves out as slow."""
    tests = defaultdict(list)
    for item in items:
        path = item.path.relative_to(ROOT / "tests").as_posix()
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not any(item.iter_markers("slow")):
            name = f"{path}::{item.originalname}"
            if item.callspec.id in LEFT_OUT.get(name, ()):
                item.add_marker(pytest.mark.slow)
            if number := SAMPLED.get(name, SAMPLED.get(path)):
                tests[name, number].append(item)
    for (_, number), cases in tests.items():
        values = [frozenset((name, id(value)) for name, value in case.callspec.params.items()) for case in cases]
        taken = sample(values, number)
        for place, case in enumerate(cases):
            if place not in taken:
                case.add_marker(pytest.mark.slow)
    if not any("::" in each for each in config.args):
        _check_left_out(items)


def _check_left_out(items: list[pytest.Item]) -> None:
    """Checks that the collected tests have the cases of `LEFT_OUT`, and that CI runs other cases of them."""
    ids, run = defaultdict(set), set()
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            name = f"{item.path.relative_to(ROOT / 'tests').as_posix()}::{item.originalname}"
            ids[name].add(item.callspec.id)
            run |= set() if any(item.iter_markers("slow")) else {name}
    wrong = [name for name in LEFT_OUT.keys() & ids if name not in run or not ids[name].issuperset(LEFT_OUT[name])]
    if wrong:
        raise pytest.UsageError(f"LEFT_OUT of tests/helpers/sampling.py has unknown cases or all cases of {wrong}")


def pytest_collection_finish() -> None:
    """Makes interpreted kernels faster if there are any, and exempts imported modules from garbage collection: a
    collection, which every captured graph and every run of the trainer requests, then takes a tenth of the time."""
    if "triton.runtime.interpreter" in sys.modules:
        from tests.helpers.fast_interpreter import make_interpreter_fast

        make_interpreter_fast()
    if (kernels := sys.modules.get("megatron_moe.kernels.registry")) is not None:
        kernels.read_backend = cache(kernels.read_backend)  # hundreds of tests parse the files of all backends
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_registration_outlives_a_test() -> Iterator[None]:
    with registry.restored():
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of small `.bin/.idx` files of real text."""
    from tests.end_to_end.tiny_run import make_data  # it imports torch, which most sessions do not need this early

    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def deep_ep_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the stand-in of the DeepEP library importable."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "stand_ins"))
    yield
    for name in ("deep_ep", "deep_ep.hybrid_ep_buffer", "hybrid_ep_cpp"):
        sys.modules.pop(name, None)
