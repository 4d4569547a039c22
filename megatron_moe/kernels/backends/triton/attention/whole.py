"""Attention over a whole sequence with sliding windows (arXiv 2004.05150), document masks and sinks.

cuDNN supports neither windows nor document masks. A sink is an additional logit in the softmax of every row. Backward
visits all tiles twice, once by keys and once by queries, so that one program computes each sum in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels.attention_blocks import attention_reach
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.torch_native import cudnn
from megatron_moe.kernels.backends.triton.attention.backward import deltas, gradients
from megatron_moe.kernels.backends.triton.attention.forward import attend
from megatron_moe.kernels.backends.triton.attention.tiles import (
    Shape,
    self_attention_segments,
    supports_inputs,
    unit_stride,
)
from megatron_moe.kernels.ops import AttentionInputs
from megatron_moe.parallel.autograd_function import AutogradFunction


def attention(inputs: AttentionInputs) -> Tensor:
    """See `Kernels.attention`. Inputs with dropout use the torch backend. Windows, document masks and deterministic
    mode use the Triton kernels; sinks without any of these use cuDNN if possible. All other inputs use the torch
    backend."""
    q_SBND, k_SBGD, v_SBGE, config, sinks_N, segments_BS, *_ = inputs
    needs_triton = config.window is not None or segments_BS is not None or torch.are_deterministic_algorithms_enabled()
    if not (needs_triton or inputs.has_sinks) or inputs.has_dropout or not supports_inputs(q_SBND, k_SBGD, v_SBGE):
        return torch_native.attention(inputs)
    if not needs_triton and cudnn.cudnn_supports(q_SBND, k_SBGD, v_SBGE, causal=config.causal):
        return cudnn.attention_with_sinks(q_SBND, k_SBGD, v_SBGE, sinks_N, config, deltas)
    if config.off_by_one and sinks_N is None:
        sinks_N = q_SBND.new_zeros(q_SBND.shape[2])
    return _FlashAttention.apply(q_SBND, k_SBGD, v_SBGE, sinks_N, segments_BS, config)


class _FlashAttention(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGE: Tensor,
        sinks_N: Tensor | None,
        segments_BS: Tensor | None,
        config: CoreAttentionConfig,
    ) -> Tensor:
        q, k, v = unit_stride(q_SBND), unit_stride(k_SBGD), unit_stride(v_SBGE)
        left, right = attention_reach(config)
        shape = Shape.of(q, k, v, config.softmax_scale, left, right)
        out = q.new_empty(shape.rows, shape.batch, shape.heads, shape.value_width)
        lse_BNS = torch.empty(shape.batch, shape.heads, shape.rows, device=q.device, dtype=torch.float32)
        attend(q, k, v, sinks_N, self_attention_segments(segments_BS), out, lse_BNS, shape)
        ctx.save_for_backward(q, k, v, sinks_N, segments_BS, out, lse_BNS)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_N, segments_BS, out, lse_BNS = ctx.saved_tensors
        grad = unit_stride(grads[0])
        delta_BNS = deltas(grad, out)
        into = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        gradients(grad, q, k, v, self_attention_segments(segments_BS), lse_BNS, delta_BNS, ctx.shape, into)
        grad_sinks = None
        if sinks_N is not None and ctx.needs_input_grad[3]:
            grad_sinks = cudnn.sink_grads(sinks_N, lse_BNS, delta_BNS)
        return *into, grad_sinks, None, None
