"""Attention between two parts of a sequence, rectangle by rectangle: by cuDNN where it supports the mask, otherwise by
our kernels, which continue the online softmax of their rows and accumulate gradients in place."""

from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels import reference
from megatron_moe.kernels.attention_blocks import MaskBlock, mask_blocks
from megatron_moe.kernels.backends.torch_native import cudnn
from megatron_moe.kernels.backends.triton.attention.backward import gradients
from megatron_moe.kernels.backends.triton.attention.forward import attend
from megatron_moe.kernels.backends.triton.attention.merge import merge
from megatron_moe.kernels.backends.triton.attention.tiles import Segments, Shape, serves, strided
from megatron_moe.kernels.ops import PositionSpan


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
    """See `Kernels.attention_block`. Dropout and fp32 are plain torch."""
    q, k, v = strided(q_SBND), strided(k_SBGD), strided(v_SBGE)
    rectangles = _rectangles(q, k, v, config, query, key, dropout_key)
    if rectangles is None:
        reference.attention_block(q_SBND, k_SBGD, v_SBGE, config, query, key, dropout_key, out_SBNE, lse_SBN)
        return
    lse_BNS = lse_SBN.permute(1, 2, 0)
    for pair, by_cudnn in rectangles:
        rows, keys = pair.rows, pair.keys
        inputs, found = (q[rows], k[keys], v[keys]), (out_SBNE[rows], lse_BNS[..., rows])
        if by_cudnn:
            merge(*found, *cudnn.forward_pair(q, k, v, config, pair))
            continue
        shape = Shape.of(*inputs, config.softmax_scale, pair.left, pair.right)
        attend(*inputs, None, _segments(query, key, pair), *found, shape, onward=True)


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
    """See `Kernels.attention_block_grad`."""
    q, k, v = strided(q_SBND), strided(k_SBGD), strided(v_SBGE)
    rectangles = _rectangles(q, k, v, config, query, key, dropout_key)
    if rectangles is None:
        known = grad_SBNE, q_SBND, k_SBGD, v_SBGE, out_SBNE, lse_SBN, delta_SBN
        reference.attention_block_grad(*known, config, query, key, dropout_key, into)
        return
    grad, (grad_q, grad_k, grad_v) = strided(grad_SBNE), into
    for pair, by_cudnn in rectangles:
        rows, keys = pair.rows, pair.keys
        if by_cudnn:
            cudnn.backward_pair(grad, q, k, v, out_SBNE, lse_SBN, config, pair, into)
            continue
        inputs, share = (q[rows], k[keys], v[keys]), (grad_q[rows], grad_k[keys], grad_v[keys])
        shape = Shape.of(*inputs, config.softmax_scale, pair.left, pair.right)
        documents = _segments(query, key, pair)
        lse_BNS, delta_BNS = _by_head(lse_SBN[rows]), _by_head(delta_SBN[rows])
        gradients(grad[rows], *inputs, documents, lse_BNS, delta_BNS, shape, share, add=True)
        del lse_BNS, delta_BNS


def _rectangles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: CoreAttentionConfig,
    query: PositionSpan,
    key: PositionSpan,
    dropout_key: tuple[int | str, ...] | None,
) -> list[tuple[MaskBlock, bool]] | None:
    """What there is to compute of a block, and whether cuDNN computes it, which has no bound of ours; None if neither
    it nor our kernels can compute some of it."""
    if config.dropout > 0.0 and dropout_key is not None:
        return None
    found = [(pair, cudnn.serves_pair(q, k, v, query, pair)) for pair in mask_blocks(query.chunks, key.chunks, config)]
    ours = (pair for pair, by_cudnn in found if not by_cudnn)
    able = all(serves(q[pair.rows], k[pair.keys], v[pair.keys], config, dropout_key) for pair in ours)
    return found if able else None


def _by_head(x_SBN: Tensor) -> Tensor:
    """[B, N, S], contiguous."""
    return x_SBN.permute(1, 2, 0).contiguous()


def _segments(query: PositionSpan, key: PositionSpan, pair: MaskBlock) -> Segments | None:
    if query.segments_BS is None or key.segments_BS is None:
        return None
    return strided(query.segments_BS[:, pair.rows]), strided(key.segments_BS[:, pair.keys])
