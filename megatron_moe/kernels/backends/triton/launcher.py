"""Launches compiled Triton and Gluon kernels in a third of the host time that Triton's own launch takes.

Triton's launch formats its cache key as text, reads settings, compares global variables and calls empty hooks at every
launch. Here, a kernel that was launched once is found by the same specialisation of its arguments, computed by Triton's
binder, and passed directly to the C function that launches it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

VERSION = "3.6"
"""Triton version whose launcher has the interface used here. Other versions keep their own launch."""
_COMPILED = "compiled_launches"
"""Attribute of a kernel function that holds its `_Launch` by device and specialisation."""


class _Launch(NamedTuple):
    """Compiled kernel, loaded on one device."""

    kernel: Any
    launch: Callable[..., None]
    """C function, with a wrapper that encodes TMA descriptors if the kernel has any."""
    constant: tuple[Any, ...]
    """Arguments between stream and kernel arguments: function, launch attributes, scratch memory, metadata, hooks."""


def shorten_launches() -> None:
    """Replaces the launch of the kernels of this package in this process. No effect if it is replaced already, or with
    another version of Triton."""
    import triton
    from triton.runtime.jit import JITFunction

    by_triton = JITFunction.run
    if triton.__version__.startswith(f"{VERSION}.") and by_triton.__module__ != __name__:
        JITFunction.run = _shortened(by_triton)


def _shortened(by_triton: Callable[..., Any]) -> Callable[..., Any]:
    """Launch function that calls `by_triton`, Triton's own, for kernels that are not compiled or need its extras."""
    from triton import knobs
    from triton.runtime import driver

    package, runtime = f"{__name__.partition('.')[0]}.", knobs.runtime

    def run_without_hooks(jit: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        has_hooks = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or jit.pre_run_hooks
        if warmup or has_hooks or not jit.__module__.startswith(package):
            return by_triton(jit, *args, grid=grid, warmup=warmup, **options)
        device = driver.active.get_current_device()
        *_, binder = jit.device_caches[device]
        bound, specialization, others = binder(*args, **options)
        key = (device, *specialization, *others.items())
        launches = jit.__dict__.setdefault(_COMPILED, {})
        found = launches.get(key)
        if found is None:
            kernel = by_triton(jit, *args, grid=grid, warmup=False, **options)
            if (found := _launch_of(kernel)) is not None:
                launches[key] = found
            return kernel
        stream = driver.active.get_current_stream(device)
        found.launch(*(*grid, 1, 1)[:3], stream, *found.constant, *bound.values())
        return found.kernel

    run_without_hooks.__module__ = __name__
    return run_without_hooks


def _launch_of(kernel: Any) -> _Launch | None:
    """Launch of a kernel that Triton has launched once; None if the kernel needs scratch memory."""
    launcher = kernel.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    attributes = launcher.launch_cooperative_grid, launcher.launch_pdl
    scratch, hooks = (None, None), (None, None)
    constant = (kernel.function, *attributes, *scratch, kernel.packed_metadata, None, *hooks)
    return _Launch(kernel, launcher.launch, constant)
