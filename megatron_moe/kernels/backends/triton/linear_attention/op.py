"""Linear attention with decay in chunks (Mamba-2, arXiv 2405.21060), the gated delta rule (arXiv 2412.06464), and Kimi
delta attention (arXiv 2510.26692).

Computations within a chunk of 64 tokens are matmuls; between chunks, one program per head and tile of value
channels carries the state in fp32. The delta rule solves one triangular system per chunk. Backward recomputes states
and solutions, so only the inputs, the inverses of the systems and, with decays per channel, the scores are saved.
"""

from typing import Any

from torch import Tensor

from megatron_moe.kernels.backends.triton.linear_attention import backward, channels, forward
from megatron_moe.kernels.backends.triton.linear_attention.tiles import (
    WIDEST_HEAD,
    ScanKeys,
    ScanShape,
    with_even_row_stride,
)
from megatron_moe.kernels.reference import linear_attention as reference
from megatron_moe.parallel.autograd_function import AutogradFunction


def linear_attention(
    q_SBND: Tensor,
    k_SBND: Tensor,
    v_SBME: Tensor,
    log_decay_SBM: Tensor,
    beta_SBM: Tensor | None,
    segments_BS: Tensor | None,
    scale: float,
    eps: float | None = None,
) -> Tensor:
    """See `Kernels.linear_attention`. Head dims above 128 use the reference implementation."""
    inputs = (q_SBND, k_SBND, v_SBME, log_decay_SBM, beta_SBM, segments_BS, scale, eps)
    if max(q_SBND.shape[-1], v_SBME.shape[-1]) > WIDEST_HEAD or not v_SBME.numel():
        return reference.linear_attention(*inputs)
    return _ChunkScan.apply(*inputs)


class _ChunkScan(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        segments: Tensor | None,
        scale: float,
        eps: float | None,
    ) -> Tensor:
        ctx.dtypes = log_decay.dtype, None if beta is None else beta.dtype
        q, k, v, decay = (
            with_even_row_stride(q),
            with_even_row_stride(k),
            with_even_row_stride(v),
            log_decay.float().contiguous(),
        )
        beta = None if beta is None else beta.float().contiguous()
        segments = None if segments is None else segments.contiguous()
        ctx.shape, ctx.scale = ScanShape.of(q, k, v, eps), scale
        keys, decays = _keys(q, k, decay, ctx.shape)
        scores = products = inverse = None
        if decays is not None:
            scores, products = channels.pair_products(q, k, decays, ctx.shape, delta=beta is not None)
        if beta is not None:
            inverse = forward.inverse_systems(keys, beta, segments, products)
            del products
        before, stored, _ = forward.states(keys, v, beta, segments, inverse)
        ctx.save_for_backward(q, k, v, decay, beta, segments, inverse, scores)
        return forward.outputs(keys, stored, segments, before, scores, scale, delta=beta is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, beta, segments, inverse, scores = ctx.saved_tensors
        keys, decays = _keys(q, k, decay, ctx.shape)
        grad = grads[0].contiguous()
        found, partial = backward.gradients(grad, keys, v, beta, segments, inverse, scores, ctx.scale)
        if decays is not None and partial is not None:
            of_log_decay = channels.gradients(partial, q, k, beta, found.beta, decays, ctx.shape)
            found = found._replace(log_decay=of_log_decay)
        del keys, decays, partial
        of_decay, of_beta = ctx.dtypes
        of_q, of_k = (x.unflatten(2, (ctx.shape.groups, -1)) for x in (found.q, found.k))
        if ctx.shape.heads > ctx.shape.groups:
            of_q, of_k = of_q.sum(dim=3), of_k.sum(dim=3)
        of_q, of_k = of_q.view(q.shape).to(q.dtype), of_k.view(k.shape).to(k.dtype)
        grad_beta = None if found.beta is None else found.beta.to(of_beta)
        return of_q, of_k, found.v, found.log_decay.to(of_decay), grad_beta, None, None, None


def _keys(q: Tensor, k: Tensor, decay: Tensor, shape: ScanShape) -> tuple[ScanKeys, channels.ChannelDecays | None]:
    """Returns (keys that read and write states, decays per channel, if there are any)."""
    if decay.dim() == 3:
        return ScanKeys(q, k, k, decay, shape), None
    decays = channels.decayed_keys(q, k, decay, shape)
    return decays.keys, decays
