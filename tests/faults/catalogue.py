"""Tests of every fault and guarantee of docs/reliability.md, by number; `tests/house_rules` checks that they exist.

Fault 39 (an error of a GPU, a link that is down) needs hardware.
"""

from collections.abc import Mapping
from types import MappingProxyType

HARDWARE = 39
NUM_FAULTS = 58
NUM_GUARANTEES = 14

_SAVE = "tests/checkpoint/test_save.py::"
_INTERRUPTED = "tests/checkpoint/test_save_interrupted.py::"
_BACKGROUND = "tests/checkpoint/test_async_save.py::"
_LOAD = "tests/checkpoint/test_load.py::"
_SOURCE = "tests/checkpoint/test_load_source.py::"
_INJECTED = "tests/faults/test_injected.py::"
_KILLS = "tests/faults/test_kills.py::"
_NONFINITE = "tests/faults/test_nonfinite.py::"
_PREEMPTION = "tests/faults/test_preemption.py::"
_RESUME = "tests/train/test_checkpointing.py::"
_INDEXED = "tests/data/test_indexed.py::"
_BAD_INPUT = "tests/end_to_end/test_bad_input.py::"
_METRICS = "tests/logs/test_metrics_file.py::"
_SINKS = "tests/logs/test_writers.py::"
_REPORTER = "tests/logs/test_reporter.py::"
_SOAK = "tests/faults/test_soak.py::test_a_run_under_random_faults_ends_with_the_bits_of_an_undisturbed_one"

FAULTS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        # saving
        1: (
            _INTERRUPTED + "test_a_kill_at_any_moment_loses_no_committed_checkpoint",
            _KILLS + "test_kills_at_instrumented_points_and_random_times_lose_no_committed_checkpoint",
            _KILLS + "test_a_hundred_random_kills_lose_no_committed_checkpoint",
            _SOAK,
        ),
        2: (_INTERRUPTED + "test_a_kill_at_any_moment_loses_no_committed_checkpoint",),
        3: (
            _INJECTED + "test_peers_of_a_lost_rank_exit_with_code_11_and_name_it",
            "tests/resilience/test_peer_failure.py::test_rank_without_report_is_named",
        ),
        4: (
            _INTERRUPTED + "test_a_kill_at_any_moment_loses_no_committed_checkpoint",
            _SAVE + "test_a_failing_tracker_is_a_warning_after_the_commit",
        ),
        5: (
            _SAVE + "test_a_damaged_tracker_is_corrected_at_start",
            _SOURCE + "test_a_stale_tracker_is_ignored_with_one_line",
        ),
        6: (
            _INTERRUPTED + "test_after_an_error_at_any_moment_the_next_save_succeeds",
            _SAVE + "test_the_third_consecutive_failed_save_ends_the_run",
            _INJECTED + "test_a_full_disk_costs_one_checkpoint_and_is_logged",
        ),
        7: (
            _SAVE + "test_the_first_rank_writes_and_all_ranks_return_the_result",
            _BACKGROUND + "test_a_failure_in_the_thread_is_reported_and_leaves_no_files",
        ),
        8: (
            _BACKGROUND + "test_slow_storage_does_not_block_the_caller",
            _INJECTED + "test_a_hanging_save_exits_with_code_10",
        ),
        9: (
            _SAVE + "test_an_unwritable_folder_is_rejected_on_every_rank",
            _BAD_INPUT + "test_an_unwritable_run_folder",
        ),
        10: (_SAVE + "test_incomplete_checkpoints_and_nothing_else_are_removed_at_start",),
        11: (
            _SAVE + "test_a_second_job_is_rejected_with_the_owner_of_the_lock",
            "tests/logs/test_reporter.py::test_run_folder_of_another_job_is_rejected_on_every_rank",
        ),
        12: ("tests/train/test_exit_conditions.py::test_exit_duration_uses_the_latest_clock_of_all_ranks",),
        13: (_INJECTED + "test_a_pending_save_is_completed_at_the_end_of_the_run",),
        14: (_SAVE + "test_a_checkpoint_that_cannot_be_deleted_is_kept_with_a_warning",),
        15: (_SAVE + "test_saving_recovers_after_a_mount_disappeared",),
        # loading
        16: (_LOAD + "test_truncated_missing_and_longer_files_are_detected",),
        17: (_LOAD + "test_flipped_bits_are_detected",),
        18: (
            _LOAD + "test_truncated_missing_and_longer_files_are_detected",
            _LOAD + "test_files_that_are_not_in_the_manifest_are_ignored",
        ),
        19: (_LOAD + "test_damage_on_one_rank_rejects_the_checkpoint_on_all",),
        20: (_LOAD + "test_a_folder_with_only_damaged_checkpoints_ends_the_run_with_every_reason",),
        21: (
            _LOAD + "test_pickles_in_the_folder_are_not_executed",
            "tests/checkpoint/test_huggingface.py::test_a_folder_without_safetensors_is_rejected",
        ),
        22: (
            "tests/checkpoint/test_manifest.py::test_an_inconsistent_manifest_with_a_valid_checksum_is_rejected",
            _LOAD + "test_a_manifest_with_a_huge_tensor_is_rejected_before_allocation",
        ),
        23: ("tests/train/test_resharding.py::test_a_checkpoint_resumes_on_another_layout",),
        24: (
            _RESUME + "test_changed_sequence_length_is_rejected",
            _RESUME + "test_changed_learning_rate_is_rejected_only_with_optimizer_state",
            _RESUME + "test_changed_data_is_reported",
            "tests/train/test_resume_table.py::"
            "test_changed_end_of_document_id_is_rejected_and_changed_vocabulary_reported",
        ),
        25: (_LOAD + "test_a_stored_version_1_checkpoint_loads",),
        26: (_LOAD + "test_a_renamed_tensor_in_a_consistent_manifest_is_missing_and_unknown",),
        # processes, machines, network
        27: (
            _PREEMPTION + "test_a_signal_to_one_rank_ends_both_with_a_checkpoint",
            _PREEMPTION + "test_a_signal_before_the_first_step_has_nothing_to_save",
            _INJECTED + "test_a_signal_in_any_phase_leads_to_a_checkpoint",
        ),
        28: (_PREEMPTION + "test_a_signal_to_one_rank_ends_both_with_a_checkpoint",),
        29: (
            "tests/resilience/test_signals.py::test_second_signal_interrupts_but_a_forwarded_first_one_does_not",
            _PREEMPTION + "test_a_signal_before_the_first_step_has_nothing_to_save",
        ),
        30: (
            "tests/faults/test_hang.py::test_a_stopped_rank_is_named_by_its_peer",
            "tests/resilience/test_watchdog.py::test_c_timer_prints_stacks_while_the_interpreter_is_locked",
            _INJECTED + "test_a_hanging_save_exits_with_code_10",
        ),
        31: (
            _INJECTED + "test_the_first_failed_rank_is_reported_with_its_reason",
            "tests/resilience/test_peer_failure.py::test_reported_cause_of_a_peer_is_quoted",
        ),
        32: (
            _INJECTED + "test_peers_of_a_lost_rank_exit_with_code_11_and_name_it",
            _INJECTED + "test_a_segmentation_fault_prints_its_stack",
            _INJECTED + "test_a_rank_that_exits_or_runs_out_of_memory_is_reported",
        ),
        33: (
            _INJECTED + "test_a_rank_that_exits_or_runs_out_of_memory_is_reported",
            "tests/train/test_trainer.py::test_out_of_memory_step_raises_with_a_report",
        ),
        34: (
            "tests/parallel/test_rendezvous.py::"
            "test_ranks_that_disagree_about_a_collective_report_what_each_was_about_to_do",
            "tests/resilience/test_watchdog.py::test_waiting_rank_names_the_collective_and_its_group",
        ),
        35: (
            _INJECTED + "test_ranks_with_different_flags_are_rejected_with_the_flags",
            "tests/parallel/test_agreement.py::test_a_flag_that_differs_is_named_with_both_values_on_every_rank",
        ),
        36: (
            "tests/arguments/test_launch.py::test_an_invalid_environment_is_rejected",
            "tests/arguments/test_checks.py::test_an_impossible_fold_is_rejected_with_the_nearest_sizes",
        ),
        37: (
            "tests/parallel/test_rendezvous.py::test_a_rank_that_never_connects_is_reported_with_address_and_time",
            "tests/parallel/test_rendezvous.py::test_a_first_rank_that_never_connects_is_reported_with_address_and_time",
            "tests/parallel/test_rendezvous.py::test_a_port_in_use_is_reported",
        ),
        38: ("tests/resilience/test_requeue.py::test_patience_without_a_new_checkpoint",),
        # numbers
        40: (
            _NONFINITE + "test_a_nan_in_one_microbatch_of_one_rank_is_named_with_its_samples",
            _NONFINITE + "test_an_infinite_gradient_is_named_where_it_arose",
            _NONFINITE + "test_the_expert_is_named_by_its_global_id",
        ),
        41: (
            _NONFINITE + "test_a_spike_is_reported_skipped_or_ends_the_run",
            "tests/resilience/test_numerics_guard.py::test_device_spike_limit_equals_the_host_rule",
        ),
        42: (
            _INJECTED + "test_a_flipped_bit_of_a_weight_is_named_with_its_rank",
            "tests/resilience/test_replica_check.py::test_flipped_bit_names_rank_and_parameter",
        ),
        43: (
            _INJECTED + "test_a_result_that_is_not_reproduced_exits_with_code_16_and_names_the_rank",
            "tests/resilience/test_rerun.py::test_changed_result_suspects_the_rank_whose_loss_changed",
        ),
        44: (
            "tests/moe/parallel/test_layer_over_ranks.py::test_all_tokens_to_one_expert",
            "tests/moe/test_metrics.py::test_load_metrics_are_finite_without_tokens_or_with_one_expert",
        ),
        # FP8 is a storage format of files and optimizer states
        45: (
            "tests/precision/test_optimizer_state.py::test_rounding_error_is_at_most_half_a_unit",
            "tests/checkpoint/test_hf_fp8.py::test_missing_or_misshapen_scales_are_rejected_by_name",
        ),
        # data and configuration
        46: (
            _INDEXED + "test_index_truncated_anywhere_is_refused",
            _INDEXED + "test_a_damaged_index_is_rejected_with_file_offset_and_remedy",
        ),
        47: (_INDEXED + "test_bin_of_another_size_is_refused_at_open",),
        48: (
            "tests/data/test_datasets.py::test_an_invalid_id_is_rejected_in_the_step_that_reads_it",
            _BAD_INPUT + "test_a_token_id_beyond_the_vocabulary",
        ),
        49: (
            _INDEXED + "test_a_damaged_index_is_rejected_with_file_offset_and_remedy",
            _INDEXED + "test_a_data_set_without_sequences_or_tokens_can_be_opened",
        ),
        50: ("tests/data/test_cache.py::test_an_incomplete_entry_is_not_used",),
        51: (
            "tests/data/test_datasets.py::test_data_replaced_at_the_same_place_is_indexed_again",
            _RESUME + "test_changed_data_is_reported",
        ),
        52: ("tests/data/test_loader.py::test_exhausted_data_is_reported_and_then_rejected",),
        53: (
            "tests/arguments/test_mutations.py::test_three_hundred_mutated_command_lines_give_no_traceback",
            "tests/arguments/test_parser.py::test_an_unknown_flag_is_rejected_with_similar_names",
            "tests/arguments/test_files.py::test_cyclic_and_missing_base_files_are_rejected",
        ),
        54: (
            "tests/arguments/test_files.py::test_missing_variables_are_reported_once_each",
            "tests/arguments/test_values.py::test_an_invalid_pattern_is_rejected_without_evaluation",
        ),
        55: (
            _BAD_INPUT + "test_a_missing_tokenizer",
            "tests/data/test_tokenizer.py::test_a_model_of_another_kind_is_rejected_by_name",
        ),
        56: (
            "tests/kernels/test_registry.py::test_unsupported_requests_are_rejected_with_reason_and_alternatives",
            "tests/kernels/test_registry.py::test_backends_with_missing_packages_are_discovered_without_importing_them",
        ),
        # telemetry
        57: (
            _SINKS + "test_failures_are_reported_once_per_hour_and_sink",
            _SINKS + "test_failed_records_are_retried_without_an_incomplete_line",
            _REPORTER + "test_closed_terminal_does_not_stop_training",
        ),
        58: (
            _METRICS + "test_incomplete_last_line_is_skipped",
            _METRICS + "test_resumed_run_drops_later_records_and_the_incomplete_line",
        ),
    }
)
"""Fault number -> tests."""

GUARANTEES: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        1: (*FAULTS[1], *FAULTS[6]),
        2: (*FAULTS[1], *FAULTS[16], _LOAD + "test_the_newest_intact_checkpoint_is_used_with_one_line_per_damaged_one"),
        3: (
            "tests/end_to_end/test_train_and_resume.py::test_twelve_iterations_equal_six_and_six",
            "tests/checkpoint/test_resume.py::test_four_steps_and_four_more_equal_eight_steps_bitwise",
            _SOAK,
        ),
        4: FAULTS[23],
        5: (*FAULTS[16], *FAULTS[17]),
        6: FAULTS[21],
        7: FAULTS[30],
        8: (*FAULTS[3], *FAULTS[31]),
        9: FAULTS[40],
        10: (*FAULTS[53], _BAD_INPUT + "test_all_invalid_flags_are_reported"),
        11: FAULTS[57],
        12: (*FAULTS[27], _RESUME + "test_save_longer_than_the_grace_period_is_reported_once"),
        13: FAULTS[42],
        14: FAULTS[56],
    }
)
"""Guarantee number -> tests."""
