"""Fakes of the kernels for positions, heads and attention. See `fakes.py`."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels import reference
from megatron_moe.kernels.attention_blocks import MaskBlock, mask_blocks
from megatron_moe.kernels.backends.torch_native.fakes import cudnn_backward, cudnn_forward
from megatron_moe.kernels.backends.triton.sizes import HOPPER_MULTIPROCESSORS, WIDEST_HEAD, heads_programs, heads_tiles
from megatron_moe.kernels.ops import PositionSpan
from megatron_moe.parallel.param_meta import Part


def query_key_value(
    qkv_SBGC: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    cos_SBD: Tensor,
    sin_SBD: Tensor,
    interleaved: bool,
    heads_per_group: int,
) -> tuple[Tensor, Tensor, Tensor]:
    angles = cos_SBD.contiguous(), sin_SBD.contiguous()
    q, k, v = _QueryKeyValue.apply(qkv_SBGC, q_weight, k_weight, *angles, heads_per_group)  # type: ignore[no-untyped-call]
    return q, k, v


class _QueryKeyValue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_SBGC: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos_SBD: Tensor,
        sin_SBD: Tensor,
        heads_per_group: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_SBGC = qkv_SBGC.contiguous()
        length, batch, groups, width = qkv_SBGC.shape
        width //= heads_per_group + 2
        q_SBND = qkv_SBGC.new_empty(length, batch, groups * heads_per_group, width)
        k_SBGD = qkv_SBGC.new_empty(length, batch, groups, width)
        ctx.save_for_backward(qkv_SBGC, q_weight, k_weight, cos_SBD, sin_SBD)
        ctx.width = width
        return q_SBND, k_SBGD, qkv_SBGC[..., -width:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_SBGC, q_weight, k_weight, cos_SBD, _ = ctx.saved_tensors
        strided = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
        grad_qkv = torch.empty_like(qkv_SBGC)
        length, batch, groups = qkv_SBGC.shape[:3]
        num_heads = grads[0].shape[2]
        tile_heads, tile_groups = heads_tiles(num_heads, groups, ctx.width, cos_SBD.shape[-1])
        tiles = -(-num_heads // tile_heads) + -(-groups // tile_groups)
        num_programs = heads_programs(length * batch, tiles, HOPPER_MULTIPROCESSORS)
        shares_P2D = qkv_SBGC.new_empty(num_programs * tiles, 2, ctx.width, dtype=torch.float32)
        del strided
        if q_weight is None or k_weight is None:
            return grad_qkv, None, None, None, None, None
        of_q, of_k = shares_P2D.new_empty(2 * ctx.width, dtype=q_weight.dtype).chunk(2)
        return grad_qkv, of_q, of_k, None, None, None


def rope(x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor, interleaved: bool, start: int = 0) -> Tensor:
    return _Rope.apply(x_SBND, cos_SBD, sin_SBD)  # type: ignore[no-untyped-call,no-any-return]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SBD, sin_SBD)
        return _rotated(x_SBND)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _rotated(grads[0]), None, None


def _rotated(x_SBND: Tensor) -> Tensor:
    if x_SBND.stride(-1) != 1:
        x_SBND = x_SBND.contiguous()
    return torch.empty(x_SBND.shape, device=x_SBND.device, dtype=x_SBND.dtype)


def latent_key_value(kv_SBNC: Tensor, shared_SBR: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
    key, value = _KeyValue.apply(kv_SBNC, shared_SBR, key_width)  # type: ignore[no-untyped-call]
    return key, value


class _KeyValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv_SBNC: Tensor, shared_SBR: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
        kv_SBNC, shared_SBR = kv_SBNC.contiguous(), shared_SBR.contiguous()
        ctx.sizes = kv_SBNC.shape[-1], shared_SBR.shape[-1]
        key = kv_SBNC.new_empty(*kv_SBNC.shape[:3], key_width + shared_SBR.shape[-1])
        return key, kv_SBNC[..., key_width:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        width, turned = ctx.sizes
        grad_key, _ = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        return grad_key.new_empty(*grad_key.shape[:3], width), grad_key.new_empty(*grad_key.shape[:2], turned), None


def attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    config: CoreAttentionConfig,
    sinks_N: Tensor | None,
    segments_BS: Tensor | None,
    dropout_key: tuple[int | str, ...] | None,
    head_part: Part = (0, 1),
) -> Tensor:
    """cuDNN's, or our own for windows and documents: one log-sum-exp per query, and no logits. Dropout is plain torch,
    as on a GPU."""
    masked = config.window is not None or segments_BS is not None
    has_sinks = sinks_N is not None or config.off_by_one
    drops = config.dropout > 0.0 and dropout_key is not None
    served = is_served(q_SBND, v_SBGE)
    if drops or has_sinks and not served:
        return reference.attention(q_SBND, k_SBGD, v_SBGE, config, sinks_N, segments_BS, dropout_key, head_part)
    if has_sinks and sinks_N is None:
        sinks_N = q_SBND.new_zeros(q_SBND.shape[2])
    if masked and served:
        return _SpecialAttention.apply(q_SBND, k_SBGD, v_SBGE, sinks_N, segments_BS)  # type: ignore[no-untyped-call,no-any-return]
    if has_sinks:
        return _AttentionWithSinks.apply(q_SBND, k_SBGD, v_SBGE, sinks_N)  # type: ignore[no-untyped-call,no-any-return]
    mask = reference.visible_pairs(q_SBND.shape[0], config, segments_BS, q_SBND.device) if masked else None
    return _Attention.apply(q_SBND, k_SBGD, v_SBGE, mask)  # type: ignore[no-untyped-call,no-any-return]


def is_served(q_SBND: Tensor, v_SBGE: Tensor) -> bool:
    """Whether cuDNN or our kernels support these inputs: neither multiplies fp32."""
    return q_SBND.dtype.itemsize == 2 and max(q_SBND.shape[-1], v_SBGE.shape[-1]) <= WIDEST_HEAD


class _SpecialAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, sinks_N: Tensor | None, segments_BS: Tensor | None
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_SBND, k_SBGD, v_SBGE))
        segments_BS = None if segments_BS is None else segments_BS.contiguous()
        seq, batch, heads, _ = q.shape
        out = q.new_empty(seq, batch, heads, v.shape[-1])
        lse_BNS = torch.empty(batch, heads, seq, device=q.device, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, sinks_N, segments_BS, out, lse_BNS)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_N, _, _, lse_BNS = ctx.saved_tensors
        strided = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        delta_BNS = torch.empty_like(lse_BNS)
        grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        del strided
        grad_sinks = None
        if sinks_N is not None and ctx.needs_input_grad[3]:
            shares_BNS = (sinks_N.float()[:, None] - lse_BNS).exp() * delta_BNS
            grad_sinks = -shares_BNS.sum(dim=(0, 2)).to(sinks_N.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, None


class _AttentionWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, sinks_N: Tensor) -> Tensor:
        out_SBNE, lse_BNS, *_ = cudnn_forward(q_SBND, v_SBGE)
        weights_BNS = (lse_BNS - sinks_N.float()[:, None]).sigmoid()
        del weights_BNS
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGE, sinks_N, out_SBNE, torch.empty_like(lse_BNS))
        return out_SBNE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_SBND, k_SBGD, v_SBGE, sinks_N, _, lse_BNS = ctx.saved_tensors
        given = grads[0].contiguous()
        of_inputs = cudnn_backward(q_SBND, k_SBGD, v_SBGE)
        shares_BNS = (sinks_N.float()[:, None] - lse_BNS).exp() * torch.empty_like(lse_BNS)
        del given
        return *of_inputs, -shares_BNS.sum(dim=(0, 2)).to(sinks_N.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, mask: Tensor | None) -> Tensor:
        found = cudnn_forward(q_SBND, v_SBGE)
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGE, mask, *found)
        return found[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *cudnn_backward(*ctx.saved_tensors[:3]), None


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
    """cuDNN returns a part that is merged in place; our kernels accumulate in place. Dropout, fp32: plain torch."""
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
