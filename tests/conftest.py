"""Set before anything else: one thread per process, the repository root on the path, repeatable random examples."""

import os
import signal
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = (
    "1"  # before torch is imported: the same sums everywhere, and ranks as threads stay quick
)
os.environ.setdefault("WANDB_MODE", "offline")  # no test talks to a server
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported: without a GPU they are interpreted

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so are tests started behind a shell's `&`, and their processes
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],  # it may be the machine
)
settings.load_profile("repeatable")
