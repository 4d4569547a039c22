"""Rules about ranks that split the sequence."""

from math import lcm

from arguments.checks.violation import Violation
from megatron_moe.config.exit_codes import counted


def chunks_share_the_sequence(
    context_parallel_size: int, seq_length: int, tensor_model_parallel_size: int, sequence_parallel: bool
) -> Violation:
    """A rank holds two equal chunks of the sequence, an early and a late one, so that all have the same work; with
    sequence parallelism its share is split once more."""
    cp, tp = context_parallel_size, tensor_model_parallel_size if sequence_parallel else 1
    unit = lcm(2 * cp, cp * tp)
    if cp == 1 or seq_length % unit == 0:
        return None
    return (
        f"--seq-length {seq_length} is not a multiple of {unit}, which {cp} context-parallel ranks need",
        f"--seq-length {max(unit, seq_length // unit * unit)}, or fewer context-parallel ranks",
    )


def layers_exchange_in_one_way(cp_comm_type: tuple[str, ...], num_layers: int) -> Violation:
    """One way to exchange keys and values for all layers, or one for each."""
    if len(cp_comm_type) in (1, num_layers):
        return None
    return (
        f"{len(cp_comm_type)} ways to exchange keys and values for {counted(num_layers, 'layer')}",
        "give --cp-comm-type one value, or one per layer",
    )


def two_levels_make_the_ranks(
    context_parallel_size: int,
    cp_comm_type: tuple[str, ...],
    hierarchical_context_parallel_sizes: tuple[int, ...] | None,
) -> Violation:
    """a2a+p2p exchanges heads among neighbours and keys between such groups; their sizes multiply to all ranks."""
    if context_parallel_size == 1 or "a2a+p2p" not in cp_comm_type:
        return None
    sizes = hierarchical_context_parallel_sizes
    if sizes is not None and len(sizes) == 2 and sizes[0] * sizes[1] == context_parallel_size:
        return None
    given = "not given" if sizes is None else " x ".join(map(str, sizes))
    return (
        f"the two levels of {context_parallel_size} context-parallel ranks are {given}",
        "give --hierarchical-context-parallel-sizes two numbers, for a2a and for p2p, whose product is "
        f"{context_parallel_size}",
    )


def heads_divide_among_the_ranks(
    context_parallel_size: int,
    cp_comm_type: tuple[str, ...],
    hierarchical_context_parallel_sizes: tuple[int, ...] | None,
    num_attention_heads: int,
    group_query_attention: bool,
    num_query_groups: int,
    tensor_model_parallel_size: int,
) -> Violation:
    """a2a gives every rank an equal share of the heads, with the keys and values that they read."""
    sizes = hierarchical_context_parallel_sizes or (1,)
    ranks = max(context_parallel_size if "a2a" in cp_comm_type else 1, sizes[0] if "a2a+p2p" in cp_comm_type else 1)
    if context_parallel_size == 1 or ranks == 1:
        return None
    tp = tensor_model_parallel_size
    heads = num_attention_heads // tp
    groups = max(num_query_groups // tp, 1) if group_query_attention else heads
    if heads % ranks:
        of_tp = f" of a tensor-parallel rank ({num_attention_heads} / {tp})" if tp > 1 else ""
        return (
            f"{counted(heads, 'head')}{of_tp} cannot be divided among {ranks} ranks",
            f"a2a over a number of ranks that divides {heads}, or p2p",
        )
    if groups and groups % ranks and ranks % groups:
        return (
            f"{groups} query groups and {ranks} ranks that exchange heads: neither divides the other",
            f"a2a over a number of ranks that divides {groups}, or p2p",
        )
    return None


def dynamic_splits_have_a_limit(hybrid_context_parallel: bool, max_seqlen_per_dp_cp_rank: int | None) -> Violation:
    """How many ranks a microbatch needs follows from how much of a document one rank may hold."""
    if not hybrid_context_parallel or max_seqlen_per_dp_cp_rank is not None:
        return None
    return "--hybrid-context-parallel does not know how much a rank may hold", "give --max-seqlen-per-dp-cp-rank"


def dynamic_splits_halve_the_ranks(hybrid_context_parallel: bool, context_parallel_size: int) -> Violation:
    """Groups of 1, 2, 4, ... ranks are made at start, up to all context-parallel ranks."""
    if not hybrid_context_parallel or context_parallel_size.bit_count() == 1:
        return None
    return f"{context_parallel_size} context-parallel ranks are not a power of two", "use 2, 4, 8, ... ranks"


def dynamic_splits_have_one_level(hybrid_context_parallel: bool, cp_comm_type: tuple[str, ...]) -> Violation:
    """Two levels of ranks are made for one degree of splitting."""
    if hybrid_context_parallel and "a2a+p2p" in cp_comm_type:
        return "a2a+p2p splits over all context-parallel ranks, not over a changing number of them", "use p2p or a2a"
    return None


def dynamic_splits_balance_over_tokens(
    hybrid_context_parallel: bool, moe_router_load_balancing_type: tuple[str, ...]
) -> Violation:
    """Ranks that hold different sequences cannot count the tokens of one sequence together."""
    if hybrid_context_parallel and "seq_aux_loss" in moe_router_load_balancing_type:
        return "seq_aux_loss counts every sequence over all context-parallel ranks", "use aux_loss or global_aux_loss"
    return None


RULES = (
    chunks_share_the_sequence,
    layers_exchange_in_one_way,
    two_levels_make_the_ranks,
    heads_divide_among_the_ranks,
    dynamic_splits_have_a_limit,
    dynamic_splits_halve_the_ranks,
    dynamic_splits_have_one_level,
    dynamic_splits_balance_over_tokens,
)
