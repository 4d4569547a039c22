"""apex's weight gradient: adds d_output^T input to the gradient buffer."""

import torch
from torch import Tensor


def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:  # noqa: A002
    assert d_weight.dtype is torch.float32 and input.is_contiguous() and d_output.is_contiguous()
    d_weight.add_(d_output.float().T @ input.float())


def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:  # noqa: A002
    assert d_weight.dtype is d_output.dtype and input.is_contiguous() and d_output.is_contiguous()
    d_weight.add_((d_output.float().T @ input.float()).to(d_weight.dtype))
