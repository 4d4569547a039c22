"""Ops of NVIDIA's Transformer Engine (2.x for PyTorch), in bf16 and fp32 and for FP8 and FP4 on NVIDIA GPUs.

Meant for comparison: `auto` never selects this backend, because this project's kernels are faster. Each grouped GEMM
synchronises with the device to read the number of rows per expert; FP8 and FP4 grouped GEMMs must be requested with
`--kernel-per-op`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cpp_extensions import general_gemm, general_grouped_gemm
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.kernels.backends.transformer_engine.low_precision import (
    quantize_rows,
    quantize_weight,
    quantized_grouped_forward,
    quantized_grouped_input_grad,
    quantized_grouped_weight_grad,
    quantized_linear_forward,
    quantized_linear_input_grad,
    quantized_linear_weight_grad,
)
from megatron_moe.kernels.kernel_set import Priority, Support
from megatron_moe.kernels.ops import AttentionInputs, GroupedPart, VocabShard
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.autograd_function import AutogradFunction

NAME = "transformer_engine"
NEEDS = ("transformer_engine",)
ON_REQUEST = True
BY_NAME = ("quantized_grouped_forward", "quantized_grouped_input_grad", "quantized_grouped_weight_grad")
RECIPES = (
    "delayed e4m3",
    "delayed hybrid",
    "tensorwise e4m3",
    "tensorwise hybrid",
    "blockwise e4m3",
    "blockwise hybrid",
    "mxfp8 e4m3",
    "mxfp8 hybrid",
    "nvfp4 e2m1",
)


def support(op: str, device: torch.device, dtype: torch.dtype) -> Support:
    """Rates this backend for one op on a device and dtype; called by `megatron_moe.kernels.registry`."""
    if device.type != "cuda":
        return Support(Priority.NO, "it runs on NVIDIA GPUs only")
    if dtype is torch.float64:
        return Support(Priority.NO, "it does not support fp64")
    if op == "attention" and dtype is torch.float32:
        return Support(Priority.NO, "its attention does not support fp32")
    reasons = {
        "grouped_forward": "GEMMs of GroupedLinear; the host synchronises to read the number of rows per expert",
        "grouped_input_grad": "same as grouped_forward",
        "grouped_weight_grad": "same as grouped_forward; accumulates in the gradient buffer",
        "quantize_rows": "Transformer Engine's casts; expert rows are quantised by the Triton kernels, without a host "
        "synchronisation",
        **dict.fromkeys(BY_NAME, "one GEMM per expert; the host synchronises to read the number of rows per expert"),
        "linear_weight_grad": "accumulates in the gradient buffer",
        "attention": "DotProductAttention; sinks, dropout and document masks run on plain torch",
        "activation": "SwiGLU; other activations run on plain torch",
    }
    return Support(Priority.YES, reasons.get(op, "Transformer Engine kernel"))


# Matrix multiplications. Operands are in the order weight, input; layout "TN" multiplies the input by the transposed
# weight.


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    return _gemm(weight, x, "TN", weight.shape[0], bias=bias, out=out)


def linear_input_grad(grad: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _gemm(weight, grad, "NN", weight.shape[1], grad=True, out=out)


def linear_weight_grad(grad: Tensor, x: Tensor, out: Tensor, accumulate: bool) -> None:
    rows, grads = x.flatten(0, -2).contiguous(), grad.flatten(0, -2).contiguous()
    if rows.shape[0] == 0:
        reference.store(torch.zeros_like(out), out, accumulate)
        return
    general_gemm(rows, grads, out_dtype=out.dtype, accumulate=accumulate, layout="NT", out=out, grad=True)


def _gemm(
    weight: Tensor,
    x: Tensor,
    layout: str,
    width: int,
    *,
    bias: Tensor | None = None,
    grad: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies x [..., I] by the weight (layout "TN": transposed, "NN": as it is) -> [..., width]."""
    matrix = x.flatten(0, -2).contiguous()
    if matrix.shape[0] == 0:
        return x.new_zeros(*x.shape[:-1], width)
    into = {} if out is None else {"out": out.view(-1, width)}
    result: Tensor = general_gemm(weight, matrix, out_dtype=x.dtype, layout=layout, bias=bias, grad=grad, **into)[0]
    return result.view(*x.shape[:-1], width)


def grouped_forward(rows: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    return _grouped_gemm(rows, weight, offsets_e, "TN")


def grouped_input_grad(grad: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    return _grouped_gemm(grad.contiguous(), weight, offsets_e, "NN")


def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    for part, adds in reference.with_accumulate(parts, accumulate):
        _grouped_weight_grad(*part, out, adds)


def _grouped_weight_grad(grad: Tensor, rows: Tensor, offsets_e: Tensor, out: Tensor, accumulate: bool) -> None:
    splits = _splits(offsets_e)
    inputs, grads = (list(_held(x, splits).split(splits)) for x in (rows, grad))
    if not accumulate:
        out.zero_()  # the GEMM skips experts without rows
    held = [i for i, size in enumerate(splits) if size]
    if held:
        general_grouped_gemm(
            [inputs[i] for i in held],
            [grads[i] for i in held],
            [out[i] for i in held],
            [None] * len(held),
            out.dtype,
            layout="NT",
            m_splits=[splits[i] for i in held],
            grad=True,
            accumulate=True,
        )


def _grouped_gemm(rows: Tensor, weight: Tensor, offsets_e: Tensor, layout: str) -> Tensor:
    """Grouped GEMM of rows and expert weights; rows beyond `offsets_e[-1]` are uninitialised in the result."""
    splits = _splits(offsets_e)
    out = rows.new_empty(rows.shape[0], weight.shape[1 if layout == "TN" else 2])
    held = [i for i, size in enumerate(splits) if size]
    if held:
        sizes = [splits[i] for i in held]
        general_grouped_gemm(
            [weight[i] for i in held],
            list(_held(rows, splits).split(sizes)),
            [out[: sum(splits)]],
            [None] * len(held),
            rows.dtype,
            layout=layout,
            m_splits=sizes,
            grad=layout == "NN",
            single_output=True,
        )
    return out


def _splits(offsets_e: Tensor) -> list[int]:
    """Number of rows per expert, on the host. Synchronises with the device."""
    ends = offsets_e.tolist()
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _held(rows: Tensor, splits: list[int]) -> Tensor:
    """Removes the padding rows after the last expert's rows."""
    return rows[: sum(splits)].contiguous()


# norms and attention


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return _TERMSNorm.apply(x, weight, eps, zero_centered)


class _TERMSNorm(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows = x.flatten(0, -2).contiguous()
        if rows.shape[0] == 0:
            ctx.empty = True
            ctx.save_for_backward(rows, weight)
            return torch.empty_like(x)
        ctx.empty, ctx.zero_centered = False, zero_centered
        out, _, scale_T = tex.rmsnorm_fwd(rows, weight, eps, None, None, TE_DType[x.dtype], 0, zero_centered)
        ctx.save_for_backward(rows, weight, scale_T)
        return out.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, *scales = ctx.saved_tensors
        if ctx.empty:
            return torch.empty_like(grads[0]), torch.zeros_like(weight), None, None
        grad_rows = grads[0].reshape(rows.shape).contiguous()
        grad_x, grad_weight = tex.rmsnorm_bwd(grad_rows, rows, *scales, weight, 0, ctx.zero_centered)
        return grad_x.view_as(grads[0]), grad_weight, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return _TELayerNorm.apply(x, weight, bias, eps, zero_centered)


class _TELayerNorm(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows = x.flatten(0, -2).contiguous()
        if rows.shape[0] == 0:
            ctx.empty = True
            ctx.save_for_backward(rows, weight)
            return torch.empty_like(x)
        ctx.empty, ctx.zero_centered = False, zero_centered
        out, *moments = tex.layernorm_fwd(rows, weight, bias, eps, None, None, TE_DType[x.dtype], 0, zero_centered)
        ctx.save_for_backward(rows, weight, *moments)
        return out.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, *moments = ctx.saved_tensors
        if ctx.empty:
            return torch.empty_like(grads[0]), torch.zeros_like(weight), torch.zeros_like(weight), None, None
        grad_rows = grads[0].reshape(rows.shape).contiguous()
        grad_x, grad_weight, grad_bias = tex.layernorm_bwd(grad_rows, rows, *moments, weight, 0, ctx.zero_centered)
        return grad_x.view_as(grads[0]), grad_weight, grad_bias, None, None


def attention(inputs: AttentionInputs) -> Tensor:
    """See `Kernels.attention`. Sinks, dropout, document masks and full attention use the reference implementation."""
    q_SBND, k_SBGD, v_SBGE, config, *_ = inputs
    if inputs.has_sinks or inputs.has_dropout or inputs.segments_BS is not None or not config.causal:
        return reference.attention(inputs)
    num_heads, width = q_SBND.shape[2:]
    module = te.DotProductAttention(
        num_heads,
        (width, v_SBGE.shape[3]),
        num_gqa_groups=k_SBGD.shape[2],
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=config.window,
        softmax_scale=config.softmax_scale,
    )
    out_SBF: Tensor = module(q_SBND.contiguous(), k_SBGD.contiguous(), v_SBGE.contiguous())
    return out_SBF.unflatten(-1, (num_heads, v_SBGE.shape[3]))


# elementwise and loss


def activation(x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
    plain_swiglu = config == ActivationConfig(kind="silu", gated=True)
    if not plain_swiglu or x_RF.numel() == 0:
        return reference.activation(x_RF, probs_R, config)
    return _SwiGLU.apply(x_RF, probs_R)


class _SwiGLU(AutogradFunction):
    """Autograd function of Transformer Engine's SwiGLU, multiplied by a probability per row if given. Rows of
    probability 0 are padding."""

    @staticmethod
    def forward(ctx: Any, x_RF: Tensor, probs_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_RF, probs_R)
        out_RF: Tensor = tex.swiglu(x_RF.contiguous(), None)
        return out_RF if probs_R is None else _scale_rows(out_RF, probs_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_RF, probs_R), (grad_RF,) = ctx.saved_tensors, grads
        if probs_R is None:
            return tex.dswiglu(grad_RF.contiguous(), x_RF.contiguous(), None), None
        grad_x = tex.dswiglu(_scale_rows(grad_RF, probs_R), x_RF.contiguous(), None)
        products_RF = grad_RF.float() * tex.swiglu(x_RF.contiguous(), None).float()
        empty_R = probs_R == 0
        grad_probs = products_RF.sum(dim=-1).masked_fill(empty_R, 0).to(probs_R.dtype)
        return grad_x.masked_fill_(empty_R[..., None], 0), grad_probs


def _scale_rows(x_RF: Tensor, probs_R: Tensor) -> Tensor:
    """Multiplies every row by its probability; rows of probability 0 become 0, even if they contain nan."""
    product_RF = (x_RF.float() * probs_R.float()[..., None]).to(x_RF.dtype)
    return product_RF.masked_fill_((probs_R == 0)[..., None], 0)


def cross_entropy(logits_TV: Tensor, labels_T: Tensor, shard: VocabShard | None = None) -> Tensor:
    # Transformer Engine's vocabulary-parallel loss needs the process group, which ops do not receive
    if labels_T.numel() == 0 or shard is not None:
        return reference.cross_entropy(logits_TV, labels_T, shard)
    loss_1T: Tensor = parallel_cross_entropy(logits_TV[None], labels_T[None])
    return loss_1T.view(-1)
