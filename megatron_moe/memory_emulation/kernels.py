"""Selects kernel fakes for memory emulation on a machine without the target GPU.

A fake allocates the same tensors as its kernel and saves the same tensors for backward, but computes nothing
(`kernels/fakes/`). Ops without a fake use plain torch, as they do on the GPU.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.precision import LowPrecisionConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.fakes import low_precision as fake_low_precision
from megatron_moe.kernels.fakes.backend import fake_backend
from megatron_moe.kernels.kernel_set import LOW_PRECISION_OPS, OPS, KernelSet, Selection
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import BACKENDS, discover_backends, select_kernels


def emulated_kernels(config: KernelConfig, dtype: torch.dtype) -> KernelSet:
    """Kernel set with the fakes of the requested backends. `auto` selects the same backends as on a Hopper GPU.

    Raises EnvironmentProblem if a requested backend has no fakes.
    """
    requests, functions, choices = dict(config.kernel_per_op), {}, []
    for op in OPS:
        name, function = _selected(op, requests.get(op, config.kernel_backend), dtype)
        functions[op] = function
        choices.append(
            Selection(
                op, name, "allocates the same memory, but computes nothing" if name != reference.NAME else "plain torch"
            )
        )
    return KernelSet.of(functions, tuple(choices))


def triton_kernels(
    config: KernelConfig, device: torch.device, dtype: torch.dtype, low_precision: LowPrecisionConfig | None = None
) -> KernelSet:
    """Kernel set for `meta` tensors with the Triton kernels that the registry selects for `device`, and fakes for all
    other ops. `low_precision`: FP8 or FP4 recipe of the run, or None. The caller prevents launches
    (`backends/triton/precompile.py`)."""
    selected, fakes = select_kernels(config, device, dtype, low_precision), emulated_kernels(KernelConfig(), dtype)
    in_triton = {backend.name for backend in discover_backends(BACKENDS) if "triton" in backend.needs}
    own = {choice.op for choice in selected.choices if choice.backend in in_triton}
    return KernelSet.of({op: getattr(selected if op in own else fakes, op) for op in OPS}, selected.choices)


def _selected(op: str, request: str, dtype: torch.dtype) -> tuple[str, Callable[..., Any]]:
    if op in LOW_PRECISION_OPS:
        name = "triton" if hasattr(fake_backend("triton"), op) else "hopper"
        return f"as {name}", getattr(fake_low_precision, op)
    if request not in ("auto", "hopper", *_FAKED, reference.NAME):
        raise EnvironmentProblem(
            f"memory emulation on a CPU does not support kernel backend '{request}' for '{op}'; use auto, "
            f"hopper, {', '.join(_FAKED)} or {reference.NAME}, or emulate on a GPU"
        )
    if request == reference.NAME or dtype is torch.float64:
        # the reference would read row offsets on the host, but emulated tensors have no data
        return reference.NAME, getattr(fake_backend(_HOST_READS[op]) if op in _HOST_READS else reference, op)
    for name in (torch_native.NAME,) if request == torch_native.NAME else _FAKED:
        backend = fake_backend(name)
        if hasattr(backend, op):
            return f"as {name}", getattr(backend, op)
    return reference.NAME, getattr(reference, op)


_FAKED = ("triton", torch_native.NAME)
"""Backends with fakes, in order of preference on a Hopper GPU."""
_HOST_READS: Mapping[str, str] = MappingProxyType(
    {"grouped_forward": torch_native.NAME, "grouped_input_grad": torch_native.NAME, "grouped_weight_grad": "triton"}
)
"""Maps each op whose reference implementation reads row offsets on the host to the backend whose fake is used
instead."""
