"""Rules about tensor parallelism. Sizes of modules are checked by `Component.layout_problem`."""

from arguments.checks.violation import RuleFlags, Violations, lacks


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
        yield f"experts with {ranks} require sequence parallelism", "add --sequence-parallel"


def overlap_needs_sequence_parallel(flags: RuleFlags) -> Violations:
    """Only the collectives of sequence parallelism can overlap with GEMMs; an all-reduce depends on its GEMM's
    output."""
    if flags.tp_comm_overlap and flags.tensor_model_parallel_size != 1 and not flags.sequence_parallel:
        yield lacks("--tp-comm-overlap", "sequence parallelism", "add --sequence-parallel")


def tp_divides_sequence(flags: RuleFlags) -> Violations:
    """With sequence parallelism every tensor-parallel rank holds an equal part of the sequence."""
    length, tp = flags.seq_length, flags.tensor_model_parallel_size
    if flags.sequence_parallel and flags.context_parallel_size == 1 and length % tp:
        remedy = f"give --seq-length as a multiple of {tp}"
        yield f"--seq-length {length} cannot be divided among {tp} tensor-parallel ranks", remedy
