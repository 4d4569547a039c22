"""Linear attention of fla-core (flash-linear-attention).

Triton 3.4 to 3.7.0 miscompiles its backward on Hopper GPUs (issue 640 of that project). With these versions it needs
the package tilelang, and is rejected here without it.
"""

import importlib.util

import torch
import triton
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor

from megatron_moe.kernels.kernel_set import Priority, Support
from megatron_moe.kernels.reference import linear_attention as reference

NAME = "fla"
NEEDS = ("fla",)
ON_REQUEST = True

_MISCOMPILES = ((3, 4, 0), (3, 7, 1))
_EPS = 1e-6
"""Epsilon of the L2 norm in fla's kernels."""


def support(op: str, device: torch.device, dtype: torch.dtype) -> Support:
    """Rates this backend for one op on a device and dtype; called by `megatron_moe.kernels.registry`."""
    if device.type != "cuda":
        return Support(Priority.NO, "it runs on GPUs only")
    if dtype is torch.float64:
        return Support(Priority.NO, "fp64 is used for verification only and runs on plain torch")
    first, repaired = _MISCOMPILES
    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
    if is_hopper and first <= version < repaired and importlib.util.find_spec("tilelang") is None:
        return Support(
            Priority.NO,
            f"Triton {triton.__version__} miscompiles its backward on Hopper; install tilelang or Triton 3.7.1",
        )
    return Support(Priority.YES, "chunked kernels of fla-core; documents synchronise with the host")


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
    """See `Kernels.linear_attention`. Decays per channel without the delta rule use the reference implementation."""
    by_channel = log_decay_SBM.dim() == 4
    if (by_channel and beta_SBM is None) or not v_SBME.numel():
        return reference.linear_attention(q_SBND, k_SBND, v_SBME, log_decay_SBM, beta_SBM, segments_BS, scale, eps)
    length, batch, heads, _ = v_SBME.shape
    if eps is not None and eps != _EPS:
        q_SBND, k_SBND = (_normalised(x, eps) for x in (q_SBND, k_SBND))
    options = {"scale": scale, "cu_seqlens": None if segments_BS is None else _boundaries(segments_BS)}

    def by_batch(x_SB: Tensor) -> Tensor:
        """[S, B, ...] -> [B, S, ...], or [1, B * S, ...] with documents."""
        x_BS = x_SB.transpose(0, 1)
        return x_BS if segments_BS is None else x_BS.flatten(0, 1)[None]

    q, k, v, decay = (by_batch(x) for x in (q_SBND, k_SBND, v_SBME, log_decay_SBM))
    if beta_SBM is None:
        q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
        out = chunk_simple_gla(q, k, v, g=decay, **options)[0]
    else:
        delta_rule = chunk_kda if by_channel else chunk_gated_delta_rule
        out = delta_rule(q, k, v, g=decay, beta=by_batch(beta_SBM), use_qk_l2norm_in_kernel=eps == _EPS, **options)[0]
    return out.view(batch, length, *out.shape[2:]).transpose(0, 1)


def _normalised(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _boundaries(segments_BS: Tensor) -> Tensor:
    """First token of every document in [B * S], and B * S; int32."""
    starts_BS = torch.ones_like(segments_BS, dtype=torch.bool)
    starts_BS[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
    starts = starts_BS.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([segments_BS.numel()])]).to(torch.int32)
