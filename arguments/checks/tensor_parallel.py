"""Rules about tensor parallelism: sizes that must be divisible among the ranks."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, divisors
from megatron_moe.config.exit_codes import counted


def tp_divides_heads(flags: RuleFlags) -> Violations:
    """Every tensor-parallel rank computes whole attention heads."""
    heads, tp = flags.num_attention_heads, flags.tensor_model_parallel_size
    if heads % tp:
        remedy = f"use --tensor-model-parallel-size {divisors(heads)}"
        yield f"{counted(heads, 'head')} cannot be divided among {tp} tensor-parallel ranks", remedy


def tp_divides_query_groups(flags: RuleFlags) -> Violations:
    """Every rank computes whole query groups, or an equal number of ranks shares each group."""
    groups, tp = flags.num_query_groups, flags.tensor_model_parallel_size
    if flags.group_query_attention and groups % tp and tp % groups:
        yield (
            f"{groups} query groups and {tp} tensor-parallel ranks: neither number divides the other",
            f"use {divisors(groups)} ranks, or a multiple of {groups}",
        )


def tp_divides_shared_kv_channels(flags: RuleFlags) -> Violations:
    """Ranks that share a query group divide its key and value channels."""
    tp = flags.tensor_model_parallel_size
    width = 2 * flags.num_query_groups * derive.head_dim(flags)
    if flags.group_query_attention and flags.num_query_groups < tp and width % tp:
        yield (
            f"{width} channels of keys and values cannot be divided among {tp} tensor-parallel ranks",
            f"use {divisors(flags.num_query_groups)} ranks",
        )


def tp_divides_dense_width(flags: RuleFlags) -> Violations:
    """Every rank computes an equal share of the feed-forward channels."""
    width, tp = derive.ffn_hidden_size(flags), flags.tensor_model_parallel_size
    if width % tp:
        yield (
            f"{counted(width, 'feed-forward channel')} cannot be divided among {tp} tensor-parallel ranks",
            f"give --ffn-hidden-size as a multiple of {tp}",
        )


def tp_divides_shared_expert(flags: RuleFlags) -> Violations:
    """Every rank computes an equal share of the shared-expert channels."""
    width, tp = flags.moe_shared_expert_intermediate_size or 0, flags.tensor_model_parallel_size
    if flags.num_experts and width % tp:
        remedy = f"give --moe-shared-expert-intermediate-size as a multiple of {tp}"
        yield f"shared experts of width {width} cannot be divided among {tp} tensor-parallel ranks", remedy


def unpadded_vocab_needs_tp1(flags: RuleFlags) -> Violations:
    """Every tensor-parallel rank holds the same number of embedding rows, which may require padding."""
    if not flags.pad_vocab_size and flags.padded_vocab_size is None and flags.tensor_model_parallel_size != 1:
        ranks = f"{flags.tensor_model_parallel_size} tensor-parallel ranks"
        remedy = "remove --disable-pad-vocab-size, or set --padded-vocab-size"
        yield f"a vocabulary without padding may not be divisible among {ranks}", remedy


def experts_need_sequence_parallel(flags: RuleFlags) -> Violations:
    """If the sequence is not sharded, all tensor-parallel ranks send the same tokens to the experts."""
    if flags.num_experts and flags.tensor_model_parallel_size != 1 and not flags.sequence_parallel:
        ranks = f"{flags.tensor_model_parallel_size} tensor-parallel ranks"
        yield f"experts and {ranks} without sequence parallelism", "add --sequence-parallel"


def tp_divides_sequence(flags: RuleFlags) -> Violations:
    """With sequence parallelism every tensor-parallel rank holds an equal part of the sequence."""
    length, tp = flags.seq_length, flags.tensor_model_parallel_size
    if flags.sequence_parallel and flags.context_parallel_size == 1 and length % tp:
        remedy = f"give --seq-length as a multiple of {tp}"
        yield f"--seq-length {length} cannot be divided among {tp} tensor-parallel ranks", remedy
