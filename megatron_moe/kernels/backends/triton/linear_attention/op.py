"""Linear attention with decay in chunks (Mamba-2, arXiv 2405.21060) and the gated delta rule (arXiv 2412.06464).

Computations within a chunk of 64 tokens are matmuls; between chunks, one program per head and tile of value
channels carries the state in fp32. The delta rule solves one triangular system per chunk. Backward recomputes states
and solutions, so only the inputs and the inverses of the systems are saved.
"""

from typing import Any

from torch import Tensor

from megatron_moe.kernels.backends.triton.linear_attention import backward, forward
from megatron_moe.kernels.backends.triton.linear_attention.tiles import WIDEST_HEAD, ScanShape, strided
from megatron_moe.kernels.reference import linear_attention as reference
from megatron_moe.kernels.reference.linear_attention import channel_decay
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
    """See `Kernels.linear_attention`. Head dims above 128 and decays per channel use the reference implementation."""
    inputs = (q_SBND, k_SBND, v_SBME, log_decay_SBM, beta_SBM, segments_BS, scale, eps)
    if log_decay_SBM.dim() == 4:
        return channel_decay(*inputs)
    if max(q_SBND.shape[-1], v_SBME.shape[-1]) > WIDEST_HEAD or not v_SBME.numel():
        return reference.linear_attention(*inputs)
    out: Tensor = _ChunkScan.apply(*inputs)
    return out


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
        q, k, v, decay = strided(q), strided(k), strided(v), log_decay.float().contiguous()
        beta = None if beta is None else beta.float().contiguous()
        segments = None if segments is None else segments.contiguous()
        ctx.shape, ctx.scale = ScanShape.of(q, k, v, eps), scale
        inverse = None if beta is None else forward.inverse_systems(k, decay, beta, segments, ctx.shape)
        before, stored, _ = _states(k, v, decay, beta, segments, inverse, ctx.shape)
        ctx.save_for_backward(q, k, v, decay, beta, segments, inverse)
        return forward.outputs(q, k, stored, decay, segments, before, scale, ctx.shape, delta=beta is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, beta, segments, inverse = ctx.saved_tensors
        before, stored, system = _states(k, v, decay, beta, segments, inverse, ctx.shape)
        grad = grads[0].contiguous()
        found = backward.gradients(grad, q, k, v, decay, segments, before, stored, system, ctx.scale, ctx.shape)
        of_decay, of_beta = ctx.dtypes
        of_q, of_k = (x.unflatten(2, (ctx.shape.groups, -1)) for x in (found.q, found.k))
        if ctx.shape.heads > ctx.shape.groups:
            of_q, of_k = of_q.sum(dim=3), of_k.sum(dim=3)
        of_q, of_k = of_q.view(q.shape).to(q.dtype), of_k.view(k.shape).to(k.dtype)
        grad_beta = None if found.beta is None else found.beta.to(of_beta)
        return of_q, of_k, found.v, found.log_decay.to(of_decay), grad_beta, None, None, None


def _states(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    segments: Tensor | None,
    inverse: Tensor | None,
    shape: ScanShape,
) -> tuple[Tensor, Tensor, backward.DeltaSystem | None]:
    """Returns (states before chunks, stored values, systems of the delta rule)."""
    system = None
    if beta is not None and inverse is not None:
        solved = forward.solutions(k, v, decay, beta, segments, inverse, shape)
        system = backward.DeltaSystem(beta, inverse, *solved)
    before, stored = forward.states(k, v, decay, segments, None if system is None else system[2:], shape)
    return before, stored, system
