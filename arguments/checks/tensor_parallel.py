"""Rules about tensor parallelism: sizes that the ranks divide."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violation, divisors, functions_returning
from megatron_moe.config.exit_codes import counted


def tp_divides_heads(flags: RuleFlags) -> Violation:
    """Every rank computes whole attention heads."""
    if flags.num_attention_heads % flags.tensor_model_parallel_size == 0:
        return None
    return (
        f"{counted(flags.num_attention_heads, 'head')} cannot be divided among "
        f"{flags.tensor_model_parallel_size} tensor-parallel ranks",
        f"use --tensor-model-parallel-size {divisors(flags.num_attention_heads)}",
    )


def tp_divides_query_groups(flags: RuleFlags) -> Violation:
    """Every rank computes whole query groups, or an equal number of ranks shares each group."""
    groups, tp = flags.num_query_groups, flags.tensor_model_parallel_size
    if not flags.group_query_attention or groups % tp == 0 or tp % groups == 0:
        return None
    return (
        f"{groups} query groups and {tp} tensor-parallel ranks: neither number divides the other",
        f"use {divisors(groups)} ranks, or a multiple of {groups}",
    )


def tp_divides_shared_kv_channels(flags: RuleFlags) -> Violation:
    """Ranks that share a query group divide its key and value channels."""
    tp = flags.tensor_model_parallel_size
    width = 2 * flags.num_query_groups * derive.head_dim(flags)
    if not flags.group_query_attention or flags.num_query_groups >= tp or width % tp == 0:
        return None
    return (
        f"{width} channels of keys and values do not divide among {tp} tensor-parallel ranks",
        f"use {divisors(flags.num_query_groups)} ranks",
    )


def tp_divides_dense_width(flags: RuleFlags) -> Violation:
    """Every rank computes an equal share of the feed-forward channels."""
    width = derive.ffn_hidden_size(flags)
    if width % flags.tensor_model_parallel_size == 0:
        return None
    return (
        f"{counted(width, 'feed-forward channel')} cannot be divided among {flags.tensor_model_parallel_size} "
        "tensor-parallel ranks",
        f"give --ffn-hidden-size as a multiple of {flags.tensor_model_parallel_size}",
    )


def tp_divides_shared_expert(flags: RuleFlags) -> Violation:
    """Every rank computes an equal share of the shared-expert channels."""
    width = flags.moe_shared_expert_intermediate_size or 0
    if not flags.num_experts or width % flags.tensor_model_parallel_size == 0:
        return None
    return (
        f"shared experts of width {width} cannot be divided among "
        f"{flags.tensor_model_parallel_size} tensor-parallel ranks",
        f"give --moe-shared-expert-intermediate-size as a multiple of {flags.tensor_model_parallel_size}",
    )


def unpadded_vocab_needs_tp1(flags: RuleFlags) -> Violation:
    """Every rank holds an equal number of embedding rows, which requires padding."""
    if flags.pad_vocab_size or flags.padded_vocab_size is not None or flags.tensor_model_parallel_size == 1:
        return None
    return (
        f"a vocabulary without padding may not be divisible among "
        f"{flags.tensor_model_parallel_size} tensor-parallel ranks",
        "remove --disable-pad-vocab-size, or set --padded-vocab-size",
    )


def experts_need_sequence_parallel(flags: RuleFlags) -> Violation:
    """Sequence parallelism keeps tensor-parallel ranks from routing and computing the same tokens."""
    if not flags.num_experts or flags.tensor_model_parallel_size == 1 or flags.sequence_parallel:
        return None
    return (
        f"experts and {flags.tensor_model_parallel_size} tensor-parallel ranks without sequence parallelism",
        "add --sequence-parallel",
    )


def tp_divides_sequence(flags: RuleFlags) -> Violation:
    """With sequence parallelism every tensor-parallel rank holds an equal part of the sequence."""
    if (
        not flags.sequence_parallel
        or flags.context_parallel_size > 1
        or flags.seq_length % flags.tensor_model_parallel_size == 0
    ):
        return None
    return (
        f"--seq-length {flags.seq_length} cannot be divided among "
        f"{flags.tensor_model_parallel_size} tensor-parallel ranks",
        f"give --seq-length as a multiple of {flags.tensor_model_parallel_size}",
    )


RULES = functions_returning(Violation, globals())
