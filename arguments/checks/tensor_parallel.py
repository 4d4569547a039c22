"""Rules about what tensor-parallel ranks share out."""

from arguments import derive
from arguments.checks.violation import Violation, divisors
from megatron_moe.config.exit_codes import counted


def heads_divide_among_tensor_ranks(num_attention_heads: int, tensor_model_parallel_size: int) -> Violation:
    """A rank computes whole attention heads."""
    if num_attention_heads % tensor_model_parallel_size == 0:
        return None
    return (
        f"{counted(num_attention_heads, 'head')} cannot be divided among {tensor_model_parallel_size} tensor-parallel "
        "ranks",
        f"use --tensor-model-parallel-size {divisors(num_attention_heads)}",
    )


def groups_divide_among_tensor_ranks(
    group_query_attention: bool, num_query_groups: int, tensor_model_parallel_size: int
) -> Violation:
    """A rank computes whole query groups, or equally many ranks share each group."""
    groups, tp = num_query_groups, tensor_model_parallel_size
    if not group_query_attention or groups % tp == 0 or tp % groups == 0:
        return None
    return (
        f"{groups} query groups and {tp} tensor-parallel ranks: neither number divides the other",
        f"use {divisors(groups)} ranks, or a multiple of {groups}",
    )


def shared_groups_have_equal_rows(
    group_query_attention: bool,
    num_query_groups: int,
    num_attention_heads: int,
    hidden_size: int,
    kv_channels: int | None,
    tensor_model_parallel_size: int,
) -> Violation:
    """Ranks that share a query group divide its query, key and value channels."""
    tp = tensor_model_parallel_size
    width = 2 * num_query_groups * derive.head_dim(kv_channels, hidden_size, num_attention_heads)
    if not group_query_attention or num_query_groups >= tp or width % tp == 0:
        return None
    return (
        f"{width} channels of keys and values do not divide among {tp} tensor-parallel ranks",
        f"use {divisors(num_query_groups)} ranks",
    )


def dense_width_divides_among_tensor_ranks(
    ffn_hidden_size: int | None, hidden_size: int, swiglu: bool, tensor_model_parallel_size: int
) -> Violation:
    """A rank computes an equal share of the channels of a feed-forward block."""
    width = derive.ffn_hidden_size(ffn_hidden_size, hidden_size, swiglu)
    if width % tensor_model_parallel_size == 0:
        return None
    return (
        f"{counted(width, 'feed-forward channel')} cannot be divided among {tensor_model_parallel_size} "
        "tensor-parallel ranks",
        f"give --ffn-hidden-size as a multiple of {tensor_model_parallel_size}",
    )


def shared_expert_divides_among_tensor_ranks(
    num_experts: int | None, moe_shared_expert_intermediate_size: int | None, tensor_model_parallel_size: int
) -> Violation:
    """A rank computes an equal share of the channels of the shared experts."""
    width = moe_shared_expert_intermediate_size or 0
    if not num_experts or width % tensor_model_parallel_size == 0:
        return None
    return (
        f"shared experts of width {width} cannot be divided among {tensor_model_parallel_size} tensor-parallel ranks",
        f"give --moe-shared-expert-intermediate-size as a multiple of {tensor_model_parallel_size}",
    )


def vocabulary_divides_among_tensor_ranks(padded_vocab_size: int | None, tensor_model_parallel_size: int) -> Violation:
    """A rank holds an equal share of the rows of the embedding."""
    if padded_vocab_size is None or padded_vocab_size % tensor_model_parallel_size == 0:
        return None
    return (
        f"--padded-vocab-size {padded_vocab_size} cannot be divided among {tensor_model_parallel_size} tensor-parallel "
        "ranks",
        "leave --padded-vocab-size out: the padding then fits",
    )


def unpadded_vocabulary_is_on_one_rank(
    pad_vocab_size: bool, padded_vocab_size: int | None, tensor_model_parallel_size: int
) -> Violation:
    """The ranks hold equal shares of the rows of the embedding, which padding makes possible."""
    if pad_vocab_size or padded_vocab_size is not None or tensor_model_parallel_size == 1:
        return None
    return (
        f"a vocabulary without padding may not be divisible among {tensor_model_parallel_size} tensor-parallel ranks",
        "leave --disable-pad-vocab-size out, or give --padded-vocab-size",
    )


def experts_need_sequence_parallel(
    num_experts: int | None, tensor_model_parallel_size: int, sequence_parallel: bool
) -> Violation:
    """Without it every tensor-parallel rank would route and compute the same tokens."""
    if not num_experts or tensor_model_parallel_size == 1 or sequence_parallel:
        return None
    return (
        f"experts and {tensor_model_parallel_size} tensor-parallel ranks without sequence parallelism",
        "add --sequence-parallel",
    )


def sequence_divides_among_tensor_ranks(
    seq_length: int, sequence_parallel: bool, tensor_model_parallel_size: int, context_parallel_size: int
) -> Violation:
    """Under sequence parallelism every tensor-parallel rank holds an equal stretch of the sequence."""
    if not sequence_parallel or context_parallel_size > 1 or seq_length % tensor_model_parallel_size == 0:
        return None
    return (
        f"--seq-length {seq_length} cannot be divided among {tensor_model_parallel_size} tensor-parallel ranks",
        f"give --seq-length as a multiple of {tensor_model_parallel_size}",
    )


RULES = (
    heads_divide_among_tensor_ranks,
    groups_divide_among_tensor_ranks,
    shared_groups_have_equal_rows,
    dense_width_divides_among_tensor_ranks,
    shared_expert_divides_among_tensor_ranks,
    vocabulary_divides_among_tensor_ranks,
    unpadded_vocabulary_is_on_one_rank,
    experts_need_sequence_parallel,
    sequence_divides_among_tensor_ranks,
)
