"""Compiles Triton kernels in threads before they are launched. The ranks of a node share the work and the cache."""

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import KernelInterface

Recorded = dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]
"""Cache key -> (function that compiles a kernel, function that stores the compiled kernel in this process)."""


class _RecordingMode(triton.AsyncCompileMode):
    """Mode in which Triton passes kernels to `submit` instead of compiling them."""

    def __init__(self) -> None:
        super().__init__(executor=None)
        self.recorded: Recorded = {}

    def submit(self, key: str, compile_kernel: Callable[[], Any], store: Callable[[Any], None]) -> None:
        self.recorded.setdefault(key, (compile_kernel, store))


@contextmanager
def record_launches() -> Iterator[Recorded]:
    """Context manager that yields the kernels launched in its body by this thread and not yet compiled by this process.
    They are neither compiled nor launched, so their arguments may be tensors without data (`meta`)."""
    mode, launch = _RecordingMode(), KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: partial(kernel.warmup, grid=grid)
    try:
        with mode:
            yield mode.recorded
    finally:
        KernelInterface.__getitem__ = launch


def compile_recorded(recorded: Recorded, folder: Path, num_threads: int) -> list[str]:
    """Compiles recorded kernels into Triton's cache, each on one rank of the node only.

    `folder`: folder of the node with one lock file per kernel. Kernels that another rank is compiling are loaded from
    the cache after all others are compiled. Triton releases the GIL in most of the compilation, so threads suffice.

    Returns the error messages of kernels that cannot be compiled.
    """
    folder.mkdir(exist_ok=True)
    keys, errors = list(recorded), []

    def compile_one(key: str, wait: bool) -> bool:
        with open(folder / hashlib.sha256(key.encode()).hexdigest(), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return False
            try:
                _compile(*recorded[key])
            except Exception as problem:  # the launch raises it again
                errors.append(f"{type(problem).__name__}: {problem}")
        return True

    with ThreadPoolExecutor(num_threads) as pool:
        for wait in (False, True):
            done = list(pool.map(partial(compile_one, wait=wait), keys))
            keys = [key for key, is_done in zip(keys, done, strict=True) if not is_done]
    return errors


def _compile(compile_kernel: Callable[[], Any], store: Callable[[Any], None]) -> None:
    """Compiles one kernel and the C extension module that launches it, which Triton would compile at the launch."""
    kernel = compile_kernel()
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    store(kernel)
