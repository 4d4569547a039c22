"""Triton kernels for NVIDIA GPUs: memory-bound ops in one pass over memory, and weight gradients accumulated in fp32.

The host never synchronises with the device, and no result depends on the order in which programs run: results are
bitwise reproducible. Under `TRITON_INTERPRET=1` the same kernels run on the CPU, for tests.
"""

import torch

from megatron_moe.kernels.backends.triton.activation import activation, quantize_activation, quantize_activation_grad
from megatron_moe.kernels.backends.triton.attention.blocks import attention_block, attention_block_grad
from megatron_moe.kernels.backends.triton.attention.maxima import max_logits_
from megatron_moe.kernels.backends.triton.attention.whole import attention
from megatron_moe.kernels.backends.triton.cross_entropy import cross_entropy
from megatron_moe.kernels.backends.triton.embedding import embedding_grad
from megatron_moe.kernels.backends.triton.experts import grouped_weight_grad
from megatron_moe.kernels.backends.triton.gate import router_logits
from megatron_moe.kernels.backends.triton.gated_norm import gated_rms_norm
from megatron_moe.kernels.backends.triton.heads import query_key_value
from megatron_moe.kernels.backends.triton.hyper_connections import (
    hyper_connection_read,
    hyper_connection_sum,
    hyper_connection_write,
)
from megatron_moe.kernels.backends.triton.latent import latent_key_value
from megatron_moe.kernels.backends.triton.layer_norm import layer_norm
from megatron_moe.kernels.backends.triton.linear_attention.op import linear_attention
from megatron_moe.kernels.backends.triton.matrices import apply_direction_, momentum_, syrk
from megatron_moe.kernels.backends.triton.norm import add_rms_norm, rms_norm, rms_norm_quantized
from megatron_moe.kernels.backends.triton.optimizer import adamw_, adamw_packed_, sum_contributions_
from megatron_moe.kernels.backends.triton.pages import free_pages, pack_rows, unpack_rows
from megatron_moe.kernels.backends.triton.push import (
    acknowledge,
    mark_ranks,
    push_sums,
    push_tokens,
    sum_partials,
    wait_for_peers,
)
from megatron_moe.kernels.backends.triton.quantize import (
    dequantize_rows,
    permute_quantized,
    quantize_permuted,
    quantize_rows,
    quantize_weight,
)
from megatron_moe.kernels.backends.triton.rope import rope
from megatron_moe.kernels.backends.triton.routing.op import route
from megatron_moe.kernels.backends.triton.rows import gather_probs, permute, unpermute
from megatron_moe.kernels.backends.triton.short_conv import short_conv
from megatron_moe.kernels.backends.triton.sort import count_tokens, sort_rows
from megatron_moe.kernels.backends.triton.sparse_attention.op import sparse_attention
from megatron_moe.kernels.backends.triton.stored_weight import quantize_weight_part, transpose_weight, weight_amax_
from megatron_moe.kernels.kernel_set import LOW_PRECISION_OPS, Priority, Support

NAME = "triton"
NEEDS = ("triton",)
INTERPRETED_ON = ("cpu",)
RECIPES = ("blockwise e4m3", "blockwise hybrid")


def support(op: str, device: torch.device, dtype: torch.dtype) -> Support:
    """Rates this backend for one op on a device and dtype; called by `megatron_moe.kernels.registry`."""
    if dtype is torch.float64:
        return Support(Priority.NO, "fp64 is used for verification only and runs on plain torch")
    if device.type == "cpu":
        if op in LOW_PRECISION_OPS:
            return Support(Priority.NO, "Triton's interpreter does not round to FP8 correctly")
        return Support(Priority.YES, "interpreted, for tests")
    if op == "grouped_weight_grad" and dtype is torch.float32:
        return Support(Priority.YES, "slow: tensor cores do not support fp32")
    if op == "router_logits" and dtype is not torch.bfloat16:
        return Support(Priority.YES, "Triton kernel for bf16 only, torch otherwise")
    reasons = {
        "attention": "Triton for windows, document masks and --deterministic-mode; cuDNN for sinks; torch otherwise",
        "attention_block": "cuDNN and a merge kernel; Triton for windows, document masks and --deterministic-mode",
        "attention_block_grad": "cuDNN; Triton for windows, document masks and --deterministic-mode",
        "max_logits_": "skips tiles of rows whose log-sum-exps are small",
        "sparse_attention": "gathers rows inside the kernels; torch for --deterministic-mode",
        "hyper_connection_read": "two passes over memory, fp32 on bf16 tensor cores; torch for more than 4 streams",
        "linear_attention": "chunks of 64 tokens as matmuls; torch for heads wider than 128",
        "grouped_weight_grad": "accumulates in fp32 in the gradient buffer",
        "embedding_grad": "adds the summed gradient of each id to the gradient buffer",
        "syrk": "computes half of the tiles and stores them twice",
        "adamw_": "one pass that also writes the rounded weights",
        "adamw_packed_": "one pass that also unpacks and packs the state",
        "router_logits": "fp32 on bf16 tensor cores, both gradients in one pass",
        "route": "scores, top-k, counts and loss sums in one pass each for forward and backward",
        "sort_rows": "a counting sort in two launches",
        "count_tokens": "a histogram without atomics",
    }
    return Support(Priority.BEST, reasons.get(op, "one pass over memory"))
