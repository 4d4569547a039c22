"""Gradient of an embedding table: tokens are sorted by id, and the sum of each id's gradients is added to the buffer.

The sorted tokens are divided into segments. A program computes, in fp32, the gradient sum of each id in its segment.
An id that spans several segments has partial sums, which a second launch adds in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import INTERPRETED, cdiv, power_of_two, rows_of

ROWS = 16
"""Number of consecutive sorted tokens that one program sums."""
COLUMNS = 256
"""Columns of the embedding table per program."""


def embedding_grad(grad_TH: Tensor, ids_T: Tensor, out: Tensor, accumulate: bool) -> None:
    if not accumulate:
        out.zero_()
    grad_TH = rows_of(grad_TH)
    num_tokens, width = grad_TH.shape
    # int32 keys halve the passes of the radix sort; no embedding table has 2^31 rows
    sorted_T, order_T = torch.sort(ids_T.to(torch.int32), stable=True)
    columns = max(min(power_of_two(width), COLUMNS), 16)
    num_segments = cdiv(num_tokens, ROWS)
    if num_tokens:
        parts_S2H = torch.empty(num_segments, 2, width, device=out.device, dtype=torch.float32)
        grid = (num_segments, cdiv(width, columns))
        _sum_segments[grid](
            grad_TH, sorted_T, order_T, out, parts_S2H, num_tokens, width, grad_TH.stride(0),
            ROWS=ROWS, COLUMNS=columns, WIDEN=INTERPRETED,
        )  # fmt: skip
        _join_segments[grid](sorted_T, out, parts_S2H, num_tokens, width, ROWS=ROWS, COLUMNS=columns)


@triton.jit
def _sum_segments(
    grad_ptr, ids_ptr, order_ptr, out_ptr, parts_ptr, num_tokens, width, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Adds to `out` the gradient sum of each id whose tokens are all in this program's segment of sorted tokens.
    Partial sums of other ids go to `parts` [segments, 2, width]: index 0 if the id started in an earlier segment, else
    1."""
    first = tl.program_id(0) * ROWS
    positions = first + tl.arange(0, ROWS)
    inside = positions < num_tokens
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < width
    ids = tl.load(ids_ptr + positions, mask=inside, other=-1)
    tokens = tl.load(order_ptr + positions, mask=inside, other=0)
    grad_ptrs = grad_ptr + tokens[:, None] * stride + columns[None, :]
    grads = tl.load(grad_ptrs, mask=inside[:, None] & mask[None, :], other=0.0)
    # Rows of equal ids are summed on tensor cores, by multiplication with a matrix of 0 and 1, which is exact in every
    # format.
    same = ids[:, None] == ids[None, :]
    if WIDEN:
        grads = grads.to(tl.float32)
    totals = tl.dot(same.to(grads.dtype), grads, input_precision="ieee")
    ends = tl.load(ids_ptr + positions + 1, mask=positions + 1 < num_tokens, other=-1) != ids
    from_before = (tl.load(ids_ptr + first - 1, mask=first > 0, other=-1) == ids) & inside
    last = inside & (ends | (positions == first + ROWS - 1))
    whole = (last & ends & ~from_before)[:, None] & mask[None, :]
    pointers = out_ptr + ids.to(tl.int64)[:, None] * width + columns[None, :]
    sums = tl.load(pointers, mask=whole, other=0.0).to(tl.float32) + totals
    tl.store(pointers, sums.to(out_ptr.dtype.element_ty), mask=whole)
    part = 2 * tl.program_id(0).to(tl.int64) + tl.where(from_before, 0, 1)
    waits = (last & (from_before | ~ends))[:, None] & mask[None, :]
    tl.store(parts_ptr + part[:, None] * width + columns[None, :], totals, mask=waits)


@triton.jit
def _join_segments(
    ids_ptr, out_ptr, parts_ptr, num_tokens, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Adds the partial sums of each id that spans several segments to `out`, in the program of its first segment."""
    segment = tl.program_id(0).to(tl.int64)
    first, behind = segment * ROWS, (segment + 1) * ROWS
    last_id = tl.load(ids_ptr + behind - 1, mask=behind <= num_tokens, other=-1)
    goes_on = tl.load(ids_ptr + behind, mask=behind < num_tokens, other=-2) == last_id
    from_before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-2) == last_id
    if goes_on and not from_before:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = columns < width
        total = tl.load(parts_ptr + (2 * segment + 1) * width + columns, mask=mask, other=0.0)
        others = segment + 1 + tl.arange(0, 16)
        more = True
        while more:
            begins = others * ROWS
            same = tl.load(ids_ptr + begins, mask=begins < num_tokens, other=-2) == last_id
            parts = parts_ptr + (2 * others[:, None]) * width + columns[None, :]
            total += tl.sum(tl.load(parts, mask=same[:, None] & mask[None, :], other=0.0), axis=0)
            others += 16
            more = tl.sum(same.to(tl.int32), axis=0) == 16
        pointers = out_ptr + last_id.to(tl.int64) * width + columns
        total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=mask)
