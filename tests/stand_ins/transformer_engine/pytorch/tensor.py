"""Transformer Engine's quantizers and quantized tensors, with its layouts of elements and scales.

Elements and scales are computed by this project's quantizers, which equal Transformer Engine's bit for bit for finite
numbers. A block with an infinity has scale 1, or the largest E8M0 scale, and the infinity becomes the largest element.
Paddings of scales have bytes that no product may read.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.precision import WHOLE, OperandFormat
from megatron_moe.precision import quantizers
from megatron_moe.precision.quantized_tensor import QuantizedTensor, decode_scales, unpack_e2m1
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch

ELEMENTS = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2"}
GARBAGE = 0xA5


class Quantizer:
    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        assert rowwise or columnwise
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = False

    def _quantized(self, x: Tensor, fmt: OperandFormat, **options: Any) -> QuantizedTensor:
        usage = {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}
        return quantizers.quantize_rows(x, fmt, **usage, **options)


class QuantizedTensorStorage:
    """Tensor with rowwise and columnwise elements; `values` gives those of one of them, in the layout of a product."""

    @property
    def device(self) -> torch.device:
        return next(part for part in vars(self).values() if isinstance(part, Tensor)).device

    def values(self, *, columnwise: bool) -> Tensor:
        raise NotImplementedError


class Float8TensorStorage(QuantizedTensorStorage):
    def __init__(
        self, *, data, fp8_scale_inv, fp8_dtype, fake_dtype=None, data_transpose=None, quantizer=None,
        transpose_invalid=None,
    ) -> None:  # fmt: skip
        assert fp8_scale_inv.shape == (1,) and fp8_scale_inv.dtype is torch.float32
        assert fp8_scale_inv.data_ptr() % 16 == 0, "cuBLAS does not support the address of the scale"
        self._data, self._transpose, self._scale_inv = data, data_transpose, fp8_scale_inv
        self._fp8_dtype, self._dtype = fp8_dtype, fake_dtype

    def values(self, *, columnwise: bool) -> Tensor:
        data = self._transpose if columnwise else self._data
        assert data.is_contiguous() and all(size % 16 == 0 for size in data.shape)
        return data.view(TE_DType_To_Torch[self._fp8_dtype]).double() * self._scale_inv.double()


class _Blocks(QuantizedTensorStorage):
    def __init__(
        self, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, dtype, fake_dtype
    ) -> None:  # fmt: skip
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self._element, self._dtype = dtype, fake_dtype

    def _side(self, columnwise: bool) -> tuple[Tensor, Tensor]:
        side = "columnwise" if columnwise else "rowwise"
        data, scales = getattr(self, f"_{side}_data"), getattr(self, f"_{side}_scale_inv")
        assert data.dtype is torch.uint8 and data.is_contiguous() and scales.is_contiguous()
        return data, scales


class Float8BlockwiseQTensorStorage(_Blocks):
    def __init__(
        self, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer,
        is_2D_scaled, *, fake_dtype=None,
    ) -> None:  # fmt: skip
        super().__init__(rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, fake_dtype)
        self._is_2D_scaled = is_2D_scaled

    def values(self, *, columnwise: bool) -> Tensor:
        data, scales = self._side(columnwise)
        rows, width = data.shape
        assert rows % 8 == 0 and width % 16 == 0
        blocks = math.ceil(width / 128)
        outer = math.ceil(rows / 128) if self._is_2D_scaled else blocks
        inner = blocks if self._is_2D_scaled else rows
        assert scales.shape == (outer, math.ceil(inner / 4) * 4) and scales.dtype is torch.float32
        scales = scales[:, :inner].double()
        scales = scales.repeat_interleave(128, 0)[:rows] if self._is_2D_scaled else scales.T
        spread = scales.repeat_interleave(128, 1)[:, :width]
        return data.view(TE_DType_To_Torch[self._element]).double() * spread


class MXFP8TensorStorage(_Blocks):
    def __init__(
        self, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer,
        with_gemm_swizzled_scales, *, fake_dtype=None,
    ) -> None:  # fmt: skip
        assert not with_gemm_swizzled_scales
        super().__init__(rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, fake_dtype)

    def values(self, *, columnwise: bool) -> Tensor:
        """The columnwise elements are not transposed: their blocks extend along the rows."""
        data, scales = self._side(columnwise)
        rows, width = data.shape
        assert rows % 32 == 0 and width % 32 == 0
        shape = (rows // 32, width) if columnwise else (rows, width // 32)
        assert scales.shape == padded_shape(shape, (4, 128) if columnwise else (128, 4))
        scales = decode_scales(scales[: shape[0], : shape[1]]).double()
        spread = scales.repeat_interleave(32, 0 if columnwise else 1)
        values = data.view(TE_DType_To_Torch[self._element]).double() * spread
        return values.T if columnwise else values


class NVFP4TensorStorage(_Blocks):
    def __init__(
        self, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, amax_rowwise, amax_columnwise,
        fp4_dtype, quantizer, with_gemm_swizzled_scales, *, fake_dtype=None, row_scaled_nvfp4=False,
        nvfp4_use_4over6=False, nvfp4_e4m3_max=448,
    ) -> None:  # fmt: skip
        assert not with_gemm_swizzled_scales and fp4_dtype is DType.kFloat4E2M1
        super().__init__(rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp4_dtype, fake_dtype)
        self._amax_rowwise, self._amax_columnwise = amax_rowwise, amax_columnwise

    def values(self, *, columnwise: bool) -> Tensor:
        data, scales = self._side(columnwise)
        amax = self._amax_columnwise if columnwise else self._amax_rowwise
        values = unpack_e2m1(data, torch.float64)
        rows, width = values.shape
        assert rows % 32 == 0 and width % 32 == 0 and amax.shape == (1,)
        assert scales.shape == padded_shape((rows, width // 16), (128, 4))
        spread = scales[:rows, : width // 16].view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
        return values * spread * amax.double() / (6 * 448)


class Float8Quantizer(Quantizer):
    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: DType, *, rowwise=True, columnwise=True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert scale.shape == amax.shape == (1,) and scale.dtype is amax.dtype is torch.float32
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def quantize_impl(self, tensor: Tensor) -> Float8TensorStorage:
        return self._per_tensor(tensor, self.scale.squeeze(0))

    def _per_tensor(self, tensor: Tensor, scale: Tensor) -> Float8TensorStorage:
        if not self.rowwise_usage:
            raise NotImplementedError("columnwise-only per-tensor FP8 quantization")
        fmt = OperandFormat(element=ELEMENTS[self.dtype], block=WHOLE, scale="fp32")
        made = self._quantized(tensor, fmt, scale=scale)
        row, column = (None if x is None else x.data.view(torch.uint8) for x in (made.rowwise, made.columnwise))
        scales = (made.rowwise or made.column_copy).scales
        return Float8TensorStorage(
            data=row, data_transpose=column, fp8_scale_inv=scales.reshape(1), fp8_dtype=self.dtype, quantizer=self
        )


class Float8CurrentScalingQuantizer(Float8Quantizer):
    def __init__(
        self, fp8_dtype: DType, device: torch.device, *, rowwise=True, columnwise=True, use_existing_amax=False,
        with_amax_reduction=False, amax_reduction_group=None, force_pow_2_scales=False, amax_epsilon=0.0,
    ) -> None:  # fmt: skip
        Quantizer.__init__(self, rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype

    def quantize_impl(self, tensor: Tensor) -> Float8TensorStorage:
        fmt = OperandFormat(element=ELEMENTS[self.dtype], block=WHOLE, scale="fp32")
        return self._per_tensor(tensor, quantizers.tensor_scale(tensor, fmt).nan_to_num(1.0))


class Float8BlockQuantizer(Quantizer):
    def __init__(
        self, fp8_dtype: DType, *, rowwise: bool, columnwise: bool, amax_epsilon=0.0, force_pow_2_scales=True,
        block_scaling_dim=2,
    ) -> None:  # fmt: skip
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.dim = fp8_dtype, block_scaling_dim
        self.scale = "power of 2" if force_pow_2_scales else "fp32"

    def quantize_impl(self, tensor: Tensor) -> Float8BlockwiseQTensorStorage:
        block = (1 if self.dim == 1 else 128, 128)
        fmt = OperandFormat(element=ELEMENTS[self.dtype], block=block, scale=self.scale)
        if self.dim == 1:
            made = self._quantized(tensor, fmt)
        else:
            made = quantizers.quantize_weight(tensor, fmt, columnwise=self.columnwise_usage)
        return Float8BlockwiseQTensorStorage(
            *sides(made, lambda scales: padded(scales.nan_to_num(1.0), (1, 4))), self.dtype, self, self.dim == 2
        )


class MXFP8Quantizer(Quantizer):
    def __init__(self, fp8_dtype: DType, *, rowwise=True, columnwise=True, with_2d_quantization=False) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert not with_2d_quantization
        self.dtype = fp8_dtype

    def quantize_impl(self, tensor: Tensor) -> MXFP8TensorStorage:
        assert all(size % 32 == 0 for size in tensor.shape)
        largest = torch.finfo(tensor.dtype).max
        fmt = OperandFormat(element=ELEMENTS[self.dtype], block=(1, 32), scale="e8m0")
        made = self._quantized(tensor.clamp(-largest, largest), fmt)
        row, row_scales, column, column_scales = sides(made, lambda scales: scales)
        row_scales = None if row is None else padded(row_scales.T, (128, 4))
        column_scales = None if column is None else padded(column_scales, (4, 128))
        column = None if column is None else column.T.contiguous()
        return MXFP8TensorStorage(row, row_scales, column, column_scales, self.dtype, self, False)


class NVFP4Quantizer(Quantizer):
    def __init__(
        self, fp4_dtype=DType.kFloat4E2M1, rowwise=True, columnwise=True, with_amax_reduction=False,
        amax_reduction_group=None, with_rht=False, with_post_rht_amax=False, with_2d_quantization=False,
        stochastic_rounding=False, row_scaled_nvfp4=False, nvfp4_use_4over6=False, nvfp4_e4m3_max=448,
        nvfp4_4over6_err_mode="MAE", with_random_sign_mask=True,
    ) -> None:  # fmt: skip
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert with_rht == with_post_rht_amax and not stochastic_rounding
        self.is_square, self.with_rht = with_2d_quantization, with_rht

    def quantize_impl(self, tensor: Tensor) -> NVFP4TensorStorage:
        assert all(size % 16 == 0 for size in tensor.shape)
        assert not self.with_rht or tensor.dtype is torch.bfloat16
        height = 16 if self.is_square else 1
        fmt = OperandFormat(element="e2m1", block=(height, 16), scale="e4m3", hadamard=self.with_rht)
        if self.is_square:
            made = quantizers.quantize_weight(tensor, fmt, columnwise=self.columnwise_usage)
        else:
            made = self._quantized(tensor, fmt)

        def per_row(scales: Tensor) -> Tensor:
            scales = scales.view(torch.uint8)
            return padded(scales.repeat_interleave(16, 0) if self.is_square else scales.T, (128, 4))

        # a matrix with an infinity has factor 1
        amaxes = [
            None if copy is None else (copy.factor * 2688).nan_to_num(2688.0).reshape(1)
            for copy in (made.rowwise, made.columnwise)
        ]
        return NVFP4TensorStorage(*sides(made, per_row), *amaxes, DType.kFloat4E2M1, self, False)


def sides(made: QuantizedTensor, convert: Any) -> tuple[Tensor | None, ...]:
    """Bytes and scales of both copies, scales converted."""
    found: list[Tensor | None] = []
    for copy in (made.rowwise, made.columnwise):
        found += [None, None] if copy is None else [copy.data.contiguous().view(torch.uint8), convert(copy.scales)]
    return tuple(found)


def padded_shape(shape: tuple[int, int], multiples: tuple[int, int]) -> tuple[int, ...]:
    return tuple(math.ceil(size / multiple) * multiple for size, multiple in zip(shape, multiples, strict=True))


def padded(scales: Tensor, multiples: tuple[int, int]) -> Tensor:
    """Scales in a larger tensor, whose other elements are undefined."""
    shape = padded_shape(tuple(scales.shape), multiples)
    out = torch.full((*shape, scales.element_size()), GARBAGE, dtype=torch.uint8).view(scales.dtype).squeeze(-1)
    out[: scales.shape[0], : scales.shape[1]] = scales
    return out
