"""Compiles Triton kernels in threads before they are launched. The ranks of a node share the work and the cache."""

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

Recorded = dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]
"""Cache key -> (function that compiles a kernel, function that stores the compiled kernel in this process)."""


@contextmanager
def record_launches() -> Iterator[Recorded]:
    """Context manager that yields the kernels launched in its body by this thread and not yet compiled by this process.
    They are neither compiled nor launched, so their arguments may be tensors without data (`meta`)."""
    import triton
    from triton.runtime.jit import KernelInterface

    recorded: Recorded = {}
    mode, launch = triton.AsyncCompileMode(executor=None), KernelInterface.__getitem__
    mode.submit = lambda key, compile_kernel, store: recorded.setdefault(key, (compile_kernel, store)) and None
    KernelInterface.__getitem__ = lambda kernel, grid: partial(kernel.warmup, grid=grid)
    try:
        with mode:
            yield recorded
    finally:
        KernelInterface.__getitem__ = launch


def compile_recorded(recorded: Recorded, folder: Path, num_threads: int) -> None:
    """Compiles recorded kernels into Triton's cache, each on one rank of the node only.

    `folder`: folder of the node with one lock file per kernel. Kernels that another rank is compiling are loaded from
    the cache after all others are compiled. Most of the compilation is outside Python, so threads suffice.

    Raises the first error after all other kernels have been compiled.
    """
    folder.mkdir(exist_ok=True)
    keys = list(recorded)

    def compile_one(key: str, wait: bool) -> bool:
        with open(folder / hashlib.sha256(key.encode()).hexdigest(), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return False
            _compile(*recorded[key])
        return True

    with ThreadPoolExecutor(num_threads) as pool:
        for wait in (False, True):
            done = [pool.submit(compile_one, key, wait) for key in keys]
            keys = [key for key, each in zip(keys, done, strict=True) if not each.result()]


def _compile(compile_kernel: Callable[[], Any], store: Callable[[Any], None]) -> None:
    """Compiles one kernel and the C extension module that launches it, which Triton would compile at the launch."""
    import triton

    kernel = compile_kernel()
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    store(kernel)
