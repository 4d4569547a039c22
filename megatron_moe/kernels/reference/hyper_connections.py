"""Reference implementation of hyper-connections; `config/hyper_connections.py` has the formulas.

The streams are saved in their own dtype, and the mixing coefficients of a token are recomputed in backward from their
saved projection, so that no Sinkhorn iteration is saved.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.parallel.autograd_function import AutogradFunction


def hyper_connection_read(
    stream_SBW: Tensor, matrix_MW: Tensor, scale: Tensor, bias: Tensor, config: HyperConnectionsConfig
) -> tuple[Tensor, ...]:
    return _ReadStreams.apply(stream_SBW, matrix_MW, scale, bias, config)


def hyper_connection_sum(stream_SBW: Tensor, pre_TN: Tensor) -> Tensor:
    total_TH = torch.einsum("tn,tnh->th", pre_TN, _by_stream(stream_SBW, pre_TN))
    return total_TH.to(stream_SBW.dtype).unflatten(0, stream_SBW.shape[:2])


def hyper_connection_write(stream_SBW: Tensor, out_SBH: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
    return _WriteStreams.apply(stream_SBW, out_SBH, post_TN, mix_TNN)


def sinkhorn(logits_TNN: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic matrices: softmax of the rows, then alternating normalisation of columns and rows. The last
    step normalises columns, so rows sum to 1 only up to the convergence error."""
    matrix_TNN = logits_TNN.softmax(dim=-1) + eps
    matrix_TNN = matrix_TNN / (matrix_TNN.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix_TNN = matrix_TNN / (matrix_TNN.sum(dim=-1, keepdim=True) + eps)
        matrix_TNN = matrix_TNN / (matrix_TNN.sum(dim=-2, keepdim=True) + eps)
    return matrix_TNN


def _coefficients(logits_TM: Tensor, scale: Tensor, bias: Tensor, config: HyperConnectionsConfig) -> tuple[Tensor, ...]:
    """Coefficients (pre, post, mix) of a connection, or (pre,) of the head, from the normed projection of the
    streams."""
    n = config.num_streams
    sizes = [n, n, n * n][: len(scale)]
    parts = zip(logits_TM.split(sizes, dim=-1), scale, bias.split(sizes), strict=True)
    pre_TN, *others = (logits * factor + offset for logits, factor, offset in parts)
    pre_TN = pre_TN.sigmoid() + config.eps
    if not others:
        return (pre_TN,)
    post_TN, mix_TM = others
    return pre_TN, 2 * post_TN.sigmoid(), sinkhorn(mix_TM.unflatten(-1, (n, n)), config.sinkhorn_iterations, config.eps)


def _by_stream(stream_SBW: Tensor, of_streams_TN: Tensor) -> Tensor:
    """Streams as [T, n, H] in the dtype of the coefficients `of_streams_TN`."""
    return stream_SBW.flatten(0, 1).unflatten(-1, (of_streams_TN.shape[1], -1)).to(of_streams_TN.dtype)


class _ReadStreams(AutogradFunction):
    """Autograd function of `hyper_connection_read`."""

    @staticmethod
    def forward(
        ctx: Any, stream_SBW: Tensor, matrix_MW: Tensor, scale: Tensor, bias: Tensor, config: HyperConnectionsConfig
    ) -> tuple[Tensor, ...]:
        dtype = internal_dtype(stream_SBW.dtype)
        wide_TW = stream_SBW.flatten(0, 1).to(dtype)
        projected_TM = wide_TW @ matrix_MW.to(dtype).t()
        factor_T1 = (wide_TW.square().mean(dim=-1, keepdim=True) + config.norm_eps).rsqrt()
        weights = _coefficients(projected_TM * factor_T1, scale.to(dtype), bias.to(dtype), config)
        ctx.config = config
        ctx.save_for_backward(stream_SBW, matrix_MW, scale, bias, projected_TM, factor_T1, weights[0])
        ctx.set_materialize_grads(False)
        return stream_SBW.view_as(stream_SBW), hyper_connection_sum(stream_SBW, weights[0]), *weights

    @staticmethod
    def backward(ctx: Any, grad_stream: Tensor | None, grad_out: Tensor, *grad_weights: Tensor | None) -> Any:
        stream_SBW, matrix_MW, scale, bias, projected_TM, factor_T1, pre_TN = ctx.saved_tensors
        dtype, config = projected_TM.dtype, ctx.config
        rows_TNH, grad_out_TH = _by_stream(stream_SBW, pre_TN), grad_out.flatten(0, 1).to(dtype)
        # gradient of the coefficients of the weighted sum
        grad_pre_TN = torch.einsum("tnh,th->tn", rows_TNH, grad_out_TH)
        if grad_weights[0] is not None:
            grad_pre_TN += grad_weights[0]
        # gradient through the mixing coefficients, which are recomputed
        with torch.enable_grad():
            logits_TM, wide_scale, wide_bias = inputs = [
                each.detach().requires_grad_() for each in (projected_TM * factor_T1, scale.to(dtype), bias.to(dtype))
            ]
            weights = _coefficients(logits_TM, wide_scale, wide_bias, config)
        grads = (grad_pre_TN, *grad_weights[1:])
        grad_logits_TM, grad_scale, grad_bias = torch.autograd.grad(weights, inputs, grads)
        grad_projected_TM = grad_logits_TM * factor_T1
        # d factor / d mean square = -factor^3 / 2, and the mean square has the derivative 2 x / W
        pull_T1 = -(grad_logits_TM * projected_TM).sum(dim=-1, keepdim=True) * factor_T1**3 / stream_SBW.shape[-1]
        wide_TW = rows_TNH.flatten(1)
        grad_matrix_MW = grad_projected_TM.t() @ wide_TW
        grad_TW = torch.addmm(wide_TW * pull_T1, grad_projected_TM, matrix_MW.to(dtype))
        grad_TW += (pre_TN[:, :, None] * grad_out_TH[:, None, :]).flatten(1)
        if grad_stream is not None:
            grad_TW += grad_stream.flatten(0, 1)
        of_parameters = grad_matrix_MW.to(matrix_MW.dtype), grad_scale.to(scale.dtype), grad_bias.to(bias.dtype)
        return grad_TW.to(stream_SBW.dtype).view_as(stream_SBW), *of_parameters, None


class _WriteStreams(AutogradFunction):
    """Autograd function of `hyper_connection_write`."""

    @staticmethod
    def forward(ctx: Any, stream_SBW: Tensor, out_SBH: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
        ctx.save_for_backward(stream_SBW, out_SBH, post_TN, mix_TNN)
        added_TNH = post_TN[:, :, None] * out_SBH.flatten(0, 1)[:, None, :].to(post_TN.dtype)
        new_TNH = torch.baddbmm(added_TNH, mix_TNN.mT, _by_stream(stream_SBW, post_TN))
        return new_TNH.to(stream_SBW.dtype).view_as(stream_SBW)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        stream_SBW, out_SBH, post_TN, mix_TNN = ctx.saved_tensors
        grad_TNH, out_TH1 = _by_stream(grads[0], post_TN), out_SBH.flatten(0, 1).to(post_TN.dtype).unsqueeze(-1)
        grad_stream = (mix_TNN @ grad_TNH).to(stream_SBW.dtype).view_as(stream_SBW)
        grad_out = (post_TN[:, None, :] @ grad_TNH).to(out_SBH.dtype).view_as(out_SBH)
        grad_mix_TNN = _by_stream(stream_SBW, post_TN) @ grad_TNH.mT
        return grad_stream, grad_out, (grad_TNH @ out_TH1).squeeze(-1), grad_mix_TNN
