"""Grouped GEMM as a loop over experts that calls the linear ops of a kernel set."""

from collections.abc import Sequence

from torch import Tensor

from megatron_moe.kernels.kernel_set import OPS, KernelSet, Selection
from megatron_moe.kernels.ops import GroupedPart, Kernels
from megatron_moe.kernels.reference.backend import slices, with_accumulate

REASON = "loop over experts"


def sequential(kernels: Kernels) -> KernelSet:
    """Returns `kernels` with grouped GEMMs replaced by loops over experts, which copy the offsets to the host."""

    def grouped_forward(rows: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
        out_RO = rows.new_zeros(rows.shape[0], weight.shape[1])
        for expert, held in enumerate(slices(offsets_e)):
            out_RO[held] = kernels.linear_forward(rows[held], weight[expert], None)
        return out_RO

    def grouped_input_grad(grad: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
        out_RI = grad.new_zeros(grad.shape[0], weight.shape[2])
        for expert, held in enumerate(slices(offsets_e)):
            out_RI[held] = kernels.linear_input_grad(grad[held], weight[expert])
        return out_RI

    def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
        for (grad, rows, offsets_e), adds in with_accumulate(parts, accumulate):
            for expert, held in enumerate(slices(offsets_e)):
                kernels.linear_weight_grad(grad[held], rows[held], out[expert], adds)

    loops = {f.__name__: f for f in (grouped_forward, grouped_input_grad, grouped_weight_grad)}
    functions = {op: loops.get(op, getattr(kernels, op)) for op in OPS}
    choices = tuple(Selection(op, "looped", REASON) for op in loops)
    return KernelSet.of(functions, choices)
