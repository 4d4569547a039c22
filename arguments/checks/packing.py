"""Rules about variable-length data and its packing."""

from arguments.checks.violation import RuleFlags, Violations, conflict, enabled_options, lacks


def packing_flags_have_sequences(flags: RuleFlags) -> Violations:
    """Packing applies only to --use-varlen-dataset, because samples of other datasets fill their rows."""
    given = {
        "--sequence-packing-scheduler": flags.sequence_packing_scheduler is not None,
        "--pad-packed-seq-alignment": flags.pad_packed_seq_alignment is not None,
        "--thd-tail-padding-policy": flags.thd_tail_padding_policy is not None,
        "--thd-max-packed-sequences": flags.thd_max_packed_sequences is not None,
    }
    if not flags.use_varlen_dataset and any(given.values()):
        yield lacks(enabled_options(given), "--use-varlen-dataset", "give --use-varlen-dataset, or leave it out")


def packed_loss_is_per_token(flags: RuleFlags) -> Violations:
    """Packed rows have unequal numbers of tokens, so an average of microbatch losses would depend on the packing."""
    if flags.use_varlen_dataset and not flags.calculate_per_token_loss:
        yield lacks("--use-varlen-dataset", "--calculate-per-token-loss", "give --calculate-per-token-loss")


def dynamic_packing_has_dynamic_cp(flags: RuleFlags) -> Violations:
    """default_dynamic_cp separates long from short sequences, which is useful only for --dynamic-context-parallel."""
    if flags.sequence_packing_scheduler == "default_dynamic_cp" and not flags.dynamic_context_parallel:
        remedy = "use dp_balanced, or give --dynamic-context-parallel"
        yield lacks("--sequence-packing-scheduler default_dynamic_cp", "--dynamic-context-parallel", remedy)


def rows_have_the_sequence_length(flags: RuleFlags) -> Violations:
    """A row has --seq-length positions, which are divided equally among context-parallel ranks."""
    limit, cp = flags.max_seqlen_per_dp_cp_rank, flags.context_parallel_size
    if not flags.use_varlen_dataset or flags.dynamic_context_parallel or limit is None:
        return
    if limit * cp != flags.seq_length:
        yield (
            f"--max-seqlen-per-dp-cp-rank {limit} x {cp} context-parallel ranks is not --seq-length {flags.seq_length}",
            f"--seq-length {limit * cp}, or leave --max-seqlen-per-dp-cp-rank out",
        )


def alignment_of_sequences_is_valid(flags: RuleFlags) -> Violations:
    """Sequences start at multiples of --pad-packed-seq-alignment in their row."""
    value = flags.pad_packed_seq_alignment
    if value is None or value == "max" or (value.isdecimal() and 1 <= int(value) <= flags.seq_length):
        return
    yield (
        f"--pad-packed-seq-alignment {value} is neither max nor a number from 1 to --seq-length {flags.seq_length}",
        "use max",
    )


def rows_hold_a_sequence(flags: RuleFlags) -> Violations:
    """--thd-max-packed-sequences includes the padding sequence that append_dummy_seq adds."""
    if flags.thd_max_packed_sequences == 1 and flags.thd_tail_padding_policy != "extend_last":
        remedy = "--thd-max-packed-sequences 2, or --thd-tail-padding-policy extend_last"
        yield "--thd-max-packed-sequences 1 leaves room only for the padding sequence", remedy


def packing_excludes_constant_step_shapes(flags: RuleFlags) -> Violations:
    """The number of microbatches depends on the lengths of the sequences, so it differs from step to step."""
    others = {
        "--cuda-graph-impl full_iteration": flags.cuda_graph_impl == "full_iteration",
        "--moe-routing-replay-path": flags.moe_routing_replay_path is not None,
    }
    if flags.use_varlen_dataset and any(others.values()):
        yield conflict(
            "--use-varlen-dataset",
            f"{enabled_options(others)}, which requires the same number of microbatches in every step",
            f"leave {enabled_options(others)} out",
        )
