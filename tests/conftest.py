"""Process settings made before any import (threads, Triton interpreter, root on the path) and shared fixtures."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: identical sums everywhere, fast ranks as threads
os.environ.setdefault("WANDB_MODE", "offline")  # no test talks to a server
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported: without a GPU they are interpreted

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited by tests that a shell starts with `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],  # on a busy machine
)
settings.load_profile("repeatable")


SAMPLED = {
    "kernels/test_triton_kernels.py": 2,
    "kernels/test_triton_routing.py": 2,
    "memory/test_cuda_graphs.py": 2,
    "memory/test_low_precision_graphs.py": 2,
    "memory_emulation/test_agreement.py": 3,
    "model/test_context_parallel.py": 2,
    "model/test_context_parallel_gpt.py": 2,
    "moe/parallel/test_balance_over_ranks.py": 2,
    "moe/parallel/test_dispatch_over_ranks.py": 4,
    "moe/parallel/test_layer_over_ranks.py": 2,
    "optim/test_state_formats.py": 2,
    "parity/test_fused_casts.py": 2,
    "parity/test_low_precision.py": 2,
    "train/test_low_precision.py": 2,
    "train/test_overlap.py": 2,
    "train/test_stored_weights.py": 3,
}
"""Files whose cases are many -> n: CI runs every n-th case of each test, and the nightly run all of them."""


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases that CI leaves out as slow."""
    counts: Counter[tuple[Path, str]] = Counter()
    for item in items:
        key = item.path, getattr(item, "originalname", item.name)
        number, counts[key] = counts[key], counts[key] + 1
        if number % SAMPLED.get(item.path.relative_to(ROOT / "tests").as_posix(), 1):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of small `.bin/.idx` files of real text."""
    from tests.end_to_end.tiny_run import make_data  # it imports torch, which most sessions do not need this early

    return make_data(tmp_path_factory.mktemp("data"))
