"""Reference implementation of linear attention with decay, in chunks of tokens."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.linear_attention import CHUNK
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.parallel.autograd_function import AutogradFunction

_BLOCK = 16
"""Tokens per block of a chunk. With a decay per channel, scores within a block are computed from a tensor [16, 16,
D]."""


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
    if log_decay_SBM.dim() == 4:
        return _ChannelDecay.apply(q_SBND, k_SBND, v_SBME, log_decay_SBM, beta_SBM, segments_BS, scale, eps)
    wide, (length, batch, num_heads, _) = internal_dtype(q_SBND.dtype), v_SBME.shape
    if eps is not None:
        q_SBND, k_SBND = (x * torch.rsqrt(x.square().sum(-1, True) + eps) for x in (q_SBND.to(wide), k_SBND.to(wide)))
    repeats = num_heads // q_SBND.shape[2]

    def chunked(x: Tensor) -> Tensor:  # [S, B, M, ...] -> [B, M, C, CHUNK, ...]
        padding = (0, 0) * (x.dim() - 1) + (0, -length % CHUNK)
        return F.pad(x.to(wide), padding).unflatten(0, (-1, CHUNK)).movedim((2, 3), (0, 1))

    q, k = (chunked(x.repeat_interleave(repeats, dim=2)) for x in (q_SBND * scale, k_SBND))
    v, log_decay = chunked(v_SBME), chunked(log_decay_SBM).cumsum(-1)
    if segments_BS is None:
        segments_BS = torch.zeros(batch, length, device=v.device, dtype=torch.int64)
    # padding belongs to the last document and changes nothing, because its k, v and log decay are 0
    padded = torch.cat([segments_BS, segments_BS[:, -1:].expand(-1, -length % CHUNK)], dim=1)
    segments = padded.view(batch, 1, -1, CHUNK)
    same = segments[..., :, None] == segments[..., None, :]
    seen = same & torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    between = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    last = segments[..., -1:]
    before = torch.cat([segments[:, :, :1, :1], last[:, :, :-1]], dim=2)
    from_state = log_decay.masked_fill(segments != before, -torch.inf).exp()[..., None]
    to_end = (log_decay[..., -1:] - log_decay).masked_fill(segments != last, -torch.inf).exp()[..., None]
    carry = log_decay[..., -1:].masked_fill(before != last, -torch.inf).exp()[..., None]
    values, read = v, None
    if beta_SBM is not None:
        # Each token stores its value minus the state's value for its key. The latter depends on the earlier tokens of
        # the chunk, so the stored values solve a triangular system.
        beta = chunked(beta_SBM)[..., None]
        system = (beta * (k @ k.mT) * between).tril(-1) + torch.eye(CHUNK, device=v.device, dtype=wide)
        values, read = torch.linalg.solve_triangular(
            system, torch.cat([beta * v, beta * from_state * k], dim=-1), upper=False, unitriangular=True
        ).split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ k.mT) * between
    state, outs = v.new_zeros(batch, num_heads, k.shape[-1], v.shape[-1]), []
    for chunk in range(v.shape[2]):
        stored = values[:, :, chunk]
        if read is not None:
            stored = stored - read[:, :, chunk] @ state
        outs.append((from_state * q)[:, :, chunk] @ state + scores[:, :, chunk] @ stored)
        state = carry[:, :, chunk] * state + (to_end * k)[:, :, chunk].mT @ stored
    out = torch.stack(outs, dim=2).movedim((0, 1), (2, 3)).flatten(0, 1)[:length]
    return out.to(v_SBME.dtype)


_DIFFERENTIABLE = ("q", "k", "v", "log_decay", "beta")


class _ChannelDecay(AutogradFunction):
    """Linear attention with a decay per channel of k (Kimi delta attention, arXiv 2510.26692). Only the inputs are
    saved: backward computes the states of the chunks again, and then each chunk with its gradients."""

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
        ctx.save_for_backward(q, k, v, log_decay, beta, segments)
        ctx.scale, ctx.eps = scale, eps
        out, state = torch.empty_like(v, memory_format=torch.contiguous_format), _no_state(k, v)
        for start, inputs in _chunks(q, k, v, log_decay, beta, segments):
            chunk, state = _run_chunk(inputs, state, scale, eps)
            out[start : start + len(chunk)] = chunk
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        chunks = list(_chunks(*tensors))
        states = [_no_state(*tensors[1:3])]
        for _, inputs in chunks[:-1]:
            states.append(_run_chunk(inputs, states[-1], ctx.scale, ctx.eps)[1])
        found, of_state = [torch.empty_like(x) for x in tensors[:5] if x is not None], torch.zeros_like(states[0])
        for start, inputs in reversed(chunks):
            own = {
                name: x.detach().requires_grad_()
                for name, x in inputs._asdict().items()
                if name in _DIFFERENTIABLE and x is not None
            }
            leaves = [*own.values(), states.pop().requires_grad_()]
            with torch.enable_grad():
                out, state = _run_chunk(inputs._replace(**own), leaves[-1], ctx.scale, ctx.eps)
            of_out = grads[0][start : start + len(out)]
            *of_inputs, of_state = torch.autograd.grad([out, state], leaves, [of_out, of_state])
            for whole, part in zip(found, of_inputs, strict=True):
                whole[start : start + len(part)] = part
        return *found, *[None] * (8 - len(found))


def _no_state(k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros(*v.shape[1:3], k.shape[-1], v.shape[-1], dtype=internal_dtype(v.dtype), device=v.device)


class _Chunk(NamedTuple):
    """Inputs of a chunk of L tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None
    segments: Tensor | None
    """Document id of each token of the chunk, [B, L]; None if the state is not reset between documents."""
    before: Tensor | None
    """Document id of the token before the chunk, [B, 1]; for the first chunk, that of its first token. None if
    `segments` is None."""


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, segments: Tensor | None
) -> Iterator[tuple[int, _Chunk]]:
    """Yields the index of each chunk's first token, and the inputs of the chunk."""
    for start, end in pairwise((*range(0, len(q), CHUNK), len(q))):
        inputs = _Chunk(
            q=q[start:end],
            k=k[start:end],
            v=v[start:end],
            log_decay=log_decay[start:end],
            beta=None if beta is None else beta[start:end],
            segments=None if segments is None else segments[:, start:end],
            before=None if segments is None else segments[:, max(start - 1, 0), None],
        )
        yield start, inputs


def _run_chunk(inputs: _Chunk, state: Tensor, scale: float, eps: float | None) -> tuple[Tensor, Tensor]:
    """Output [L, B, M, E] of a chunk, in the dtype of v, and the state [B, M, D, E] after it."""
    q, k, v, log_decay, beta, segments, before = inputs
    wide, repeats = state.dtype, v.shape[2] // q.shape[2]
    q, k = (x.to(wide).repeat_interleave(repeats, dim=2).movedim(0, 2) for x in (q, k))
    if eps is not None:
        q, k = (x * torch.rsqrt(x.square().sum(-1, True) + eps) for x in (q, k))
    values, total = v.to(wide).movedim(0, 2), log_decay.to(wide).movedim(0, 2).cumsum(-2)
    scores = _decayed_products(scale * q, k, total)
    from_state, to_end = total.exp(), (total[..., -1:, :] - total).exp()
    carry = from_state[..., -1, :, None]
    if segments is not None and before is not None:
        last = segments[:, -1:]
        scores = scores.masked_fill((segments[:, :, None] != segments[:, None])[:, None], 0)
        from_state, to_end = (
            x.masked_fill((segments != each)[:, None, :, None], 0) for x, each in ((from_state, before), (to_end, last))
        )
        carry = carry.masked_fill((before != last)[..., None, None], 0)
    if beta is not None:
        products = _decayed_products(k, k, total)
        if segments is not None:
            products = products.masked_fill((segments[:, :, None] != segments[:, None])[:, None], 0)
        factor = beta.to(wide).movedim(0, 2)[..., None]
        system = (factor * products).tril(-1) + torch.eye(len(v), device=v.device, dtype=wide)
        values = factor * (values - (from_state * k) @ state)
        values = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
    out = scale * (from_state * q) @ state + scores @ values
    return out.movedim(2, 0).to(v.dtype), carry * state + (to_end * k).mT @ values


def _decayed_products(x: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Scores sum_d x_id k_jd exp(total_id - total_jd) for j <= i, and 0 for j > i: [B, M, L, L]. The cumulative log
    decays `total` are non-increasing. For tokens j < s <= i, where s is the first token of a block, both factors
    exp(total_i - total_s) and exp(total_s - total_j) are therefore at most 1."""
    length, rows = k.shape[-2], []
    for start in range(0, length, _BLOCK):
        of_block = slice(start, min(start + _BLOCK, length))
        own, first = total[..., of_block, :], total[..., start : start + 1, :]
        earlier = k[..., :start, :] * (first - total[..., :start, :]).exp()
        across = (x[..., of_block, :] * (own - first).exp()) @ earlier.mT
        upper = torch.ones(own.shape[-2], own.shape[-2], dtype=torch.bool, device=k.device).triu(1)
        between = (own[..., :, None, :] - own[..., None, :, :]).masked_fill(upper[..., None], -torch.inf).exp()
        inside = (x[..., of_block, None, :] * k[..., None, of_block, :] * between).sum(-1)
        rows.append(F.pad(torch.cat([across, inside], dim=-1), (0, length - of_block.stop)))
    return torch.cat(rows, dim=-2)


def short_conv(x_SBC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, segments_BS: Tensor | None) -> Tensor:
    wide, width = internal_dtype(x_SBC.dtype), weight_CK.shape[1]
    x, weight = x_SBC.to(wide), weight_CK.to(wide)
    total = torch.zeros_like(x) if bias_C is None else bias_C.to(wide).expand_as(x)
    for back in range(min(width, len(x))):
        earlier = F.pad(x, (0, 0, 0, 0, back, 0))[: len(x)]
        if segments_BS is not None:
            same = segments_BS[:, back:] == segments_BS[:, : len(x) - back]
            earlier = earlier * F.pad(same, (back, 0)).T[..., None]
        total = total + weight[:, width - 1 - back] * earlier
    return F.silu(total).to(x_SBC.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    norm_first: bool,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> Tensor:
    wide = internal_dtype(x.dtype)
    total, factor = x.to(wide), gate.to(wide).sigmoid() if activation == "sigmoid" else F.silu(gate.to(wide))
    if not norm_first:
        total = total * factor
    out = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps) * weight.to(wide)
    return (out * factor if norm_first else out).to(x.dtype)
