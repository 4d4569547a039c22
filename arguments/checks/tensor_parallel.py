"""Rules about tensor parallelism: sizes that the ranks divide."""

from arguments import derive
from arguments.checks.violation import Violation, divisors, functions_returning
from megatron_moe.config.exit_codes import counted


def tp_divides_heads(num_attention_heads: int, tensor_model_parallel_size: int) -> Violation:
    """Every rank computes whole attention heads."""
    if num_attention_heads % tensor_model_parallel_size == 0:
        return None
    return (
        f"{counted(num_attention_heads, 'head')} cannot be divided among {tensor_model_parallel_size} tensor-parallel "
        "ranks",
        f"use --tensor-model-parallel-size {divisors(num_attention_heads)}",
    )


def tp_divides_query_groups(
    group_query_attention: bool, num_query_groups: int, tensor_model_parallel_size: int
) -> Violation:
    """Every rank computes whole query groups, or an equal number of ranks shares each group."""
    groups, tp = num_query_groups, tensor_model_parallel_size
    if not group_query_attention or groups % tp == 0 or tp % groups == 0:
        return None
    return (
        f"{groups} query groups and {tp} tensor-parallel ranks: neither number divides the other",
        f"use {divisors(groups)} ranks, or a multiple of {groups}",
    )


def tp_divides_shared_kv_channels(
    group_query_attention: bool,
    num_query_groups: int,
    num_attention_heads: int,
    hidden_size: int,
    kv_channels: int | None,
    tensor_model_parallel_size: int,
) -> Violation:
    """Ranks that share a query group divide its key and value channels."""
    tp = tensor_model_parallel_size
    width = 2 * num_query_groups * derive.head_dim(kv_channels, hidden_size, num_attention_heads)
    if not group_query_attention or num_query_groups >= tp or width % tp == 0:
        return None
    return (
        f"{width} channels of keys and values do not divide among {tp} tensor-parallel ranks",
        f"use {divisors(num_query_groups)} ranks",
    )


def tp_divides_dense_width(
    ffn_hidden_size: int | None, hidden_size: int, swiglu: bool, tensor_model_parallel_size: int
) -> Violation:
    """Every rank computes an equal share of the feed-forward channels."""
    width = derive.ffn_hidden_size(ffn_hidden_size, hidden_size, swiglu)
    if width % tensor_model_parallel_size == 0:
        return None
    return (
        f"{counted(width, 'feed-forward channel')} cannot be divided among {tensor_model_parallel_size} "
        "tensor-parallel ranks",
        f"give --ffn-hidden-size as a multiple of {tensor_model_parallel_size}",
    )


def tp_divides_shared_expert(
    num_experts: int | None, moe_shared_expert_intermediate_size: int | None, tensor_model_parallel_size: int
) -> Violation:
    """Every rank computes an equal share of the shared-expert channels."""
    width = moe_shared_expert_intermediate_size or 0
    if not num_experts or width % tensor_model_parallel_size == 0:
        return None
    return (
        f"shared experts of width {width} cannot be divided among {tensor_model_parallel_size} tensor-parallel ranks",
        f"give --moe-shared-expert-intermediate-size as a multiple of {tensor_model_parallel_size}",
    )


def tp_divides_padded_vocab(padded_vocab_size: int | None, tensor_model_parallel_size: int) -> Violation:
    """Every rank holds an equal number of embedding rows."""
    if padded_vocab_size is None or padded_vocab_size % tensor_model_parallel_size == 0:
        return None
    return (
        f"--padded-vocab-size {padded_vocab_size} cannot be divided among {tensor_model_parallel_size} tensor-parallel "
        "ranks",
        "remove --padded-vocab-size: the default padding fits",
    )


def unpadded_vocab_needs_tp1(
    pad_vocab_size: bool, padded_vocab_size: int | None, tensor_model_parallel_size: int
) -> Violation:
    """Every rank holds an equal number of embedding rows, which requires padding."""
    if pad_vocab_size or padded_vocab_size is not None or tensor_model_parallel_size == 1:
        return None
    return (
        f"a vocabulary without padding may not be divisible among {tensor_model_parallel_size} tensor-parallel ranks",
        "remove --disable-pad-vocab-size, or set --padded-vocab-size",
    )


def experts_need_sequence_parallel(
    num_experts: int | None, tensor_model_parallel_size: int, sequence_parallel: bool
) -> Violation:
    """Sequence parallelism keeps tensor-parallel ranks from routing and computing the same tokens."""
    if not num_experts or tensor_model_parallel_size == 1 or sequence_parallel:
        return None
    return (
        f"experts and {tensor_model_parallel_size} tensor-parallel ranks without sequence parallelism",
        "add --sequence-parallel",
    )


def tp_divides_sequence(
    seq_length: int, sequence_parallel: bool, tensor_model_parallel_size: int, context_parallel_size: int
) -> Violation:
    """With sequence parallelism every tensor-parallel rank holds an equal part of the sequence."""
    if not sequence_parallel or context_parallel_size > 1 or seq_length % tensor_model_parallel_size == 0:
        return None
    return (
        f"--seq-length {seq_length} cannot be divided among {tensor_model_parallel_size} tensor-parallel ranks",
        f"give --seq-length as a multiple of {tensor_model_parallel_size}",
    )


RULES = functions_returning(Violation, globals())
