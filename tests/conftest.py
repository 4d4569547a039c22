"""Process settings made before any import (threads, Triton interpreter, root on the path) and shared fixtures."""

import os
import signal
import sys
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


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of small `.bin/.idx` files of real text."""
    from tests.end_to_end.tiny_run import make_data  # it imports torch, which most sessions do not need this early

    return make_data(tmp_path_factory.mktemp("data"))
