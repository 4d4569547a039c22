"""Rules about context parallelism."""

from math import lcm

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations
from megatron_moe.config.registry import BALANCING
from megatron_moe.config.text import counted


def cp_divides_sequence(flags: RuleFlags) -> Violations:
    """To balance causal attention, every context-parallel rank holds two equal chunks of the sequence, an early and a
    late one. Sequence parallelism divides the tokens of these chunks among the tensor-parallel ranks."""
    cp, tp = flags.context_parallel_size, flags.tensor_model_parallel_size if flags.sequence_parallel else 1
    unit = lcm(2 * cp, cp * tp)
    if cp != 1 and flags.seq_length % unit:
        yield (
            f"--seq-length {flags.seq_length} is not a multiple of {unit}, which {cp} context-parallel ranks need",
            f"--seq-length {max(unit, flags.seq_length // unit * unit)}, or fewer context-parallel ranks",
        )


def chunks_are_longer_than_convolutions(flags: RuleFlags) -> Violations:
    """With --linear-cp-mode chunkwise, the convolution of a chunk reads tokens of only one chunk before it."""
    chunk, cp = flags.seq_length // (2 * flags.context_parallel_size), flags.context_parallel_size
    earlier = derive.conv_width(flags) - 1
    if flags.linear_cp_mode == "chunkwise" and cp > 1 and chunk < earlier:
        yield (
            f"chunks of {counted(chunk, 'token')} on {cp} context-parallel ranks are shorter than the "
            f"{earlier} earlier tokens that a convolution sees",
            "use fewer ranks, or --linear-cp-mode headwise",
        )


def cp_comm_type_matches_layers(flags: RuleFlags) -> Violations:
    """--cp-comm-type has one value for all layers or one per layer."""
    if len(flags.cp_comm_type) not in (1, flags.num_layers):
        remedy = "give one value, or one per layer"
        yield f"--cp-comm-type has {len(flags.cp_comm_type)} values for {counted(flags.num_layers, 'layer')}", remedy


def hierarchical_cp_sizes_multiply_to_cp(flags: RuleFlags) -> Violations:
    """a2a+p2p divides the context-parallel ranks into groups: group size x number of groups is the context-parallel
    size. Ranks exchange heads within a group and key/value blocks between groups."""
    if flags.context_parallel_size == 1 or "a2a+p2p" not in flags.cp_comm_type:
        return
    sizes = flags.hierarchical_context_parallel_sizes
    if sizes is not None and len(sizes) == 2 and sizes[0] * sizes[1] == flags.context_parallel_size:
        return
    given = "not given" if sizes is None else " x ".join(map(str, sizes))
    yield (
        f"the a2a+p2p sizes for {flags.context_parallel_size} context-parallel ranks are {given}",
        "set --hierarchical-context-parallel-sizes to two numbers, for a2a and for p2p, whose product is "
        f"{flags.context_parallel_size}",
    )


def dynamic_cp_is_power_of_two(flags: RuleFlags) -> Violations:
    """--dynamic-context-parallel creates process groups of 1, 2, 4, ... ranks, up to the context-parallel size."""
    cp, least = flags.context_parallel_size, flags.min_dynamic_context_parallel_size
    if flags.dynamic_context_parallel and cp.bit_count() != 1:
        yield f"{cp} context-parallel ranks are not a power of two", "use 2, 4, 8, ... ranks"
    elif flags.dynamic_context_parallel and (least.bit_count() != 1 or least > cp):
        yield (
            f"--min-dynamic-context-parallel-size {least} is not a power of two from 1 to {cp}, the context-parallel "
            "size",
            "choose one of them",
        )


def dynamic_cp_is_not_hierarchical(flags: RuleFlags) -> Violations:
    """The process groups of a2a+p2p have fixed sizes, but --dynamic-context-parallel varies the number of ranks."""
    if flags.dynamic_context_parallel and "a2a+p2p" in flags.cp_comm_type:
        remedy = "use p2p or a2a"
        yield "a2a+p2p needs a fixed number of context-parallel ranks, but --dynamic-context-parallel varies it", remedy


def dynamic_cp_excludes_seq_aux_loss(flags: RuleFlags) -> Violations:
    """seq_aux_loss, as other losses per sequence, sums the token counts of a sequence over all context-parallel ranks,
    but ranks have different sequences if --dynamic-context-parallel divides them into smaller groups."""
    if not flags.dynamic_context_parallel:
        return
    for name in flags.moe_router_load_balancing_type:
        if BALANCING.get(name).per_sequence:
            remedy = "use aux_loss or global_aux_loss"
            yield f"{name} counts the tokens of a sequence over all context-parallel ranks", remedy
