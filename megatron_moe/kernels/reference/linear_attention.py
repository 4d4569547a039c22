"""Reference implementation of linear attention with decay, in chunks of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.linear_attention import CHUNK
from megatron_moe.kernels.ops import internal_dtype


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


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_first: bool) -> Tensor:
    wide = internal_dtype(x.dtype)
    total, silu = x.to(wide), F.silu(gate.to(wide))
    if not norm_first:
        total = total * silu
    out = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps) * weight.to(wide)
    return (out * silu if norm_first else out).to(x.dtype)
