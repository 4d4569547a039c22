"""The recurrences that fla-core computes in chunks, token by token in fp32."""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    scale: float,
    norm: bool,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """q and k [B, T, H, K], v [B, T, HV, V], decay [B, T, HV] or [B, T, HV, K], beta [B, T, HV] -> [B, T, HV, V].

    `cu_seqlens`: int first tokens of the documents of one row, and T."""
    batch, length, heads, _ = v.shape
    starts = [0, length]
    if cu_seqlens is not None:
        assert batch == 1 and cu_seqlens.dtype in (torch.int32, torch.int64)
        starts = cu_seqlens.tolist()
        assert starts[0] == 0 and starts[-1] == length and all(a < b for a, b in zip(starts, starts[1:], strict=False))
    dtype = v.dtype
    q, k, v, decay = (x.float() for x in (q, k, v, decay))
    if norm:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    decay = decay[..., None] if decay.dim() == 3 else decay
    state, outs = None, []
    for token in range(length):
        if token in starts:
            state = v.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
        state = state * decay[:, token, :, :, None].exp()
        key, value = k[:, token], v[:, token]
        if beta is not None:
            value = beta[:, token, :, None].float() * (value - torch.einsum("bhk,bhkv->bhv", key, state))
        state = state + key[..., None] * value[..., None, :]
        outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, token], state))
    return torch.stack(outs, dim=1).to(dtype)
