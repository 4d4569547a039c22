"""FP8 and FP4 operands and GEMMs of Transformer Engine, for tensors in the layout of `QuantizedTensor`.

Elements and scales equal those of `precision.quantizers`. Transformer Engine pads the scales of a copy; for mxfp8 and
nvfp4 it also transposes them, and does not transpose the columnwise elements of mxfp8. Operands are converted before
and after each call. Transformer Engine saturates infinities, and most of its quantizers return no magnitude that would
reveal them, so another reduction of each operand detects them. Operands of sizes that its kernels do not support are
multiplied in plain torch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cpp_extensions import general_gemm, general_grouped_gemm

from megatron_moe.config.precision import WHOLE, OperandFormat
from megatron_moe.kernels.backends.triton import quantize as triton_quantize
from megatron_moe.kernels.ops import GroupedPart
from megatron_moe.kernels.reference import low_precision as reference_low_precision
from megatron_moe.precision import nvfp4, quantizers
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor, expert_copies

_FP4 = torch.uint8
_E8M0_NAN = 255
_Storage = Any
"""Any subclass of Transformer Engine's `QuantizedTensorStorage`."""


def quantize_rows(
    x: Tensor,
    fmt: OperandFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    offsets_e: Tensor | None = None,
    scale: Tensor | None = None,
    seed: Tensor | None = None,
) -> QuantizedTensor:
    """See `Kernels.quantize_rows`. Copies whose blocks depend on `offsets_e` are made by the Triton kernels, because
    Transformer Engine needs the number of rows per expert on the host."""
    is_per_expert = offsets_e is not None and (columnwise or fmt.block == WHOLE or fmt.element == "e2m1")
    if is_per_expert or not _can_quantize(x, fmt):
        is_fused = fmt.block == (1, triton_quantize.BLOCK) and x.is_cuda
        own = triton_quantize.quantize_rows if is_fused else quantizers.quantize_rows
        return own(x, fmt, rowwise=rowwise, columnwise=columnwise, offsets_e=offsets_e, scale=scale, seed=seed)
    return _quantized(x, fmt, scale, rowwise=rowwise, columnwise=columnwise)


def quantize_weight(
    weight: Tensor,
    fmt: OperandFormat,
    *,
    columnwise: bool,
    scale: Tensor | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """See `Kernels.quantize_weight`. Quantises the matrices of a stack one after the other."""
    made = _quantized_weight(weight, fmt, scale, columnwise=columnwise)
    return made if out is None else out.copy_(made)


def _quantized_weight(weight: Tensor, fmt: OperandFormat, scale: Tensor | None, *, columnwise: bool) -> QuantizedTensor:
    if not _can_quantize(weight, fmt):
        return quantizers.quantize_weight(weight, fmt, columnwise=columnwise, scale=scale)
    if weight.dim() == 2:
        return _quantized(weight, fmt, scale, rowwise=True, columnwise=columnwise)
    each_scale = [None] * len(weight) if scale is None else scale.unbind()
    made = [
        _quantized(matrix, fmt, one, rowwise=True, columnwise=columnwise)
        for matrix, one in zip(weight, each_scale, strict=True)
    ]
    row = _stack([each.row_copy for each in made])
    column = _stack([each.column_copy for each in made]) if columnwise else None
    return QuantizedTensor(row, column, fmt.block, weight.dtype)


def quantized_linear_forward(x: QuantizedTensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    if not _can_multiply(x.block, *_sizes(x.row_copy), *_sizes(weight.row_copy)):
        return reference_low_precision.quantized_linear_forward(x, weight, bias)
    out = _gemm(_row_storage(weight), _row_storage(x), "TN", out_dtype=x.dtype)
    return out if bias is None else out + bias


def quantized_linear_input_grad(grad: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    if not _can_multiply(grad.block, *_sizes(grad.row_copy), *_sizes(weight.column_copy)):
        return reference_low_precision.quantized_linear_input_grad(grad, weight)
    return _gemm(_column_storage(weight), _row_storage(grad), "NN", out_dtype=grad.dtype)


def quantized_linear_weight_grad(grad: QuantizedTensor, x: QuantizedTensor, out: Tensor, accumulate: bool) -> None:
    if not _can_multiply(x.block, *_sizes(grad.column_copy), *_sizes(x.column_copy)):
        reference_low_precision.quantized_linear_weight_grad(grad, x, out, accumulate)
        return
    operands = _column_storage(x), _column_storage(grad)
    _gemm(*operands, "NT", out=out, out_dtype=out.dtype, accumulate=accumulate)


def quantized_grouped_forward(rows: QuantizedTensor, weight: QuantizedTensor, offsets_e: Tensor) -> Tensor:
    if not _can_multiply(rows.block, *_sizes(weight.row_copy)):
        return reference_low_precision.quantized_grouped_forward(rows, weight, offsets_e)
    matrices = [_storage(copy, weight, columnwise=False) for copy in _matrices(weight.row_copy)]
    return _gemm_per_expert(rows, matrices, weight.row_copy.data.shape[1], offsets_e, "TN")


def quantized_grouped_input_grad(grad: QuantizedTensor, weight: QuantizedTensor, offsets_e: Tensor) -> Tensor:
    if not _can_multiply(grad.block, *_sizes(weight.column_copy)):
        return reference_low_precision.quantized_grouped_input_grad(grad, weight, offsets_e)
    matrices = [_storage(copy, weight, columnwise=True) for copy in _matrices(weight.column_copy)]
    return _gemm_per_expert(grad, matrices, weight.column_copy.data.shape[1], offsets_e, "NN")


def quantized_grouped_weight_grad(parts: Sequence[GroupedPart[Any]], out: Tensor, accumulate: bool) -> None:
    if not _can_multiply(parts[0].grad.block, *out.shape[1:]):
        reference_low_precision.quantized_grouped_weight_grad(parts, out, accumulate)
        return
    if not accumulate:
        out.zero_()  # the GEMM skips experts without rows, so their gradients must be zeroed
    for grad, rows, offsets_e in parts:
        ends = offsets_e.tolist()
        copies = [expert_copies(each.column_copy, each.block, ends, columnwise=True) for each in (rows, grad)]
        held = [expert for expert, copy in enumerate(copies[0]) if copy.data.shape[1]]
        if held:
            inputs, grads = (
                [_storage(_padded_columns(found[expert], each.block), each, columnwise=True) for expert in held]
                for found, each in zip(copies, (rows, grad), strict=True)
            )
            _grouped_gemm(inputs, grads, [out[expert] for expert in held], "NT", accumulate=True)


def _gemm_per_expert(
    rows: QuantizedTensor, matrices: list[_Storage], width: int, offsets_e: Tensor, layout: str
) -> Tensor:
    """Multiplies the rows of each expert by its matrix: [R, width], undefined beyond `offsets_e[-1]`. Rows of an expert
    are padded to a size that the kernels support."""
    ends = offsets_e.tolist()
    out = rows.row_copy.data.new_empty(len(rows.row_copy.data), width, dtype=rows.dtype)
    copies = expert_copies(rows.row_copy, rows.block, ends, columnwise=False)
    held = [expert for expert, copy in enumerate(copies) if len(copy.data)]
    if not held:
        return out
    outs = [out[end - len(copies[expert].data) : end] for expert, end in enumerate(ends) if expert in held]
    padded = [_padded_rows(copies[expert], rows.block) for expert in held]
    padded_outs = [
        out_rows if len(out_rows) == len(copy.data) else out_rows.new_empty(len(copy.data), width)
        for out_rows, copy in zip(outs, padded, strict=True)
    ]
    operands = [_storage(copy, rows, columnwise=False) for copy in padded]
    _grouped_gemm([matrices[expert] for expert in held], operands, padded_outs, layout, accumulate=False)
    for out_rows, padded_out in zip(outs, padded_outs, strict=True):
        if out_rows is not padded_out:
            out_rows.copy_(padded_out[: len(out_rows)])
    return out


def _gemm(a: _Storage, b: _Storage, layout: str, **options: Any) -> Tensor:
    # split accumulation in fp32, because the accumulators of Hopper's tensor cores have about 14 bits
    return general_gemm(a, b, layout=layout, use_split_accumulator=True, grad=layout != "TN", **options)[0]


def _grouped_gemm(a: list[_Storage], b: list[_Storage], out: list[Tensor], layout: str, *, accumulate: bool) -> None:
    sizes = [len(each) for each in out] if layout != "NT" else [1] * len(out)
    nothing = [None] * len(out)
    options = {"layout": layout, "grad": layout != "TN", "accumulate": accumulate, "use_split_accumulator": True}
    general_grouped_gemm(a, b, out, nothing, out[0].dtype, m_splits=sizes, **options)


# sizes


def _length(block: tuple[int, int]) -> int:
    """Number of which GEMM sizes must be multiples if operands have scale blocks of shape `block`."""
    return 16 if block == WHOLE or block[1] == triton_quantize.BLOCK else 32


def _can_multiply(block: tuple[int, int], *sizes: int) -> bool:
    return all(size and size % _length(block) == 0 for size in sizes)


def _can_quantize(x: Tensor, fmt: OperandFormat) -> bool:
    """Whether Transformer Engine quantises matrices of this shape and dtype in this format. Stochastic rounding is
    excluded, because Transformer Engine draws it from torch's default generator instead of from a key."""
    is_supported = fmt.block == WHOLE or fmt.block[1] in (16, 32, triton_quantize.BLOCK)
    is_supported &= x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and not fmt.hadamard)
    return is_supported and not fmt.stochastic and _can_multiply(fmt.block, *x.shape[-2:])


def _sizes(copy: QuantizedCopy) -> tuple[int, int]:
    """Returns (rows, columns) of a copy, or of each matrix of a stack."""
    num_rows, num_bytes = copy.data.shape[-2:]
    return num_rows, 2 * num_bytes if copy.data.dtype == _FP4 else num_bytes


def _padded_rows(copy: QuantizedCopy, block: tuple[int, int]) -> QuantizedCopy:
    """Pads the rows of a rowwise copy [r, C] with zeros."""
    missing = -len(copy.data) % _length(block)
    if not missing:
        return copy
    data = _padded(copy.data, (0, 0, 0, missing))
    return copy._replace(data=data, scales=copy.scales if block == WHOLE else _padded(copy.scales, (0, missing)))


def _padded_columns(copy: QuantizedCopy, block: tuple[int, int]) -> QuantizedCopy:
    """Pads the columns of a columnwise copy [C, r] of an expert's rows with zeros. With blocks, r is already a multiple
    of the block length."""
    num_columns = _sizes(copy)[1]
    missing = -num_columns % _length(block)
    if not missing:
        return copy
    data = _padded(copy.data, (0, missing // 2 if copy.data.dtype == _FP4 else missing))
    return copy._replace(data=data, scales=copy.scales if block == WHOLE else _padded(copy.scales, (0, 0, 0, 1)))


def _padded(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    """`F.pad` with zeros that also supports FP8 dtypes."""
    return F.pad(x.view(torch.uint8), padding).view(x.dtype) if x.element_size() == 1 else F.pad(x, padding)


# conversion


def _quantizer(fmt: OperandFormat, x: Tensor, scale: Tensor | None, *, rowwise: bool, columnwise: bool) -> Any:
    # with one scale per tensor, Transformer Engine cannot make a columnwise copy alone
    usage: Any = {"rowwise": rowwise or fmt.block == WHOLE, "columnwise": columnwise}
    is_square = fmt.block[0] > 1
    if fmt.element == "e2m1":
        transform = {"with_rht": fmt.hadamard, "with_post_rht_amax": fmt.hadamard}
        return te.NVFP4Quantizer(with_2d_quantization=is_square, **transform, **usage)
    element = TE_DType[quantizers.element_dtype(fmt.element)]
    if fmt.scale == "e8m0":
        return te.MXFP8Quantizer(element, **usage)
    if fmt.block != WHOLE:
        options = {"force_pow_2_scales": fmt.scale == "power of 2", "block_scaling_dim": 2 if is_square else 1}
        return te.Float8BlockQuantizer(element, **options, **usage)
    if scale is None:
        return te.Float8CurrentScalingQuantizer(element, x.device, **usage)
    return te.Float8Quantizer(scale.float().reshape(1), torch.zeros_like(scale.reshape(1)), element, **usage)


def _quantized(
    x: Tensor, fmt: OperandFormat, scale: Tensor | None, *, rowwise: bool, columnwise: bool
) -> QuantizedTensor:
    """Quantises a matrix [R, C]."""
    quantizer = _quantizer(fmt, x, scale, rowwise=rowwise, columnwise=columnwise)
    quantizer.internal = True
    x = x.detach().contiguous()
    made = tex.quantize(x, quantizer)
    row = _marked(_our_copy(made, fmt, *x.shape, columnwise=False), x, fmt) if rowwise else None
    column = _marked(_our_copy(made, fmt, *x.mT.shape, columnwise=True), x.mT, fmt) if columnwise else None
    return QuantizedTensor(row, column, fmt.block, x.dtype)


def _marked(copy: QuantizedCopy, x: Tensor, fmt: OperandFormat) -> QuantizedCopy:
    """Sets the scales of each row of `x` [R, C] that contains inf or NaN to NaN, so that non-finite inputs are detected
    later. If rows share scales, all scales become NaN."""
    is_lost = ~torch.linalg.vector_norm(x, torch.inf, dim=-1).isfinite()
    if copy.factor is not None:
        return copy._replace(factor=copy.factor.masked_fill(is_lost.any(), torch.nan))
    where = is_lost if fmt.block[0] == 1 else is_lost.any()
    return copy._replace(scales=copy.scales.masked_fill(where, _E8M0_NAN if fmt.scale == "e8m0" else torch.nan))


def _our_copy(made: _Storage, fmt: OperandFormat, num_rows: int, width: int, *, columnwise: bool) -> QuantizedCopy:
    """Converts the rowwise storage of Transformer Engine's tensor, or the transposed `columnwise` storage, to a copy
    [num_rows, width]."""
    if fmt.block == WHOLE:
        data = made._data
        if columnwise:  # TE stores no transposed copy where tensor cores read both layouts
            data = made._data.T.contiguous() if made._transpose is None else made._transpose
        return QuantizedCopy(data.view(quantizers.element_dtype(fmt.element)), made._scale_inv.reshape(()))
    side = "columnwise" if columnwise else "rowwise"
    data, scales = getattr(made, f"_{side}_data"), getattr(made, f"_{side}_scale_inv")
    shape = fmt.block, num_rows, width
    if fmt.element == "e2m1":
        factor = nvfp4.second_level_scale(getattr(made, f"_amax_{side}").reshape(()))
        return QuantizedCopy(data, _cut_transposed(scales.view(torch.float8_e4m3fn), *shape), factor)
    data = data.view(quantizers.element_dtype(fmt.element))
    if fmt.scale == "e8m0":
        return QuantizedCopy(*((data.T.contiguous(), _cut(scales, *shape)) if columnwise else
                               (data, _cut_transposed(scales, *shape))))  # fmt: skip
    return QuantizedCopy(data, _cut(scales, *shape))


def _storage(copy: QuantizedCopy, like: QuantizedTensor, *, columnwise: bool) -> _Storage:
    """Converts a copy of the matrix `like`, or of a part of it, to a tensor of Transformer Engine."""
    block = like.block
    options: Any = {"quantizer": None, "fake_dtype": like.dtype}
    data, element = copy.data.view(torch.uint8).contiguous(), TE_DType[copy.data.dtype]
    if block == WHOLE:
        parts = {"data": None if columnwise else data, "data_transpose": data if columnwise else None}
        # cloned, because cuBLAS requires aligned scales and those of most experts are not
        scale = copy.scales.reshape(1).clone()
        return te.Float8TensorStorage(fp8_scale_inv=scale, fp8_dtype=element, **parts, **options)
    is_mxfp8 = copy.scales.dtype == torch.uint8
    side, other = ("columnwise", "rowwise") if columnwise else ("rowwise", "columnwise")
    parts = {
        f"{side}_data": data.T.contiguous() if columnwise and is_mxfp8 else data,
        f"{side}_scale_inv": _their_scales(copy, block, columnwise=columnwise),
        f"{other}_data": None,
        f"{other}_scale_inv": None,
    }
    if copy.factor is not None:
        amax = {f"amax_{side}": nvfp4.amax_of_scale(copy.factor).reshape(1), f"amax_{other}": None}
        options |= {"fp4_dtype": te.DType.kFloat4E2M1, "with_gemm_swizzled_scales": False}
        return te.NVFP4TensorStorage(**parts, **amax, **options)
    options["fp8_dtype"] = element
    if is_mxfp8:
        return te.MXFP8TensorStorage(**parts, with_gemm_swizzled_scales=False, **options)
    return te.Float8BlockwiseQTensorStorage(**parts, is_2D_scaled=block[0] > 1, **options)


def _row_storage(x: QuantizedTensor) -> _Storage:
    return _storage(x.row_copy, x, columnwise=False)


def _column_storage(x: QuantizedTensor) -> _Storage:
    return _storage(x.column_copy, x, columnwise=True)


def _matrices(stack: QuantizedCopy) -> list[QuantizedCopy]:
    """Splits the quantised copy of a stack of matrices into one copy per matrix."""
    factors = [None] * len(stack.data) if stack.factor is None else stack.factor.unbind()
    return [QuantizedCopy(*each) for each in zip(stack.data, stack.scales, factors, strict=True)]


def _stack(copies: list[QuantizedCopy]) -> QuantizedCopy:
    factors = [copy.factor for copy in copies if copy.factor is not None]
    data, scales = _stack_bytes([copy.data for copy in copies]), _stack_bytes([copy.scales for copy in copies])
    return QuantizedCopy(data, scales, torch.stack(factors) if factors else None)


def _stack_bytes(parts: list[Tensor]) -> Tensor:
    """`torch.stack` that also supports FP8 dtypes."""
    if parts[0].element_size() > 1:
        return torch.stack(parts)
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


# scales of this project are [blocks of a row, rows], or [blocks of rows, blocks of a row] for square blocks


def _cut(scales: Tensor, block: tuple[int, int], num_rows: int, width: int) -> Tensor:
    """Removes the padding of Transformer Engine's scales."""
    num_blocks = -(-width // block[1])
    shape = (num_blocks, num_rows) if block[0] == 1 else (-(-num_rows // block[0]), num_blocks)
    return scales[: shape[0], : shape[1]].contiguous()


def _cut_transposed(scales: Tensor, block: tuple[int, int], num_rows: int, width: int) -> Tensor:
    """Removes the padding of scales [rows, blocks of a row]. Square blocks have equal scales in all their rows."""
    cut = scales[: num_rows : block[0], : -(-width // block[1])]
    return (cut.T if block[0] == 1 else cut).contiguous()


def _their_scales(copy: QuantizedCopy, block: tuple[int, int], *, columnwise: bool) -> Tensor:
    if copy.data.dtype == _FP4:
        per_block = copy.scales.view(torch.uint8)
        per_row = per_block.T if block[0] == 1 else per_block.repeat_interleave(block[0], 0)[: len(copy.data)]
        return _pad_to(per_row, 128, 4)
    if copy.scales.dtype == torch.uint8:
        return _pad_to(copy.scales, 4, 128) if columnwise else _pad_to(copy.scales.T, 128, 4)
    return _pad_to(copy.scales, 1, 4)


def _pad_to(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pads a matrix with zeros to multiples of `rows` and `columns`."""
    return F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)).contiguous()
