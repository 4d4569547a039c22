"""Triton kernels that quantise matrices to FP8 with a scale per block of 1x128 or 128x128 elements.

Each kernel reads its input once. Elements are multiplied by their block's scale in fp32, rounded to nearest even and
saturated. Inverse scales are stored (value = element * inverse scale); that of a block with an inf or NaN is NaN.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.config.registry import ELEMENTS
from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two, rows_of
from megatron_moe.kernels.backends.triton.rows import COPY_TILE, permute
from megatron_moe.kernels.ops import RowIndex
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor
from megatron_moe.precision.quantizers import element_dtype

BLOCK = 128
"""Length of a scale block."""
LENGTH = tl.constexpr(BLOCK)
ROWS_TILE = (8, 1024)
"""(rows, columns) of a tile of a rowwise cast; the fastest on an H200."""
BAND, BLOCK_WARPS = 32, 4
"""(length of a band, number of warps) of `_quantize_blocks`."""
WEIGHT_WARPS = 4
"""Warps per 128x128 tile of casts of weights; the fastest on an H200."""
_MANTISSA = tl.constexpr(0x7FFFFF)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INF, _NAN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)


E4M3 = OperandFormat(element="e4m3", block=(1, BLOCK), scale="power of 2")
"""Format of rows (inputs and output gradients) in the blockwise recipe."""
E4M3_WEIGHT = replace(E4M3, block=(BLOCK, BLOCK))
"""Format of weights in the blockwise recipe."""


def columnwise_copy(
    x_TK: Tensor,
    token_R: Tensor | None,
    num_rows: int,
    row: QuantizedCopy | None,
    fmt: OperandFormat,
    offsets_e: Tensor | None,
) -> QuantizedCopy:
    """Makes the columnwise copy of `num_rows` rows, and the rowwise copy if `row` is given.

    `token_R`: position of each row in `x_TK`, or -1 for zeros; None means that rows are in order. `offsets_e`: ends of
    the experts' rows; a scale block contains rows of one expert only. None means that all rows form one group.
    """
    width = x_TK.shape[1]
    blocks = None if offsets_e is None else row_blocks_of_experts(offsets_e, num_rows)
    data, scales, _ = empty_columns(num_rows, width, x_TK.device, fmt, blocks)
    if num_rows and width:
        out = row or QuantizedCopy(data, scales)  # placeholder if no rowwise copy is made
        _quantize_blocks[(cdiv(width, BLOCK), len(scales))](
            x_TK, token_R, out.data, out.scales, data, scales, blocks, num_rows, width, x_TK.stride(0), data.stride(0),
            ROWWISE=row is not None, BAND=BAND, **quantize_constants(fmt, x_TK.dtype), num_warps=BLOCK_WARPS,
        )  # fmt: skip
    return QuantizedCopy(data[:, :num_rows] if blocks is None else data, scales)


MakeColumns = Callable[[Tensor, Tensor | None, int, QuantizedCopy | None, OperandFormat, Tensor | None], QuantizedCopy]
"""Signature of `columnwise_copy`, which other backends implement too."""


def quantize_rows(
    x: Tensor,
    fmt: OperandFormat = E4M3,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    offsets_e: Tensor | None = None,
    scale: Tensor | None = None,
    seed: Tensor | None = None,
    make_columns: MakeColumns = columnwise_copy,
) -> QuantizedTensor:
    """See `Kernels.quantize_rows`, for blocks of 1x128."""
    assert fmt.block == (1, BLOCK) and scale is None, f"{fmt}"
    x_RK = rows_of(x)
    num_rows, width = x_RK.shape
    row = empty_rows(num_rows, width, x.device, fmt) if rowwise else None
    column = None
    if columnwise:
        column = make_columns(x_RK, None, num_rows, row, fmt, offsets_e)
    elif row is not None and x_RK.numel():
        rows, columns = ROWS_TILE
        _quantize_rows[(cdiv(num_rows, rows), cdiv(width, columns))](
            x_RK, row.data, row.scales, num_rows, width, x_RK.stride(0), ROWS=rows, COLUMNS=columns,
            **quantize_constants(fmt, x.dtype),
        )  # fmt: skip
    return QuantizedTensor(row, column, fmt.block, x.dtype)


def quantize_weight(
    weight: Tensor,
    fmt: OperandFormat = E4M3_WEIGHT,
    *,
    columnwise: bool = True,
    scale: Tensor | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """See `Kernels.quantize_weight`, for blocks of 128x128. Always makes both copies."""
    assert fmt.block == (BLOCK, BLOCK) and scale is None, f"{fmt}"
    stack = weight.contiguous().view(-1, *weight.shape[-2:])
    num, outputs, inputs = stack.shape
    blocks_o, blocks_i = cdiv(outputs, BLOCK), cdiv(inputs, BLOCK)

    def empty_copy(shape: tuple[int, int], blocks: tuple[int, int]) -> QuantizedCopy:
        lead = weight.shape[:-2]
        return QuantizedCopy(
            torch.empty(*lead, *shape, device=weight.device, dtype=element_dtype(fmt.element)),
            torch.empty(*lead, *blocks, device=weight.device, dtype=torch.float32),
        )

    if out is None:
        row = empty_copy((outputs, inputs), (blocks_o, blocks_i))
        column = empty_copy((inputs, outputs), (blocks_i, blocks_o))
        out = QuantizedTensor(row, column, fmt.block, weight.dtype)
    if stack.numel():
        _quantize_weight[(blocks_i, blocks_o, num)](
            stack, *out.row_copy[:2], *out.column_copy[:2], outputs, inputs,
            **quantize_constants(fmt, weight.dtype), num_warps=WEIGHT_WARPS,
        )  # fmt: skip
    return out


def quantize_permuted(
    tokens_TH: Tensor,
    index: RowIndex,
    fmt: OperandFormat = E4M3,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    make_columns: MakeColumns = columnwise_copy,
) -> QuantizedTensor:
    """See `Kernels.quantize_permuted`. Also used in the backward of unpermute, to permute
    and quantise the output gradients in one kernel."""
    tokens_TH = rows_of(tokens_TH)
    num_rows, (num_tokens, width) = len(index.token_R), tokens_TH.shape
    row = empty_rows(num_rows, width, tokens_TH.device, fmt) if rowwise else None
    column = None
    if columnwise:
        column = make_columns(tokens_TH, index.token_R, num_rows, row, fmt, index.offsets_E)
    elif index.rows_TK is None:  # a dense routing index has no row per choice
        return quantize_rows(permute(tokens_TH, index), fmt)
    elif row is not None and row.data.numel():
        columns = min(max(power_of_two(width), BLOCK), COPY_TILE)
        num_programs = max(num_tokens, 1)
        each = cdiv(num_rows, num_programs)
        _quantize_tokens[(num_programs, cdiv(width, columns))](
            tokens_TH, index.rows_TK.contiguous(), index.token_R, row.data, row.scales, num_tokens, num_rows, width,
            tokens_TH.stride(0), each, EACH=power_of_two(each), TOPK=index.rows_TK.shape[1], COLUMNS=columns,
            **quantize_constants(fmt, tokens_TH.dtype),
        )  # fmt: skip
    return QuantizedTensor(row, column, fmt.block, tokens_TH.dtype)


def permute_quantized(tokens: QuantizedTensor, index: RowIndex) -> tuple[Tensor, QuantizedTensor]:
    """See `Kernels.permute_quantized`, for blocks of 1x128."""
    assert tokens.block == (1, BLOCK) and index.rows_TK is not None, f"{tokens.block}"
    data, scales, _ = tokens.row_copy
    num_rows, (num_tokens, width) = len(index.token_R), data.shape
    rows_RH = torch.empty(num_rows, width, device=data.device, dtype=tokens.dtype)
    row = QuantizedCopy(
        torch.empty(num_rows, width, device=data.device, dtype=data.dtype),
        torch.empty(cdiv(width, BLOCK), num_rows, device=data.device, dtype=torch.float32),
    )
    if rows_RH.numel():
        columns = min(max(power_of_two(width), BLOCK), COPY_TILE)
        num_programs = max(num_tokens, 1)
        each = cdiv(num_rows, num_programs)
        _copy_quantized[(num_programs, cdiv(width, columns))](
            data, scales, index.rows_TK.contiguous(), index.token_R, row.data, row.scales, rows_RH,
            num_tokens, num_rows, width, *scales.stride(), each,
            EACH=power_of_two(each), TOPK=index.rows_TK.shape[1], COLUMNS=columns,
        )  # fmt: skip
    return rows_RH, QuantizedTensor(row, None, tokens.block, tokens.dtype)


def dequantize_rows(rows: QuantizedTensor) -> Tensor:
    """See `Kernels.dequantize_rows`, for blocks of 1x128."""
    assert rows.block == (1, BLOCK), f"{rows.block}"
    data, scales, _ = rows.row_copy
    num_rows, width = data.shape
    out = torch.empty(data.shape, device=data.device, dtype=rows.dtype)
    if out.numel():
        _dequantize_rows[(cdiv(num_rows, BLOCK // 2), cdiv(width, BLOCK))](
            data, scales, out, num_rows, width, *scales.stride(), ROWS=BLOCK // 2, num_warps=4
        )
    return out


def dequantize_columns(rows: QuantizedTensor) -> Tensor:
    """Values [128 B, C] of a columnwise copy [C, R] in B blocks of 1x128, transposed back, with gaps between experts if
    the copy has them; exact in bf16 if the scales are powers of two. Rows from R on are undefined."""
    assert rows.block == (1, BLOCK), f"{rows.block}"
    data, scales, _ = rows.column_copy
    num_blocks, width = scales.shape
    out = torch.empty(num_blocks * BLOCK, width, device=data.device, dtype=rows.dtype)
    if out.numel():
        _dequantize_columns[(num_blocks, cdiv(width, BLOCK))](
            data, scales, out, data.shape[1], width, data.stride(0), num_warps=4
        )
    return out


def row_blocks_of_experts(offsets_e: Tensor, num_rows: int) -> Tensor:
    """First row and number of rows, int32 [num_rows // 128 + e, 2], of each block of 128 rows, expert by expert. Unused
    entries at the end are 0."""
    num_experts = len(offsets_e)
    blocks = torch.zeros(num_rows // BLOCK + num_experts, 2, device=offsets_e.device, dtype=torch.int32)
    _list_row_blocks[(num_experts,)](offsets_e, blocks, num_experts, EXPERTS=power_of_two(num_experts), EACH=32)
    return blocks


def empty_rows(num_rows: int, width: int, device: torch.device, fmt: OperandFormat) -> QuantizedCopy:
    """Uninitialised rowwise copy of a matrix [num_rows, width]."""
    return QuantizedCopy(
        torch.empty(num_rows, width, device=device, dtype=element_dtype(fmt.element)),
        torch.empty(cdiv(width, BLOCK), num_rows, device=device, dtype=torch.float32),
    )


def empty_columns(
    num_rows: int, width: int, device: torch.device, fmt: OperandFormat, blocks: Tensor | None
) -> QuantizedCopy:
    """Columnwise copy of a matrix [num_rows, width] with uninitialised elements, padded to whole blocks. `blocks`: the
    table of `row_blocks_of_experts`; None means that all rows form one group. Scales of unused blocks are 1."""
    num_blocks = cdiv(num_rows, BLOCK) if blocks is None else len(blocks)
    make = torch.empty if blocks is None else torch.ones
    return QuantizedCopy(
        torch.empty(width, num_blocks * BLOCK, device=device, dtype=element_dtype(fmt.element)),
        make(num_blocks, width, device=device, dtype=torch.float32),
    )


def quantize_constants(fmt: OperandFormat, source: torch.dtype) -> dict[str, float | bool]:
    """Constants of the kernels for inputs of dtype `source`, whose largest number replaces an infinite scale."""
    assert fmt.element != "e2m1" and fmt.scale in ("fp32", "power of 2"), f"{fmt}"
    bound = torch.finfo(source).max
    return {"LARGEST": ELEMENTS.get(fmt.element).largest, "BOUND": bound, "POWER_OF_TWO": fmt.scale == "power of 2"}


@triton.jit
def magnitude_bits(x):
    """Bits of |x|, int32. They are ordered like the magnitudes; NaN is the largest."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def scales_of(amax_bits, LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Returns (scale, inverse scale) of blocks with the largest magnitudes `amax_bits` (see `magnitude_bits`). The
    scale is 1 for blocks of zeros. For blocks with a non-finite element, the scale is 1 and the inverse scale is
    NaN."""
    usable = (amax_bits > 0) & (amax_bits < _INF)
    if POWER_OF_TWO:
        # rounds LARGEST / amax down to a power of two with integer arithmetic on exponents; LARGEST has the mantissa
        # 1.75 in both formats
        tl.static_assert(LARGEST == 448.0 or LARGEST == 57344.0)
        largest: tl.constexpr = 8 if LARGEST == 448.0 else 15
        above = ((amax_bits & _MANTISSA) > 0x600000).to(tl.int32)
        exponent = tl.minimum(254 + largest - (amax_bits >> 23) - above, 254)
        exponent = tl.where(usable, exponent, 127)
        inverse = tl.where(exponent == 254, 1 << 22, (254 - exponent) << 23)  # 2^-127 is subnormal
        inverse = tl.where(amax_bits < _INF, inverse, _NAN)
        return (exponent << 23).to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)
    else:
        amax = tl.where(usable, amax_bits, 0x3F800000).to(tl.float32, bitcast=True)
        scale = tl.minimum(tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax), BOUND)
        scale = tl.where(usable, scale, 1.0)
        inverse = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
        return scale, tl.where(amax_bits < _INF, inverse, float("nan"))


@triton.jit
def quantize_tile(x, element: tl.constexpr, LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Quantises a tile [ROWS, COLUMNS] in blocks of 1x128 -> (elements, inverse scales [ROWS, COLUMNS / 128])."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    blocks = x.to(tl.float32).reshape(rows, columns // LENGTH, LENGTH)
    scale, inverse = scales_of(tl.max(magnitude_bits(blocks), axis=2), LARGEST, BOUND, POWER_OF_TWO)
    return (blocks * scale[:, :, None]).to(element).reshape(rows, columns), inverse


@triton.jit
def store_tile(
    x, rows, first_column, out_ptr, scales_ptr, num_rows, width, end_row, end_column,
    LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr, VECTOR: tl.constexpr = 16,
):  # fmt: skip
    """Quantises a tile of a matrix [num_rows, width] in blocks of 1x128 and stores its elements and inverse scales, but
    not beyond `end_row` and `end_column`. `VECTOR`: elements that a thread stores at a time, up to 16."""
    tile_columns: tl.constexpr = x.shape[1]
    columns = tl.arange(0, tile_columns)
    if VECTOR < 16:  # tells the compiler that these offsets are consecutive, which it cannot see
        columns = columns // VECTOR * VECTOR + columns % VECTOR
    columns += first_column
    q, inverse = quantize_tile(x, out_ptr.dtype.element_ty, LARGEST, BOUND, POWER_OF_TWO)
    mask = (rows < end_row)[:, None]
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], q, mask=mask & (columns < end_column)[None, :])
    blocks = first_column // LENGTH + tl.arange(0, tile_columns // LENGTH)
    inside = mask & (blocks * LENGTH < end_column)[None, :]
    tl.store(scales_ptr + blocks.to(tl.int64)[None, :] * num_rows + rows[:, None], inverse, mask=inside)


@triton.jit
def _quantize_rows(
    x_ptr, out_ptr, scales_ptr, num_rows, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    store_tile(x, rows, first, out_ptr, scales_ptr, num_rows, width, num_rows, width, LARGEST, BOUND, POWER_OF_TWO)


@triton.jit
def _list_row_blocks(offsets_ptr, table_ptr, num_experts, EXPERTS: tl.constexpr, EACH: tl.constexpr):
    """Writes (first row, number of rows) of each of an expert's row blocks."""
    own_expert = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(offsets_ptr + expert, mask=expert < num_experts, other=0)
    starts = tl.load(offsets_ptr + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    num_blocks = tl.cdiv(ends - starts, LENGTH)
    before = tl.sum(tl.where(expert < own_expert, num_blocks, 0), axis=0)
    start = tl.sum(tl.where(expert == own_expert, starts, 0), axis=0)
    end = tl.sum(tl.where(expert == own_expert, ends, 0), axis=0)
    for first in range(0, tl.cdiv(end - start, LENGTH), EACH):
        block = first + tl.arange(0, EACH)
        row = start + block * LENGTH
        pointers = table_ptr + 2 * (before + block)
        tl.store(pointers, row, mask=row < end)
        tl.store(pointers + 1, tl.minimum(end - row, LENGTH), mask=row < end)


@triton.jit
def block_of(blocks_ptr, block, num_rows):
    """Returns (first row, number of rows) of a block of 128 rows. `blocks_ptr`: table of `row_blocks_of_experts`, or
    None."""
    if blocks_ptr is None:
        first = block * LENGTH
        count = tl.minimum(num_rows - first, LENGTH).to(tl.int32)
    else:
        first = tl.load(blocks_ptr + 2 * block).to(tl.int64)
        count = tl.load(blocks_ptr + 2 * block + 1)
    return first, count


@triton.jit
def store_across(
    x, block, count, first_column, across_ptr, scales_ptr, width, end_column, stride,
    LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Quantises a tile [128, BAND] of a matrix with `width` columns in blocks of 128x1 and stores it transposed.
    `count`: number of valid rows. Columns from `end_column` on are not stored."""
    band: tl.constexpr = x.shape[1]
    columns = first_column + tl.arange(0, band)
    mask = (columns < end_column) & (count > 0)
    scale, inverse = scales_of(tl.max(magnitude_bits(x), axis=0), LARGEST, BOUND, POWER_OF_TWO)
    tl.store(scales_ptr + block * width + columns, inverse, mask=mask)
    across = tl.trans((x.to(tl.float32) * scale[None, :]).to(across_ptr.dtype.element_ty))
    base = across_ptr + first_column.to(tl.int64) * stride + block * LENGTH
    offsets = tl.arange(0, band)[:, None] * stride + tl.arange(0, LENGTH)[None, :]
    tl.store(base + offsets, across, mask=mask[:, None])


@triton.jit
def _quantize_blocks(
    x_ptr, token_ptr, out_ptr, scales_ptr, across_ptr, across_scales_ptr, blocks_ptr, num_rows, width, stride,
    across_stride, ROWWISE: tl.constexpr, BAND: tl.constexpr,
    LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Quantises a block of 128x128 elements in bands of rows, and then again, from the cache, in bands of columns.
    Bands need few registers, so that enough programs run concurrently to hide the latency of loads."""
    column, block = tl.program_id(0) * LENGTH, tl.program_id(1).to(tl.int64)
    first, count = block_of(blocks_ptr, block, num_rows)
    whole, band = tl.arange(0, LENGTH), tl.arange(0, BAND)
    for start in tl.static_range(0, LENGTH if ROWWISE else 0, BAND):
        x = _load_tile(x_ptr, token_ptr, first, start + band, count, column + whole, width, stride)
        store_tile(
            x, first + start + band, column, out_ptr, scales_ptr, num_rows, width, first + count, width,
            LARGEST, BOUND, POWER_OF_TWO,
        )  # fmt: skip
    for start in tl.static_range(0, LENGTH, BAND):
        x = _load_tile(x_ptr, token_ptr, first, whole, count, column + start + band, width, stride)
        store_across(
            x, block, count, column + start, across_ptr, across_scales_ptr, width, width, across_stride,
            LARGEST, BOUND, POWER_OF_TWO,
        )  # fmt: skip


@triton.jit
def _load_tile(x_ptr, token_ptr, first, rows, count, columns, width, stride):
    """Loads the rows `first` + `rows`, or with `token_ptr` the tokens of these rows; 0 from row `count` on."""
    mask = rows < count
    source = first + rows
    if token_ptr is not None:
        source = tl.load(token_ptr + source, mask=mask, other=-1)
        mask = source >= 0
    pointers = x_ptr + source[:, None] * stride + columns[None, :]
    return tl.load(pointers, mask=mask[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _quantize_weight(
    x_ptr, out_ptr, scales_ptr, across_ptr, across_scales_ptr, outputs, inputs,
    LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    block_i, block_o = tl.program_id(0), tl.program_id(1)
    blocks_o, blocks_i = tl.cdiv(outputs, LENGTH), tl.cdiv(inputs, LENGTH)
    # offsets within a tile fit into 32 bits
    each = tl.arange(0, LENGTH)
    inside_o = block_o * LENGTH + each < outputs
    inside_i = block_i * LENGTH + each < inputs
    element_offsets = matrix * outputs * inputs
    first = element_offsets + block_o.to(tl.int64) * LENGTH * inputs + block_i * LENGTH
    offsets = each[:, None] * inputs + each[None, :]
    mask = inside_o[:, None] & inside_i[None, :]
    x = tl.load(x_ptr + first + offsets, mask=mask, other=0.0)
    amax = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
    scale, inverse = scales_of(tl.full((1,), 0, tl.int32) + amax, LARGEST, BOUND, POWER_OF_TWO)
    q = (x.to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + first + offsets, q, mask=mask)
    first = element_offsets + block_i.to(tl.int64) * LENGTH * outputs + block_o * LENGTH
    mask = inside_i[:, None] & inside_o[None, :]
    tl.store(across_ptr + first + each[:, None] * outputs + each[None, :], tl.trans(q), mask=mask)
    one = matrix * blocks_o * blocks_i + tl.arange(0, 1)
    tl.store(scales_ptr + one + block_o * blocks_i + block_i, inverse)
    tl.store(across_scales_ptr + one + block_i * blocks_o + block_o, inverse)


@triton.jit
def _quantize_tokens(
    tokens_ptr, positions_ptr, token_ptr, rows_ptr, scales_ptr, num_tokens, num_rows, width, stride, rows_each,
    EACH: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)[None, :]
    blocks = (first // LENGTH + tl.arange(0, COLUMNS // LENGTH))[None, :]
    inside, has_block = columns < width, blocks * LENGTH < width
    blocks = blocks.to(tl.int64) * num_rows
    # see `rows._copy_tokens`: every program clears the padding rows in its part of the rows
    own = token * rows_each + tl.arange(0, EACH)
    requested = (tl.arange(0, EACH) < rows_each) & (own < num_rows)
    some_empty = tl.min(tl.load(token_ptr + own, mask=requested, other=0), axis=0) < 0
    if token < num_tokens:
        x = tl.load(tokens_ptr + token * stride + columns, mask=inside, other=0.0)
        q, inverse = quantize_tile(x, rows_ptr.dtype.element_ty, LARGEST, BOUND, POWER_OF_TWO)
        for choice in tl.static_range(TOPK):
            row = tl.load(positions_ptr + token * TOPK + choice)
            tl.store(rows_ptr + row * width + columns, q, mask=inside & (row >= 0))
            tl.store(scales_ptr + blocks + row, inverse, mask=has_block & (row >= 0))
    if some_empty:
        for number in range(rows_each):
            row = token * rows_each + number
            if tl.load(token_ptr + row, mask=row < num_rows, other=0) < 0:
                nothing = tl.zeros((1, COLUMNS), tl.float32).to(rows_ptr.dtype.element_ty)
                tl.store(rows_ptr + row * width + columns, nothing, mask=inside)
                tl.store(scales_ptr + blocks + row, tl.full((1, COLUMNS // LENGTH), 1.0, tl.float32), mask=has_block)


@triton.jit
def _copy_quantized(
    tokens_ptr, token_scales_ptr, positions_ptr, token_ptr, rows_ptr, scales_ptr, values_ptr,
    num_tokens, num_rows, width, block_stride, token_stride, rows_each,
    EACH: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)[None, :]
    blocks = (first // LENGTH + tl.arange(0, COLUMNS // LENGTH))[None, :]
    inside, has_block = columns < width, blocks * LENGTH < width
    # see `rows._copy_tokens`: every program clears the padding rows in its part of the rows
    own = token * rows_each + tl.arange(0, EACH)
    requested = (tl.arange(0, EACH) < rows_each) & (own < num_rows)
    some_empty = tl.min(tl.load(token_ptr + own, mask=requested, other=0), axis=0) < 0
    if token < num_tokens:
        q = tl.load(tokens_ptr + token * width + columns, mask=inside)
        scales = tl.load(token_scales_ptr + token * token_stride + blocks * block_stride, mask=has_block, other=1.0)
        values = q.to(tl.float32).reshape(1, COLUMNS // LENGTH, LENGTH) * scales[:, :, None]
        values = values.reshape(1, COLUMNS).to(values_ptr.dtype.element_ty)
        for choice in tl.static_range(TOPK):
            row = tl.load(positions_ptr + token * TOPK + choice)
            tl.store(rows_ptr + row * width + columns, q, mask=inside & (row >= 0))
            tl.store(values_ptr + row * width + columns, values, mask=inside & (row >= 0))
            tl.store(scales_ptr + blocks.to(tl.int64) * num_rows + row, scales, mask=has_block & (row >= 0))
    if some_empty:
        for number in range(rows_each):
            row = token * rows_each + number
            if tl.load(token_ptr + row, mask=row < num_rows, other=0) < 0:
                nothing = tl.zeros((1, COLUMNS), tl.float32)
                tl.store(rows_ptr + row * width + columns, nothing.to(rows_ptr.dtype.element_ty), mask=inside)
                tl.store(values_ptr + row * width + columns, nothing.to(values_ptr.dtype.element_ty), mask=inside)
                ones = tl.full((1, COLUMNS // LENGTH), 1.0, tl.float32)
                tl.store(scales_ptr + blocks.to(tl.int64) * num_rows + row, ones, mask=has_block)


@triton.jit
def _dequantize_rows(x_ptr, scales_ptr, out_ptr, num_rows, width, block_stride, row_stride, ROWS: tl.constexpr):
    block = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = block * LENGTH + tl.arange(0, LENGTH)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    elements = rows[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + elements, mask=mask, other=0.0).to(tl.float32)
    scales = tl.load(scales_ptr + block * block_stride + rows * row_stride, mask=rows < num_rows, other=0.0)
    tl.store(out_ptr + elements, (x * scales[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_columns(x_ptr, scales_ptr, out_ptr, num_rows, width, stride):
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * LENGTH + tl.arange(0, LENGTH)
    rows = tl.arange(0, LENGTH)
    inside = columns < width
    mask = inside[:, None] & (block * LENGTH + rows < num_rows)[None, :]
    first = x_ptr + block * LENGTH
    x = tl.load(first + columns.to(tl.int64)[:, None] * stride + rows[None, :], mask=mask, other=0.0).to(tl.float32)
    scales = tl.load(scales_ptr + block * width + columns, mask=inside, other=0.0)
    out = tl.trans((x * scales[:, None]).to(out_ptr.dtype.element_ty))
    tl.store(out_ptr + block * LENGTH * width + rows[:, None] * width + columns[None, :], out, mask=inside[None, :])
