"""Attention between two parts of a sequence: what its kernels on a GPU take. See `kernels.py`."""

from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels import reference
from megatron_moe.kernels.attention_blocks import MaskBlock, mask_blocks
from megatron_moe.kernels.ops import PositionSpan
from megatron_moe.memory_emulation.kernels_heads import (
    cudnn_backward,
    cudnn_forward,
    is_served,
)


def attention_block(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    config: CoreAttentionConfig,
    query: PositionSpan,
    key: PositionSpan,
    dropout_key: tuple[int | str, ...] | None,
    out_SBNE: Tensor,
    lse_SBN: Tensor,
) -> None:
    """cuDNN gives a part that is merged in place; our own kernels go on in place. Dropout, fp32: plain torch."""
    if _plain(q_SBND, v_SBGE, config, dropout_key):
        reference.attention_block(q_SBND, k_SBGD, v_SBGE, config, query, key, dropout_key, out_SBNE, lse_SBN)
        return
    strided = _strided(q_SBND, k_SBGD, v_SBGE)
    for pair in mask_blocks(query.chunks, key.chunks, config):
        if by_cudnn(q_SBND, query, pair):
            rows = q_SBND[pair.rows]
            part = cudnn_forward(rows, v_SBGE)
            del part
    del strided


def attention_block_grad(
    grad_SBNE: Tensor,
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    out_SBNE: Tensor,
    lse_SBN: Tensor,
    delta_SBN: Tensor,
    config: CoreAttentionConfig,
    query: PositionSpan,
    key: PositionSpan,
    dropout_key: tuple[int | str, ...] | None,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    if _plain(q_SBND, v_SBGE, config, dropout_key):
        known = grad_SBNE, q_SBND, k_SBGD, v_SBGE, out_SBNE, lse_SBN, delta_SBN
        reference.attention_block_grad(*known, config, query, key, dropout_key, into)
        return
    strided = _strided(grad_SBNE, q_SBND, k_SBGD, v_SBGE)
    for pair in mask_blocks(query.chunks, key.chunks, config):
        cudnn = by_cudnn(q_SBND, query, pair)
        of_rows = [
            x_SBN[pair.rows].permute(1, 2, 0).contiguous() for x_SBN in ((lse_SBN,) if cudnn else (lse_SBN, delta_SBN))
        ]
        if cudnn:
            shares = cudnn_backward(q_SBND[pair.rows], k_SBGD[pair.keys], v_SBGE[pair.keys])
            del shares
        del of_rows
    del strided


def by_cudnn(q_SBND: Tensor, query: PositionSpan, pair: MaskBlock) -> bool:
    """On a GPU that cuDNN serves."""
    known = query.segments_BS is None and (pair.sees_all or pair.causal_square)
    return known and q_SBND.dtype.itemsize == 2 and q_SBND.shape[-1] % 8 == 0


def _plain(q_SBND: Tensor, v_SBGE: Tensor, config: CoreAttentionConfig, dropout_key: object) -> bool:
    drops = config.dropout > 0.0 and dropout_key is not None
    return drops or not is_served(q_SBND, v_SBGE)


def _strided(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
