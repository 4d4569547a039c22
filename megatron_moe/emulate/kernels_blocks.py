"""Attention between two parts of a sequence: what its kernels on a GPU take. See `kernels.py`."""

from torch import Tensor

from megatron_moe.emulate.kernels_heads import WIDEST_HEAD
from megatron_moe.kernels import reference
from megatron_moe.kernels.ops import Span
from megatron_moe.kernels.pairs import pairs
from megatron_moe.specs.attention import CoreAttentionSpec


def attention_block(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    spec: CoreAttentionSpec,
    query: Span,
    key: Span,
    dropout_key: tuple[int | str, ...] | None,
    out_SBNE: Tensor,
    lse_SBN: Tensor,
) -> None:
    """Adds in place. Dropout is plain torch, as on a GPU."""
    if _plain(q_SBND, v_SBGE, spec, dropout_key):
        reference.attention_block(q_SBND, k_SBGD, v_SBGE, spec, query, key, dropout_key, out_SBNE, lse_SBN)
        return
    _strided(q_SBND, k_SBGD, v_SBGE)


def attention_block_grad(
    grad_SBNE: Tensor,
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    out_SBNE: Tensor,
    lse_SBN: Tensor,
    delta_SBN: Tensor,
    spec: CoreAttentionSpec,
    query: Span,
    key: Span,
    dropout_key: tuple[int | str, ...] | None,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    if _plain(q_SBND, v_SBGE, spec, dropout_key):
        known = grad_SBNE, q_SBND, k_SBGD, v_SBGE, out_SBNE, lse_SBN, delta_SBN
        reference.attention_block_grad(*known, spec, query, key, dropout_key, into)
        return
    strided = _strided(grad_SBNE, q_SBND, k_SBGD, v_SBGE)
    for pair in pairs(query.chunks, key.chunks, spec):
        of_rows = [x_SBN[pair.rows].permute(1, 2, 0).contiguous() for x_SBN in (lse_SBN, delta_SBN)]
        del of_rows
    del strided


def _plain(q_SBND: Tensor, v_SBGE: Tensor, spec: CoreAttentionSpec, dropout_key: object) -> bool:
    drops = spec.dropout > 0.0 and dropout_key is not None
    return drops or max(q_SBND.shape[-1], v_SBGE.shape[-1]) > WIDEST_HEAD


def _strided(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
