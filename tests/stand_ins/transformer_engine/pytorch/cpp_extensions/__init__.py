"""Transformer Engine's matrix products. Like cuBLAS it counts columns first: A is the weight, "TN" gives B A^T, "NN"
B A, "NT" B^T A; a product without rows is an error. Of quantized tensors it reads the copy whose blocks extend along
the sum: columnwise for an operand that is not transposed as A, or transposed as B."""

import torch
from torch import Tensor

from transformer_engine.pytorch.tensor import QuantizedTensorStorage


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: object = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> tuple[Tensor, None, None, None]:
    assert out is None or out.is_contiguous()
    if isinstance(A, QuantizedTensorStorage):
        assert use_split_accumulator, "sums of about 14 bits"
        across = layout[0] == "N", layout[1] == "T"
        right, left = (x.values(columnwise=c) for x, c in zip((A, B), across, strict=True))
        right, left = (x.T if c else x for x, c in zip((right, left), across, strict=True))
    else:
        assert A.is_contiguous() and B.is_contiguous() and A.ndim == B.ndim == 2 and 0 not in B.shape
        left, right = B.float(), A.float()
    product = {"TN": lambda: left @ right.T, "NN": lambda: left @ right, "NT": lambda: left.T @ right}[layout]()
    if bias is not None and not grad:
        product = product + bias.float()
    if out is None:
        return product.to(out_dtype or A.dtype), None, None, None
    out.copy_(out.float() + product if accumulate else product)
    return out, None, None, None


def general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    out: list[Tensor],
    quantization_params: list[object],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: list[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: object = None,
    single_output: bool = False,
) -> None:
    assert len(A) == len(B) == len(quantization_params) and m_splits is not None and len(m_splits) == len(A)
    assert out_dtype is out[0].dtype
    outs = list(out[0].split(m_splits)) if single_output else out
    for a, b, one in zip(A, B, outs, strict=True):
        split = use_split_accumulator
        general_gemm(a, b, layout=layout, out=one, accumulate=accumulate, grad=grad, use_split_accumulator=split)
