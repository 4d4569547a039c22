"""Helpers of the Triton kernels: SM counts, matrix views, matmuls, sums of partial results."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.autograd import accumulate_grad
from megatron_moe.kernels.sm_carveout import num_reserved_sms

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if Triton's interpreter runs the kernels on the CPU. Its bf16 matmul is wrong, so kernels convert operands to
fp32."""
HOPPER_SMS = 132
"""SMs of an H100 or H200; memory emulation (`kernels/fakes/`) assumes this number for `meta` tensors."""


def num_sms(device: torch.device) -> int:
    """Number of SMs of a GPU; that of Hopper for meta tensors, and 4 on the CPU, where the interpreter runs programs
    sequentially."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return HOPPER_SMS if device.type == "meta" else 4


def num_free_sms(device: torch.device) -> int:
    """Number of SMs of a GPU that are not reserved for an exchange in progress."""
    return num_sms(device) - num_reserved_sms()


def rows_of(x: Tensor) -> Tensor:
    """Reshapes [..., W] to a matrix [rows, W] with stride 1 in the last dim; copies only if necessary."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(-1) == 1 or matrix.shape[-1] == 1 else matrix.contiguous()


def cdiv(number: int, divisor: int) -> int:
    """Quotient, rounded up. Replaces `triton.cdiv`, which takes microseconds per call on the host."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """Smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def sum_of_shares(shares_PW: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums the partial results of P programs, fp32 [P, W] -> [W], in an order that depends only on P."""
    out_W = torch.empty(shares_PW.shape[1], device=shares_PW.device, dtype=dtype)
    _add_shares(shares_PW, out_W, dtype, accumulate=False)
    return out_W


def weight_grad(shares_PW: Tensor, weight: Tensor) -> Tensor | None:
    """Gradient of a weight with W elements from the partial results of all P programs, fp32 [P, W]: returns it, or adds
    it to the weight's gradient buffer (`accumulate_grad`). Either way, it is rounded once to the weight's dtype. A
    deferred call does not read the weight, whose storage FSDP may have released by then."""
    dtype = weight.dtype

    def compute(out: Tensor, accumulate: bool) -> None:
        _add_shares(shares_PW, out, dtype, accumulate=accumulate)

    return accumulate_grad(weight, compute)


def _add_shares(shares_PW: Tensor, out: Tensor, dtype: torch.dtype, *, accumulate: bool) -> None:
    """Writes the sum of the shares, rounded to `dtype`, to `out`, or adds it."""
    num, width = shares_PW.shape
    rows = min(power_of_two(num), 256)
    columns = 2048 // rows
    _sum_shares[(cdiv(width, columns),)](
        shares_PW,
        out,
        num,
        width,
        shares_PW.stride(0),
        DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        ADD=accumulate,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=8,
    )


@triton.jit
def dot(a, b, total, WIDEN: tl.constexpr):
    """Matmul of a and b in fp32, plus `total` if given. `WIDEN`: converts the operands to fp32 first."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _sum_shares(
    shares_ptr,
    out_ptr,
    num,
    width,
    stride,
    DTYPE: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, num, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < num)[:, None] & (columns < width)[None, :]
        total += tl.load(shares_ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    out = tl.sum(total, axis=0).to(DTYPE)
    if ADD:
        before = tl.load(out_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
        out = before + out.to(tl.float32)
    tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=columns < width)
