"""cuDNN attention with an explicit log-sum-exp, using the two torch ops that `scaled_dot_product_attention` calls.

cuDNN's backward takes the output and the log-sum-exp as inputs. Both may come from a softmax over more keys than
backward receives (Dao et al., arXiv 2205.14135 section B.2). Backward can therefore process a long sequence part by
part. If the softmax has a sink, backward returns the gradients of attention with sinks, although cuDNN itself does not
support sinks.

torch caches cuDNN plans by the layouts of q, k and v only. The layouts of the output, of its gradient and of the
log-sum-exp must therefore be the same in every call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels.attention_blocks import MaskBlock
from megatron_moe.kernels.ops import AttentionBlock, AttentionResult, internal_dtype
from megatron_moe.parallel.autograd_function import AutogradFunction

MOST_ELEMENTS = 2**31 - 1
"""Largest number of elements of queries or outputs in one call of backward. Beyond it, cuDNN returns wrong gradients of
queries and keys without an error (measured on an H200 with heads of 128)."""
Deltas = Callable[[Tensor, Tensor], Tensor]
"""Function that computes delta, fp32 [B, N, S], from (grad, out), both [S, B, N, E]: the sum over E of grad * out."""


def cudnn_supports(q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, *, causal: bool) -> bool:
    """Whether torch can use cuDNN attention: 16-bit GPU tensors, supported head dim, no deterministic mode."""
    if not q_SBND.is_cuda:
        return False
    inputs = _by_head(q_SBND), _by_head(k_SBGD), _by_head(v_SBGE)
    return bool(can_use_cudnn_attention(SDPAParams(*inputs, None, 0.0, causal, True), False))


def supports_rectangle(block: AttentionBlock, pair: MaskBlock) -> bool:
    """Whether cuDNN supports this rectangle of a block: no document mask, and either unmasked or causal."""
    if block.query.segments_BS is not None or not (pair.is_unmasked or pair.is_causal_square):
        return False
    return cudnn_supports(*_inputs(block, pair), causal=pair.is_causal_square)


def forward(q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns (output [S, B, N, E] in the dtype of q, log-sum-exp [B, N, S] in fp32)."""
    inputs = _by_head(q_SBND.contiguous()), _by_head(k_SBGD), _by_head(v_SBGE)
    out_BNSE, lse_BNS1, *_ = _attend(*inputs, None, True, 0.0, causal, False, scale=scale)
    return out_BNSE.permute(2, 0, 1, 3).contiguous(), lse_BNS1.view(lse_BNS1.shape[:3])


def backward(
    grad_SBNE: Tensor,
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    out_SBNE: Tensor,
    lse_BNS: Tensor,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v. `out_SBNE` and `lse_BNS` may be results over more keys than `k_SBGD`."""
    per_part = _groups_per_part(q_SBND, k_SBGD, v_SBGE)
    num_groups, heads_per_group = k_SBGD.shape[2], q_SBND.shape[2] // k_SBGD.shape[2]
    if per_part < num_groups:
        by_heads = (x.split(per_part * heads_per_group, dim=2) for x in (grad_SBNE, q_SBND, out_SBNE))
        by_groups = (x.split(per_part, dim=2) for x in (k_SBGD, v_SBGE))
        by_lse = lse_BNS.split(per_part * heads_per_group, dim=1)
        parts = [
            backward(grad, q, k.contiguous(), v.contiguous(), out, lse, scale, causal=causal)
            for grad, q, out, k, v, lse in zip(*by_heads, *by_groups, by_lse, strict=True)
        ]
        grad_q, grad_k, grad_v = (torch.cat(of_parts, dim=2) for of_parts in zip(*parts, strict=True))
        return grad_q, grad_k, grad_v
    inputs = _by_head(grad_SBNE.contiguous()), _by_head(q_SBND.contiguous()), _by_head(k_SBGD), _by_head(v_SBGE)
    found = _by_head(out_SBNE.contiguous()), lse_BNS.contiguous()[..., None]
    unused = torch.empty(2, device=q_SBND.device, dtype=torch.int64).unbind()  # dropout seed and offset
    lengths = q_SBND.shape[0], k_SBGD.shape[0]
    grads = _differentiate(*inputs, *found, *unused, None, None, None, *lengths, 0.0, causal, scale=scale)
    grad_q, grad_k, grad_v = (grad.permute(2, 0, 1, 3) for grad in grads)
    return grad_q, grad_k, grad_v


def needs_parts(q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor) -> bool:
    """Whether `backward` computes the gradients of these tensors in several calls, which torch's SDPA does not."""
    return _groups_per_part(q_SBND, k_SBGD, v_SBGE) < k_SBGD.shape[2]


def _groups_per_part(q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor) -> int:
    """Returns the number of query groups per call of cuDNN's backward, at least 1."""
    seq, batch, heads, width = q_SBND.shape
    num_groups = k_SBGD.shape[2]
    elements = seq * batch * heads // num_groups * max(width, v_SBGE.shape[3])
    return min(max(MOST_ELEMENTS // max(elements, 1), 1), num_groups)


def forward_pair(block: AttentionBlock, pair: MaskBlock) -> tuple[Tensor, Tensor]:
    """Calls `forward` for one rectangle of a block's mask."""
    return forward(*_inputs(block, pair), block.config.softmax_scale, causal=pair.is_causal_square)


def backward_pair(
    block: AttentionBlock, found: AttentionResult, pair: MaskBlock, into: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Adds the gradients of one rectangle to `into`, the gradients of q, k and v of the whole block."""
    rows, keys = pair.rows, pair.keys
    result = found.out_SBNE[rows], found.lse_SBN[rows].permute(1, 2, 0)
    grad_q, grad_k, grad_v = backward(
        found.grad_SBNE[rows], *_inputs(block, pair), *result, block.config.softmax_scale, causal=pair.is_causal_square
    )
    # not `+=`, which would also copy the sum onto itself
    into[0][rows].add_(grad_q)
    into[1][keys].add_(grad_k)
    into[2][keys].add_(grad_v)


def block_forward(block: AttentionBlock, rectangles: Sequence[MaskBlock]) -> tuple[Tensor, Tensor] | None:
    """Output and log-sum-exp of a block whose mask is one rectangle that cuDNN supports; None for other blocks."""
    if not _is_whole(block, rectangles):
        return None
    out_SBNE, lse_BNS = forward_pair(block, rectangles[0])
    return out_SBNE, lse_BNS.permute(2, 0, 1)


def block_backward(
    block: AttentionBlock, found: AttentionResult, rectangles: Sequence[MaskBlock]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of q, k and v of a block whose mask is one rectangle that cuDNN supports; None for other blocks."""
    if not _is_whole(block, rectangles):
        return None
    (pair,), scale = rectangles, block.config.softmax_scale
    lse_BNS = found.lse_SBN.permute(1, 2, 0)
    return backward(found.grad_SBNE, *block[:3], found.out_SBNE, lse_BNS, scale, causal=pair.is_causal_square)


def _is_whole(block: AttentionBlock, rectangles: Sequence[MaskBlock]) -> bool:
    """Whether one rectangle that cuDNN supports contains all queries and keys of the block."""
    everything = slice(0, len(block.q_SBND)), slice(0, len(block.k_SBGD))
    alone = len(rectangles) == 1 and (rectangles[0].rows, rectangles[0].keys) == everything
    return alone and supports_rectangle(block, rectangles[0])


def _inputs(block: AttentionBlock, pair: MaskBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in one rectangle of a block's mask."""
    return block.q_SBND[pair.rows], block.k_SBGD[pair.keys], block.v_SBGE[pair.keys]


_attend = torch.ops.aten._scaled_dot_product_cudnn_attention
_differentiate = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def _by_head(x_SBND: Tensor) -> Tensor:
    """View of x as [B, N, S, D]."""
    return x_SBND.permute(1, 2, 0, 3)


def row_sums(grad_SBNE: Tensor, out_SBNE: Tensor) -> Tensor:
    """Implements `Deltas` in plain torch."""
    return (grad_SBNE.to(internal_dtype(grad_SBNE.dtype)) * out_SBNE).sum(dim=-1).permute(1, 2, 0)


def attention_with_sinks(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    sinks_N: Tensor | None,
    config: CoreAttentionConfig,
    deltas: Deltas = row_sums,
) -> Tensor:
    """Causal or full attention with sinks over a whole sequence. If `sinks_N` is None, all sink logits are 0 with
    `config.off_by_one`, and -inf otherwise, which is attention without sinks."""
    if sinks_N is None:
        sinks_N = q_SBND.new_full((q_SBND.shape[2],), 0.0 if config.off_by_one else -torch.inf)
    return _WithSinks.apply(q_SBND, k_SBGD, v_SBGE, sinks_N, config, deltas)


def sink_grads(sinks_N: Tensor, lse_BNS: Tensor, delta_BNS: Tensor) -> Tensor:
    """Gradient of the sink logits [N]: the sum of -(softmax weight of the sink) * delta, as for a key with value 0."""
    shares_BNS = (sinks_N.to(lse_BNS.dtype)[:, None] - lse_BNS).exp() * delta_BNS
    return -shares_BNS.sum(dim=(0, 2)).to(sinks_N.dtype)


class _WithSinks(AutogradFunction):
    """Autograd function of attention with sinks: the output without sinks times (1 - softmax weight of the sink)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGE: Tensor,
        sinks_N: Tensor,
        config: CoreAttentionConfig,
        deltas: Deltas,
    ) -> Tensor:
        out_SBNE, lse_BNS = forward(q_SBND, k_SBGD, v_SBGE, config.softmax_scale, causal=config.causal)
        sinks_N1 = sinks_N.to(lse_BNS.dtype)[:, None]
        out_SBNE.mul_((lse_BNS - sinks_N1).sigmoid().permute(2, 0, 1)[..., None])
        lse_BNS = torch.logaddexp(lse_BNS, sinks_N1)
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGE, sinks_N, out_SBNE, lse_BNS)
        ctx.config, ctx.deltas = config, deltas
        return out_SBNE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_SBND, k_SBGD, v_SBGE, sinks_N, out_SBNE, lse_BNS = ctx.saved_tensors
        config, grad_SBNE = ctx.config, grads[0].contiguous()
        inputs = grad_SBNE, q_SBND, k_SBGD, v_SBGE, out_SBNE, lse_BNS
        of_inputs = backward(*inputs, config.softmax_scale, causal=config.causal)
        grad_sinks = None
        if ctx.needs_input_grad[3]:
            grad_sinks = sink_grads(sinks_N, lse_BNS, ctx.deltas(grad_SBNE, out_SBNE))
        return *of_inputs, grad_sinks, None, None
