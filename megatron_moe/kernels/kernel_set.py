"""Kernel set: one function per op, each from the backend selected for that op."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from typing import Any

from megatron_moe.config.text import aligned_columns
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.sm_carveout import release_sms_after
from megatron_moe.kernels.update_ops import UpdateOps
from megatron_moe.precision.linear_quantizer import Quantizers
from megatron_moe.precision.quantized_tensor import QuantizedTensor

MATMUL_OPS = (
    "linear_forward",
    "linear_input_grad",
    "linear_weight_grad",
    "grouped_forward",
    "grouped_input_grad",
    "grouped_weight_grad",
)
"""Matrix multiplication ops, whose operands may be `QuantizedTensor`s."""
QUANTIZED_MATMUL_OPS = tuple(f"quantized_{op}" for op in MATMUL_OPS)
"""Names of the matrix multiplications of `QuantizedTensor`s, under which backends implement them and `--kernel-per-op`
selects them."""
LOW_PRECISION_OPS = (
    "quantize_rows",
    "quantize_weight",
    "weight_amax_",
    "quantize_weight_part",
    "transpose_weight",
    "quantize_permuted",
    "permute_quantized",
    "dequantize_rows",
    "quantize_activation",
    "quantize_activation_grad",
    "rms_norm_quantized",
    *QUANTIZED_MATMUL_OPS,
)
"""Ops that are needed only with FP8 or FP4 GEMMs."""
OPS: tuple[str, ...] = (
    *(name for name in (*vars(Kernels), *vars(UpdateOps), *vars(Quantizers)) if not name.startswith("_")),
    *QUANTIZED_MATMUL_OPS,
)
"""Names of all ops in the order of the `Kernels` interface, followed by quantisation ops and multiplications of
quantised operands."""


class Priority(IntEnum):
    """Suitability of a backend for one op on one device and dtype."""

    NO = 0
    """Not supported."""
    YES = 1
    """Supported, but not better than plain torch."""
    BETTER = 2
    """Measured to be faster, or to use less memory, than plain torch."""
    BEST = 3
    """Measured to be faster, or to use less memory, than every other backend that is not specific to a device type."""
    TAILORED = 4
    """Written for this device type and measured to be faster than every other backend."""


@dataclass(frozen=True)
class Support:
    """Suitability of a backend for one op, with the reason."""

    fit: Priority
    reason: str


@dataclass(frozen=True)
class Selection:
    """Selected backend of one op, with the reason."""

    op: str
    backend: str
    reason: str


class KernelSet(Kernels):
    """Implements `Kernels` with the given functions. Created by `select_kernels` or `reference.bundle`."""

    choices: tuple[Selection, ...]

    @classmethod
    def of(cls, functions: Mapping[str, Callable[..., Any]], choices: tuple[Selection, ...]) -> "KernelSet":
        """Creates a kernel set from one function per op. Matrix multiplications call the function of the op
        `quantized_*` if an operand is a `QuantizedTensor`."""
        missing, unknown = set(OPS) - set(functions), set(functions) - set(OPS)
        assert not missing and not unknown, f"missing ops {sorted(missing)}, unknown ops {sorted(unknown)}"
        kernels = cls()
        for op, function in functions.items():
            if op in MATMUL_OPS:
                function = release_sms_after(_gemm(function, functions[f"quantized_{op}"]))
            setattr(kernels, op, function)
        kernels.choices = choices
        of_norms = {each.backend for each in choices if each.op in ("rms_norm", "add_rms_norm", "rms_norm_quantized")}
        kernels.fuses_norms = len(of_norms) == 1
        return kernels

    def summary(self) -> str:
        """Log line with the number of ops per backend."""
        counts = Counter(choice.backend for choice in self.choices)
        return f"kernels: {', '.join(f'{count} {backend}' for backend, count in sorted(counts.items()))}"

    def table(self) -> str:
        """Text table with one line per op: name of the op, selected backend and reason."""
        return "\n".join(aligned_columns([(choice.op, choice.backend, choice.reason) for choice in self.choices]))


def _gemm(plain: Callable[..., Any], quantized: Callable[..., Any]) -> Callable[..., Any]:
    """Function that calls `quantized` if an operand is a `QuantizedTensor`, and `plain` otherwise."""

    @wraps(plain)
    def gemm(first: Any, *others: Any, **named: Any) -> Any:
        # the first argument of grouped_weight_grad is a sequence of `GroupedPart`s; a loop takes less host time than a
        # generator
        parts = first if isinstance(first, list | tuple) else ((first,),)
        operands = itertools.chain(*parts, others, named.values())
        return (quantized if QuantizedTensor in map(type, operands) else plain)(first, *others, **named)

    return gemm
