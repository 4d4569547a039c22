"""Triton kernels for NVIDIA GPUs: memory-bound ops in one pass over memory, and weight gradients accumulated in fp32.

The host never synchronises with the device, and no result depends on the order in which programs run: results are
bitwise reproducible. Under `TRITON_INTERPRET=1` the same kernels run on the CPU, for tests.
"""

import torch
import triton

from megatron_moe.kernels.backends.triton.activation import activation as activation
from megatron_moe.kernels.backends.triton.activation import quantize_activation as quantize_activation
from megatron_moe.kernels.backends.triton.activation import quantize_activation_grad as quantize_activation_grad
from megatron_moe.kernels.backends.triton.attention.blocks import attention_block as attention_block
from megatron_moe.kernels.backends.triton.attention.blocks import attention_block_grad as attention_block_grad
from megatron_moe.kernels.backends.triton.attention.whole import attention as attention
from megatron_moe.kernels.backends.triton.cross_entropy import cross_entropy as cross_entropy
from megatron_moe.kernels.backends.triton.embedding import embedding_grad as embedding_grad
from megatron_moe.kernels.backends.triton.experts import grouped_weight_grad as grouped_weight_grad
from megatron_moe.kernels.backends.triton.gate import gate_product as gate_product
from megatron_moe.kernels.backends.triton.gated_norm import gated_rms_norm as gated_rms_norm
from megatron_moe.kernels.backends.triton.heads import query_key_value as query_key_value
from megatron_moe.kernels.backends.triton.latent import latent_key_value as latent_key_value
from megatron_moe.kernels.backends.triton.layer_norm import layer_norm as layer_norm
from megatron_moe.kernels.backends.triton.linear_attention.op import linear_attention as linear_attention
from megatron_moe.kernels.backends.triton.matrices import descend_ as descend_
from megatron_moe.kernels.backends.triton.matrices import momentum_ as momentum_
from megatron_moe.kernels.backends.triton.matrices import symmetric_product as symmetric_product
from megatron_moe.kernels.backends.triton.norm import add_rms_norm as add_rms_norm
from megatron_moe.kernels.backends.triton.norm import rms_norm as rms_norm
from megatron_moe.kernels.backends.triton.norm import rms_norm_quantized as rms_norm_quantized
from megatron_moe.kernels.backends.triton.optimizer import adamw_ as adamw_
from megatron_moe.kernels.backends.triton.optimizer import adamw_packed_ as adamw_packed_
from megatron_moe.kernels.backends.triton.pages import free_pages as free_pages
from megatron_moe.kernels.backends.triton.pages import pack_rows as pack_rows
from megatron_moe.kernels.backends.triton.pages import unpack_rows as unpack_rows
from megatron_moe.kernels.backends.triton.push import acknowledge as acknowledge
from megatron_moe.kernels.backends.triton.push import mark_ranks as mark_ranks
from megatron_moe.kernels.backends.triton.push import push_sums as push_sums
from megatron_moe.kernels.backends.triton.push import push_tokens as push_tokens
from megatron_moe.kernels.backends.triton.push import sum_partials as sum_partials
from megatron_moe.kernels.backends.triton.push import wait_for_peers as wait_for_peers
from megatron_moe.kernels.backends.triton.quantize import dequantize_rows as dequantize_rows
from megatron_moe.kernels.backends.triton.quantize import permute_quantized as permute_quantized
from megatron_moe.kernels.backends.triton.quantize import quantize_permuted as quantize_permuted
from megatron_moe.kernels.backends.triton.quantize import quantize_rows as quantize_rows
from megatron_moe.kernels.backends.triton.quantize import quantize_weight as quantize_weight
from megatron_moe.kernels.backends.triton.rope import rope as rope
from megatron_moe.kernels.backends.triton.routing.op import route as route
from megatron_moe.kernels.backends.triton.rows import gather_probs as gather_probs
from megatron_moe.kernels.backends.triton.rows import permute as permute
from megatron_moe.kernels.backends.triton.rows import unpermute as unpermute
from megatron_moe.kernels.backends.triton.short_conv import short_conv as short_conv
from megatron_moe.kernels.backends.triton.sort import count_tokens as count_tokens
from megatron_moe.kernels.backends.triton.sort import sort_rows as sort_rows
from megatron_moe.kernels.backends.triton.stored_weight import quantize_weight_part as quantize_weight_part
from megatron_moe.kernels.backends.triton.stored_weight import transpose_weight as transpose_weight
from megatron_moe.kernels.backends.triton.stored_weight import weight_amax_ as weight_amax_
from megatron_moe.kernels.kernel_set import LOW_PRECISION_OPS, Priority, Support

NAME = "triton"
NEEDS = ("triton",)
PROVIDES = (
    "grouped_weight_grad",
    "embedding_grad",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "rope",
    "query_key_value",
    "latent_key_value",
    "attention",
    "attention_block",
    "attention_block_grad",
    "linear_attention",
    "short_conv",
    "gated_rms_norm",
    "activation",
    "cross_entropy",
    "gate_product",
    "route",
    "count_tokens",
    "sort_rows",
    "permute",
    "unpermute",
    "gather_probs",
    "mark_ranks",
    "push_tokens",
    "push_sums",
    "sum_partials",
    "wait_for_peers",
    "acknowledge",
    "pack_rows",
    "unpack_rows",
    "free_pages",
    "adamw_",
    "adamw_packed_",
    "momentum_",
    "descend_",
    "symmetric_product",
    "quantize_rows",
    "quantize_weight",
    "weight_amax_",
    "quantize_weight_part",
    "transpose_weight",
    "quantize_permuted",
    "permute_quantized",
    "dequantize_rows",
    "quantize_activation",
    "quantize_activation_grad",
    "rms_norm_quantized",
)
RECIPES = ("blockwise e4m3", "blockwise hybrid")


def support(op: str, device: torch.device, dtype: torch.dtype) -> Support:
    """Rates this backend for one op on a device and dtype; called by `megatron_moe.kernels.registry`."""
    if dtype is torch.float64:
        return Support(Priority.NO, "fp64 is used for verification only and runs on plain torch")
    if device.type == "cpu":
        if op in LOW_PRECISION_OPS:
            return Support(Priority.NO, "Triton's interpreter does not round to FP8 correctly")
        if triton.knobs.runtime.interpret:
            return Support(Priority.YES, "interpreted, for tests")
        return Support(Priority.NO, "it runs on GPUs only")
    if op == "grouped_weight_grad" and dtype is torch.float32:
        return Support(Priority.YES, "slow: tensor cores do not support fp32")
    if op == "gate_product" and dtype is not torch.bfloat16:
        return Support(Priority.YES, "Triton kernel for bf16 only, torch otherwise")
    reasons = {
        "attention": "Triton for windows, document masks and --deterministic-mode; cuDNN for sinks; torch otherwise",
        "attention_block": "cuDNN and a merge kernel; Triton for windows, document masks and --deterministic-mode",
        "attention_block_grad": "cuDNN; Triton for windows, document masks and --deterministic-mode",
        "linear_attention": "chunks of 64 tokens as matrix products; torch for heads wider than 128",
        "grouped_weight_grad": "accumulates in fp32 in the gradient buffer",
        "embedding_grad": "adds the summed gradient of each id to the gradient buffer",
        "symmetric_product": "computes half of the tiles and stores them twice",
        "adamw_": "one pass that also writes the rounded weights",
        "adamw_packed_": "one pass that also unpacks and packs the state",
        "gate_product": "fp32 on bf16 tensor cores, both gradients in one pass",
        "route": "scores, top-k, counts and loss sums in one pass each for forward and backward",
        "sort_rows": "a counting sort in two launches",
        "count_tokens": "a histogram without atomics",
    }
    return Support(Priority.BEST, reasons.get(op, "one pass over memory"))
