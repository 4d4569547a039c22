"""Attention between two parts of a sequence. The mask is split into rectangles, each computed by cuDNN if supported,
otherwise by Triton kernels, which continue the online softmax of earlier rectangles and add gradients in place."""

from torch import Tensor

from megatron_moe.kernels.attention_blocks import MaskBlock, mask_blocks
from megatron_moe.kernels.backends.torch_native import cudnn
from megatron_moe.kernels.backends.triton.attention.backward import deltas, gradients
from megatron_moe.kernels.backends.triton.attention.forward import attend
from megatron_moe.kernels.backends.triton.attention.merge import merge
from megatron_moe.kernels.backends.triton.attention.tiles import Segments, Shape, supports_inputs, unit_stride
from megatron_moe.kernels.ops import AttentionBlock, AttentionResult
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.reference.attention_blocks import empty_result, no_gradients


def attention_block(
    block: AttentionBlock, out_SBNE: Tensor | None = None, lse_SBN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `Kernels.attention_block`. Dropout and fp32 run on plain torch."""
    block = with_unit_stride_inputs(block)
    rectangles = _rectangles(block)
    if rectangles is None:
        return reference.attention_block(block, out_SBNE, lse_SBN)
    if out_SBNE is None or lse_SBN is None:
        if (alone := cudnn.block_forward(block, [pair for pair, _ in rectangles])) is not None:
            return alone
        out_SBNE, lse_SBN = empty_result(block.q_SBND, block.v_SBGE.shape[3])
    lse_BNS = lse_SBN.permute(1, 2, 0)
    merges_once = len(rectangles) == 1 and rectangles[0][1]
    total_SBNE = out_SBNE if merges_once else out_SBNE.to(lse_SBN.dtype)
    for pair, by_cudnn in rectangles:
        found = total_SBNE[pair.rows], lse_BNS[..., pair.rows]
        if by_cudnn:
            merge(*found, *cudnn.forward_pair(block, pair))
            continue
        inputs, shape, segments = rectangle_inputs(block, pair)
        attend(*inputs, None, segments, *found, shape, onward=True)
    return out_SBNE if total_SBNE is out_SBNE else out_SBNE.copy_(total_SBNE), lse_SBN


def attention_block_grad(
    block: AttentionBlock, found: AttentionResult, into: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    block = with_unit_stride_inputs(block)
    rectangles = _rectangles(block)
    if rectangles is None:
        return reference.attention_block_grad(block, found, into)
    if into is None:
        if (alone := cudnn.block_backward(block, found, [pair for pair, _ in rectangles])) is not None:
            return alone
        into = no_gradients(block)
    found = found._replace(grad_SBNE=unit_stride(found.grad_SBNE))
    for pair, by_cudnn in rectangles:
        if by_cudnn:
            cudnn.backward_pair(block, found, pair, into)
            continue
        rows, keys = pair.rows, pair.keys
        inputs, shape, segments = rectangle_inputs(block, pair)
        lse_BNS = found.lse_SBN[rows].permute(1, 2, 0).contiguous()
        delta_BNS = deltas(found.grad_SBNE[rows], found.out_SBNE[rows])
        share = into[0][rows], into[1][keys], into[2][keys]
        gradients(found.grad_SBNE[rows], *inputs, segments, lse_BNS, delta_BNS, shape, share, add=True)
        del lse_BNS, delta_BNS
    return into


def with_unit_stride_inputs(block: AttentionBlock) -> AttentionBlock:
    """Returns the block with q, k and v contiguous in the last dimension, as the kernels require."""
    q, k, v = (unit_stride(each) for each in (block.q_SBND, block.k_SBGD, block.v_SBGE))
    return block._replace(q_SBND=q, k_SBGD=k, v_SBGE=v)


def _rectangles(block: AttentionBlock) -> list[tuple[MaskBlock, bool]] | None:
    """Returns (rectangle, whether cuDNN computes it) for the visible rectangles of the block's mask. None with dropout,
    or if a rectangle is supported neither by cuDNN nor by the Triton kernels."""
    if block.has_dropout:
        return None
    pairs = mask_blocks(block.query.chunks, block.key.chunks, block.config)
    found = [(pair, cudnn.supports_rectangle(block, pair)) for pair in pairs]
    q, k, v = block[:3]
    able = all(by_cudnn or supports_inputs(q[pair.rows], k[pair.keys], v[pair.keys]) for pair, by_cudnn in found)
    return found if able else None


def rectangle_inputs(
    block: AttentionBlock, pair: MaskBlock
) -> tuple[tuple[Tensor, Tensor, Tensor], Shape, Segments | None]:
    """Inputs of the Triton kernels for a rectangle: (q, k and v; sizes; document ids)."""
    inputs = block.q_SBND[pair.rows], block.k_SBGD[pair.keys], block.v_SBGE[pair.keys]
    shape = Shape.of(*inputs, block.config.softmax_scale, pair.left, pair.right)
    of_queries, of_keys = block.query.segments_BS, block.key.segments_BS
    if of_queries is None or of_keys is None:
        return inputs, shape, None
    return inputs, shape, (unit_stride(of_queries[:, pair.rows]), unit_stride(of_keys[:, pair.keys]))
