"""Gradient of an embedding table: tokens sorted by id, one program per id, added in fp32 straight into the buffer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import power_of_two, rows_of

ROWS = 16
"""Tokens of one id that a program adds at a time."""


def embedding_grad(grad_TH: Tensor, ids_T: Tensor, out: Tensor, accumulate: bool) -> None:
    """See `Kernels.embedding_grad`."""
    if not accumulate:
        out.zero_()
    grad_TH = rows_of(grad_TH)
    num_tokens, width = grad_TH.shape
    # a sort by digits takes half the passes over 32 bits, and no table has 2^31 rows
    sorted_T, order_T = torch.sort(ids_T.to(torch.int32), stable=True)
    columns = min(power_of_two(width), 512)
    if num_tokens:
        _embedding_grad[(num_tokens, triton.cdiv(width, columns))](
            grad_TH, sorted_T, order_T, out, num_tokens, width, grad_TH.stride(0), ROWS=ROWS, COLUMNS=columns
        )


@triton.jit
def _embedding_grad(
    grad_ptr, ids_ptr, order_ptr, out_ptr, num_tokens, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0)
    mine = tl.load(ids_ptr + first)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
    if mine != before:  # the first token of its id adds up all of them
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        again = mine == mine
        while again:
            places = first + tl.arange(0, ROWS)
            same = tl.load(ids_ptr + places, mask=places < num_tokens, other=-1) == mine
            tokens = tl.load(order_ptr + places, mask=same, other=0)
            held = same[:, None] & (columns < width)[None, :]
            grads = tl.load(grad_ptr + tokens[:, None] * stride + columns[None, :], mask=held, other=0.0)
            total += tl.sum(grads.to(tl.float32), axis=0)
            first += ROWS
            again = tl.sum(same.to(tl.int32), axis=0) == ROWS
        place = out_ptr + mine.to(tl.int64) * width + columns
        total += tl.load(place, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(place, total.to(out_ptr.dtype.element_ty), mask=columns < width)
