"""Attention between two parts of a sequence, rectangle by rectangle: by cuDNN where it knows the mask, else by our
own kernels, which go on from what their rows have found and add to the gradients that are there."""

from torch import Tensor

from megatron_moe.kernels import reference
from megatron_moe.kernels.backends.cudnn import attention as cudnn
from megatron_moe.kernels.backends.triton.attention.backward import gradients
from megatron_moe.kernels.backends.triton.attention.forward import attend
from megatron_moe.kernels.backends.triton.attention.merge import merge
from megatron_moe.kernels.backends.triton.attention.tiles import Segments, Shape, serves, strided
from megatron_moe.kernels.ops import Span
from megatron_moe.kernels.pairs import Pair, pairs
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
    """See `Kernels.attention_block`. Dropout and fp32 are plain torch."""
    if not serves(q_SBND, k_SBGD, v_SBGE, spec, dropout_key):
        reference.attention_block(q_SBND, k_SBGD, v_SBGE, spec, query, key, dropout_key, out_SBNE, lse_SBN)
        return
    q, k, v = strided(q_SBND), strided(k_SBGD), strided(v_SBGE)
    lse_BNS = lse_SBN.permute(1, 2, 0)
    for pair in pairs(query.chunks, key.chunks, spec):
        rows, keys = pair.rows, pair.keys
        inputs, found = (q[rows], k[keys], v[keys]), (out_SBNE[rows], lse_BNS[..., rows])
        if cudnn.serves_pair(q, k, v, query, pair):
            merge(*found, *cudnn.forward_pair(q, k, v, spec, pair))
            continue
        shape = Shape.of(*inputs, spec.softmax_scale, pair.left, pair.right)
        attend(*inputs, None, _segments(query, key, pair), *found, shape, onward=True)


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
    """See `Kernels.attention_block_grad`."""
    if not serves(q_SBND, k_SBGD, v_SBGE, spec, dropout_key):
        known = grad_SBNE, q_SBND, k_SBGD, v_SBGE, out_SBNE, lse_SBN, delta_SBN
        reference.attention_block_grad(*known, spec, query, key, dropout_key, into)
        return
    grad, q, k, v = strided(grad_SBNE), strided(q_SBND), strided(k_SBGD), strided(v_SBGE)
    grad_q, grad_k, grad_v = into
    for pair in pairs(query.chunks, key.chunks, spec):
        rows, keys = pair.rows, pair.keys
        if cudnn.serves_pair(q, k, v, query, pair):
            cudnn.backward_pair(grad, q, k, v, out_SBNE, lse_SBN, spec, pair, into)
            continue
        inputs, share = (q[rows], k[keys], v[keys]), (grad_q[rows], grad_k[keys], grad_v[keys])
        shape = Shape.of(*inputs, spec.softmax_scale, pair.left, pair.right)
        documents = _segments(query, key, pair)
        lse_BNS, delta_BNS = _by_head(lse_SBN[rows]), _by_head(delta_SBN[rows])
        gradients(grad[rows], *inputs, documents, lse_BNS, delta_BNS, shape, share, add=True)
        del lse_BNS, delta_BNS


def _by_head(x_SBN: Tensor) -> Tensor:
    """[B, N, S], contiguous."""
    return x_SBN.permute(1, 2, 0).contiguous()


def _segments(query: Span, key: Span, pair: Pair) -> Segments | None:
    if query.segments_BS is None or key.segments_BS is None:
        return None
    return strided(query.segments_BS[:, pair.rows]), strided(key.segments_BS[:, pair.keys])
