"""Parallel compilation of Triton kernels."""

import fcntl
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_moe.kernels.backends.triton import precompile
from megatron_moe.kernels.backends.triton.precompile import compile_recorded
from tests.kernels.compiled import compiled

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles without C extension modules, which need the CUDA driver."""
    monkeypatch.setattr(precompile, "_compile", lambda compile_kernel, store: store(compile_kernel()))


def test_kernels_are_compiled_concurrently(tmp_path: Path):
    together = threading.Barrier(4)
    kernels = {str(k): (lambda: together.wait(PATIENCE_S), lambda kernel: None) for k in range(4)}
    compile_recorded(kernels, tmp_path / "locks", num_threads=4)


def test_two_ranks_compile_every_kernel_once(tmp_path: Path):
    """Uses a dictionary as the cache. Each rank compiles the kernels that the other is not compiling."""
    cache: dict[str, int] = {}
    compiled_by: dict[str, list[int]] = {str(k): [] for k in range(8)}
    both = threading.Barrier(2)

    def run(rank: int) -> list[str]:
        stored: list[str] = []

        def compile_kernel(key: str) -> str:
            if key not in cache:
                both.wait(PATIENCE_S)  # one kernel per rank at a time: neither rank waits for the other's kernel
                compiled_by[key].append(rank)
                cache[key] = rank
            return key

        kernels = {key: (lambda key=key: compile_kernel(key), stored.append) for key in compiled_by}
        compile_recorded(kernels, tmp_path / "locks", num_threads=1)
        return stored

    with ThreadPoolExecutor(2) as ranks:
        results = list(ranks.map(run, range(2)))
    assert [sorted(stored) for stored in results] == [sorted(compiled_by)] * 2, "each rank has all kernels"
    assert all(len(by) == 1 for by in compiled_by.values()), compiled_by
    assert {by[0] for by in compiled_by.values()} == {0, 1}, compiled_by


def test_a_kernel_that_another_process_compiles_comes_last(tmp_path: Path):
    stored: list[str] = []
    with open(tmp_path / hashlib.sha256(b"a").hexdigest(), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def compile_last() -> str:
            fcntl.flock(lock, fcntl.LOCK_UN)  # the other process has finished
            return "c"

        kernels = {
            "a": (lambda: "a", stored.append),
            "b": (lambda: "b", stored.append),
            "c": (compile_last, stored.append),
        }
        compile_recorded(kernels, tmp_path, num_threads=1)
    assert stored == ["b", "c", "a"]


def test_a_kernel_that_cannot_be_compiled_does_not_affect_others(tmp_path: Path):
    def fail() -> None:
        raise RuntimeError("no registers")

    stored: list[str] = []
    kernels = {"a": (fail, stored.append), "b": (lambda: "b", stored.append)}
    with pytest.raises(RuntimeError, match="no registers"):
        compile_recorded(kernels, tmp_path, num_threads=2)
    assert stored == ["b"]


LAUNCHES = """
import os
from pathlib import Path
folder = Path(tempfile.mkdtemp())
os.environ["TRITON_CACHE_DIR"] = str(folder)
from megatron_moe.kernels.backends.triton.launch import sum_of_shares
from megatron_moe.kernels.backends.triton.precompile import compile_recorded, record_launches

launchers = []
Driver.launcher_cls = staticmethod(lambda source, metadata: launchers.append(source.name))

def record(width):
    with record_launches() as recorded:
        sum_of_shares(torch.empty(16, width, device="meta"), torch.bfloat16)
        sum_of_shares(torch.empty(16, width, device="meta"), torch.float32)
        sum_of_shares(torch.empty(16, 2 * width, device="meta"), torch.float32)
    return recorded

found.append(len(first := record(64)))
found.append(len(list(folder.glob("*/*.cubin"))))
compile_recorded(first, folder / "locks", 2)
found.append(sorted(path.name for path in folder.glob("*/*.cubin")))
found.append(launchers)
found.append(len(record(64)))
"""


def test_recorded_launches_are_compiled_for_the_gpu_once():
    """Two dtypes give two kernels; both widths have the same specialisation."""
    num, before, binaries, launchers, missing = compiled(LAUNCHES)
    assert (num, before, missing) == (2, 0, 0)
    assert binaries == ["_sum_shares.cubin"] * 2 and launchers == ["_sum_shares"] * 2
