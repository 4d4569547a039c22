"""Splits the cases of large parametrised tests between CI and the nightly run."""

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

SAMPLED = {
    "arguments/test_checks.py::test_a_similar_command_line_is_legal": 6,
    "arguments/test_dry_run.py::test_the_totals_of_a_recipe_equal_the_golden_table": 8,
    "arguments/test_export.py::test_a_plan_is_equal_after_export_in_every_format": 8,
    "arguments/test_read.py::test_a_plan_is_the_same_when_its_run_yaml_is_read_back": 8,
    "benchmarks/test_bench_step.py": 8,
    "benchmarks/test_count_kernels.py": 2,
    "benchmarks/test_timed_run.py": 2,
    "checkpoint/test_convert.py": 10,
    "checkpoint/test_huggingface.py": 10,
    "checkpoint/test_huggingface_parity.py::test_a_generated_config_has_the_logits_of_the_published_one": 5,
    "checkpoint/test_huggingface_parity.py::test_logits_and_gradients_equal_those_of_transformers": 3,
    "checkpoint/test_huggingface_parity.py::test_one_wrong_config_field_in_one_layer_is_detected": 2,
    "cost_model/test_expert_rows.py": 2,
    "end_to_end/test_entry_point.py::test_train_samples_end_with_the_last_whole_batch": 3,
    "examples/test_components.py::test_layouts_equal_one_rank": 3,
    "examples/test_functions.py::test_layouts_equal_one_rank": 3,
    "examples/test_quantization_recipe.py::test_layouts_equal_one_rank": 3,
    "examples/test_transport.py::test_layouts_equal_one_rank": 3,
    "examples/test_update_rule.py": 4,
    "faults/test_nonfinite.py::test_an_update_that_stores_a_nonfinite_number_ends_the_run": 3,
    "kernels/test_attention_blocks.py": 4,
    "kernels/test_backends.py": 11,
    "kernels/test_cudnn_attention.py": 4,
    "kernels/test_fp8_kernels.py": 5,
    "kernels/test_hyper_connection_kernels.py": 2,
    "kernels/test_linear_attention.py": 5,
    "kernels/test_matrix_ops.py": 3,
    "kernels/test_pages.py": 3,
    "kernels/test_push.py": 4,
    "kernels/test_quantized_gemms.py": 2,
    "kernels/test_sparse_attention.py": 2,
    "kernels/test_triton_kernels.py": 12,
    "kernels/test_triton_packed.py": 4,
    "kernels/test_triton_routing.py": 5,
    "memory/test_activation_offload.py": 3,
    "memory/test_cuda_graphs.py": 3,
    "memory/test_graph_combinations.py": 3,
    "memory/test_low_precision_graphs.py": 5,
    "memory/test_recompute.py": 6,
    "memory_emulation/test_agreement.py": 7,
    "memory_emulation/test_graphs.py": 2,
    "memory_emulation/test_rank.py": 2,
    "memory_emulation/test_sharded.py": 4,
    "model/test_compressed_attention.py::test_emulated_memory_agrees_with_the_cost_model": 2,
    "model/test_compressed_attention.py::test_layouts_equal_one_rank": 2,
    "model/test_compressed_attention.py::test_output_and_gradients_equal_the_formulas": 2,
    "model/test_context_parallel.py": 4,
    "model/test_context_parallel_gpt.py": 6,
    "model/test_dsa.py": 3,
    "model/test_linear_attention_mixers.py": 5,
    "model/test_mtp.py": 2,
    "model/test_tensor_parallel.py": 7,
    "moe/parallel/test_balance_over_ranks.py": 7,
    "moe/parallel/test_dispatch_over_ranks.py": 26,
    "moe/parallel/test_fp8_exchange.py": 12,
    "moe/parallel/test_layer_over_ranks.py": 8,
    "moe/parallel/test_layer_through_optimizer.py": 2,
    "moe/test_against_loop.py": 10,
    "moe/test_experts.py::test_gradients_equal_finite_differences": 5,
    "moe/test_experts.py::test_output_equals_the_formula_row_by_row": 2,
    "moe/test_routing_replay.py": 3,
    "optim/test_fsdp.py": 2,
    "optim/test_grad_reduce.py": 3,
    "optim/test_lion.py": 3,
    "optim/test_muon.py": 2,
    "optim/test_norms_over_ranks.py": 10,
    "optim/test_sharded.py": 5,
    "optim/test_state_formats.py": 5,
    "optim/test_unit_shards.py": 2,
    "parallel/test_fake.py": 2,
    "parity/test_fused_casts.py": 3,
    "parity/test_low_precision.py": 5,
    "pipeline/test_simulator.py": 5,
    "precision/test_optimizer_state.py": 4,
    "precision/test_quantizers.py::test_bytes_and_scales_equal_those_of_transformer_engine": 2,
    "precision/test_stored_weight.py": 3,
    "recipes/test_published.py::test_a_published_layout_starts_or_names_flags": 2,
    "recipes/test_recipes.py::test_a_recipe_survives_a_yaml_round_trip": 4,
    "recipes/test_recipes.py::test_a_supported_recipe_is_accepted_on_its_ranks": 3,
    "recipes/test_recipes.py::test_all_ranks_agree_on_groups_that_cover_the_world_once": 4,
    "recipes/test_recipes.py::test_unpublished_and_long_layouts_fit_the_gpu_memory": 2,
    "tools/test_import_megatron.py::test_weights_are_megatrons_and_give_its_logits": 2,
    "tools/test_plan.py::test_cluster_options_equal_those_of_a_dry_run": 2,
    "train/test_context_parallel.py": 2,
    "train/test_hf_export.py": 4,
    "train/test_late_weight_gradients.py": 4,
    "train/test_load_upcycled.py": 2,
    "train/test_logit_clip.py::test_layouts_equal_one_rank": 2,
    "train/test_loss_scale.py": 2,
    "train/test_low_precision.py": 5,
    "train/test_low_precision_diagnosis.py": 2,
    "train/test_overflow.py": 2,
    "train/test_overlap.py": 6,
    "train/test_packing.py": 3,
    "train/test_pipeline.py": 3,
    "train/test_resharding.py": 3,
    "train/test_routing_trace.py": 2,
    "train/test_stored_weights.py": 6,
}
"""Files, or tests as FILE::NAME, with many cases -> n: CI runs one of n cases of each test, but at least two, and the
nightly run all cases."""
LEAST = 2

_DP2 = "dp=2 zero=on overlap=grads balance=none shared=on"
LEFT_OUT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "benchmarks/test_count_kernels.py::test_overlap_of_the_exchange_launches_nothing_more": (
            "--overlap-moe-expert-parallel-comm",
        ),
        "checkpoint/test_save_interrupted.py::test_a_kill_at_any_moment_loses_no_committed_checkpoint": (
            "another iteration, the oldest goes-save_in_background", "the newest iteration again-save_some",
            "another iteration, the oldest goes-save_some",
        ),
        "checkpoint/test_save_interrupted.py::test_after_an_error_at_any_moment_the_next_save_succeeds": (
            "disk full-another iteration, the oldest goes", "input/output error-the newest iteration again",
            "disk full-the newest iteration again",
        ),
        "cost_model/test_weight_gathers.py::test_layers_that_are_recomputed_together_are_gathered_as_predicted": (
            "virtual stages of two layers, recompute-2",
        ),
        "cost_model/test_weight_gathers.py::test_weights_are_gathered_as_predicted": ("virtual stages-zero-3",),
        "data/test_packing.py::test_a_dry_run_estimates_the_padding_of_packed_rows": ("blend-16", "files-1", "mock-1"),
        "examples/test_components.py::test_layouts_equal_one_rank": ("tp=2 sp=on dp=2 balance=none recompute=small",),
        "examples/test_functions.py::test_layouts_equal_one_rank": (
            "tp=2 sp=on dp=2 ep=4 dispatcher=alltoall balance=none",
        ),
        "examples/test_quantization_recipe.py::test_layouts_equal_one_rank": ("tp=2 sp=on shared=on",),
        "examples/test_quantization_recipe.py::test_recomputed_and_offloaded_copies_give_the_same_bits": (
            "full recompute",
        ),
        "examples/test_transport.py::test_layouts_equal_one_rank": ("tp=2 sp=on cp=2 ep=2 balance=none",),
        "examples/test_update_rule.py::test_a_checkpoint_resumes_on_another_layout": (
            "tp=2 sp=on dp=2 etp=2 zero=on dispatcher=alltoall-dp=4 ep=4 zero=on dispatcher=alltoall",
        ),
        "examples/test_update_rule.py::test_layouts_equal_one_rank": (
            "tp=2 sp=on dp=2 etp=2 zero=on dispatcher=alltoall shared=on",
        ),
        "examples/test_update_rule.py::test_the_dry_run_and_the_emulation_know_the_state": ("muon",),
        "faults/test_launcher.py::test_a_run_whose_rank_is_killed_at_start_is_restarted": ("1",),
        "faults/test_preemption.py::test_a_signal_to_one_rank_ends_both_with_a_checkpoint": ("2",),
        "kernels/test_fp8_kernels.py::test_permuted_casts": ("16",),
        "kernels/test_linear_attention.py::test_triton_kernels_read_and_save_parts_of_one_tensor": ("True-True-2",),
        "kernels/test_linear_attention.py::test_triton_kernels_with_a_decay_per_channel_match_fp64": (
            "(70, 1, 1, 2, 24, 18)-plain-a document per token",
        ),
        "memory/test_cuda_graphs.py::test_captured_modules_acquire_their_weights_before_the_replay": ("False",),
        "memory/test_cuda_graphs.py::test_document_lengths_do_not_change_the_graphs": ("2-whole step",),
        "memory/test_cuda_graphs.py::test_graphs_contain_the_flex_exchange_without_collectives": (
            "whole step-shared overlapped",
        ),
        "memory/test_cuda_graphs.py::test_prediction_layers_repeat_the_forced_balance_of_eager_steps": ("False",),
        "memory/test_graph_combinations.py::test_replays_equal_eager_steps": ("tensor and sequence parallel", "pairs"),
        "memory/test_graph_combinations.py::test_replays_of_one_kind_equal_eager_steps": ("one module per layer",),
        "memory/test_graph_combinations.py::test_replays_of_recorded_ops_equal_eager_steps": ("prediction",),
        "memory/test_low_precision_graphs.py::test_replayed_steps_equal_eager_steps": ("blockwise",),
        "memory/test_low_precision_graphs.py::test_replays_read_stored_weights": ("blockwise-modules",),
        "memory/test_low_precision_graphs.py::test_replays_read_weights_scales_and_seeds_from_fixed_addresses": (
            "mxfp8-modules", "blockwise-modules",
        ),
        "memory/test_published_graphs.py::test_replays_of_published_combinations_equal_eager_steps": (
            "graphs=attn ep pp vpp gathers mtp recompute=moe_act",
        ),
        "memory/test_recompute.py::test_whole_steps_are_identical_to_the_bit": ("full",),
        "memory_emulation/test_agreement.py::test_attention_dropout_saves_values_per_query_key_pair": ("m8-p2p-1",),
        "memory_emulation/test_agreement.py::test_kimi_delta_attention_agrees": ("moe recomputed",),
        "memory_emulation/test_agreement.py::test_low_precision_copies_agree": ("tensorwise",),
        "memory_emulation/test_agreement.py::test_modules_that_save_activations_in_low_precision_agree": (
            "tensorwise-attn_proj",
        ),
        "memory_emulation/test_agreement.py::test_output_layer_in_low_precision_agrees": ("blockwise-False",),
        "memory_emulation/test_agreement.py::test_sharded_layers_of_multi_token_prediction_agree": ("False",),
        "memory_emulation/test_agreement.py::test_weights_stored_in_low_precision_agree": (
            "nvfp4-state in host memory",
        ),
        "memory_emulation/test_agreement.py::test_workspace_of_the_hierarchical_exchange_agrees": ("2",),
        "memory_emulation/test_graphs.py::test_closed_form_and_emulation_agree": ("Et*2|t*2|t*2|t*2L-0-whole step",),
        "memory_emulation/test_graphs.py::test_pools_do_not_grow_with_microbatches": ("layers-Et*2|t*2|t*2|t*2L-4",),
        "memory_emulation/test_rank.py::test_meta_tensors_take_the_memory_of_real_ones": ("one rank", "overlapped"),
        "memory_emulation/test_rank.py::test_peak_is_reached_with_enough_microbatches": (
            "weight gradients of experts together",
        ),
        "memory_emulation/test_sequence_slots.py::test_symmetric_memory_of_context_parallel_rings_agrees": (
            "m8-2-5120",
        ),
        "memory_emulation/test_sequence_slots.py::test_symmetric_memory_of_gathered_keys_agrees": ("m8-2-3072",),
        "memory_emulation/test_sequence_slots.py::test_symmetric_memory_of_overlapped_communication_agrees": (
            "4-gemms1-2048",
        ),
        "memory_emulation/test_sharded.py::test_state_of_other_update_rules_agrees": (
            "adaptive_muon-zero-2", "lion-zero-3",
        ),
        "model/test_compressed_attention.py::test_emulated_memory_agrees_with_the_cost_model": (
            "([4]*4) --csa-dense-mode",
        ),
        "model/test_compressed_attention.py::test_layouts_equal_one_rank": (
            "attention=mla cp=2 pp=2 accumulation=2 balance=none recompute=full cpcomm=allgather-False",
        ),
        "model/test_compressed_attention.py::test_output_and_gradients_equal_the_formulas": (
            "few entries-documents from 0",
        ),
        "model/test_context_parallel_gpt.py::test_context_degree_per_microbatch_equals_one_rank": ("allgather-7-2",),
        "model/test_context_parallel_gpt.py::test_copies_with_several_microbatches_in_flight_equal_one_rank": (
            "attention=mla cp=2 pp=2 vpp=2 accumulation=2 balance=none recompute=full cpcomm=p2p",
        ),
        "model/test_dsa.py::test_emulated_memory_agrees_with_the_cost_model": (
            "--dsa-indexer-loss-coeff 0.1 --recompute-granularity selective --recompute-modules core_attn-1", "more3-2",
        ),
        "model/test_dsa.py::test_layers_that_share_keys_equal_one_rank": (
            "attention=mla cp=2 pp=2 accumulation=2 balance=none recompute=full cpcomm=allgather",
        ),
        "model/test_dsa.py::test_layouts_equal_one_rank": ("cell3-False",),
        "model/test_dsa.py::test_replayed_graphs_equal_eager_steps": ("attention=mla tp=2 sp=on balance=none",),
        "model/test_dsa.py::test_replicated_positions_equal_one_rank": ("True",),
        "model/test_gpt.py::test_gradients_equal_finite_differences": ("moe", "dense"),
        "model/test_tensor_parallel.py::test_a_dense_model_trains_as_on_one_rank": ("mtp-tp4",),
        "moe/test_experts.py::test_gradients_equal_finite_differences": ("fields1-squared_relu", "fields3-geglu"),
        "moe/test_router.py::test_gradients_equal_finite_differences": ("fields0",),
        "moe/test_routing_replay.py::test_given_choices_train_identically_in_every_layout": (
            "cp=2 cpdegree=dynamic documents=packed accumulation=4-all tokens",
        ),
        "moe/test_routing_replay.py::test_graphs_take_the_choices_of_every_step": ("whole step",),
        "optim/test_fsdp.py::test_a_non_finite_step_changes_no_bit_of_shards_and_state": (
            "dp=4 accumulation=2-config1-2",
        ),
        "optim/test_fsdp.py::test_copies_from_peers_replace_all_but_the_first_gather_after_an_update": (
            "recomputed layers-config1-adam",
        ),
        "optim/test_fsdp.py::test_every_gradient_is_reduced_by_copies": ("536870912",),
        "optim/test_fsdp.py::test_graphs_of_whole_steps_gather_and_reduce": (f"{_DP2} attention=mla-config2-2",),
        "optim/test_fsdp.py::test_no_event_passes_the_border_of_a_graph": ("outer",),
        "optim/test_fsdp.py::test_other_update_rules_and_clipped_logits_equal_zero_1": (
            f"lion-{_DP2} ep=2 dispatcher=alltoall accumulation=2-config1-1",
        ),
        "optim/test_sharded.py::test_the_size_of_buckets_changes_no_bit": ("1",),
        "optim/test_sharded_state.py::test_checkpoints_reshard_to_any_layout_without_changing_a_bit": ("bf16",),
        "optim/test_state_formats.py::test_shards_hold_the_same_state_as_one_rank": ("host",),
        "optim/test_unit_shards.py::test_main_gradients_have_the_dtype_of_the_flag_and_the_values_of_zero_1": (
            "auto-zero-3", "fp32-zero-2",
        ),
        "parallel/test_fake.py::test_members_of_a_group_agree_on_it": ("wide experts",),
        "parity/test_echo.py::test_clones_of_busy_experts_equal_one_rank": (
            "ep=4 dp=4 accumulation=2 zero=on overlap=params recompute=moe", "cell2",
        ),
        "parity/test_fused_casts.py::test_fused_casts_equal_separate_ops_in_whole_runs": (
            "dp=2 ep=2 etp=2 tp=2 sp=on dispatcher=allgather recompute=small blockwise hybrid paged_stash",
        ),
        "parity/test_low_precision.py::test_layouts_that_exchange_tokens_in_fp8_equal_one_rank": (
            "dp=2 ep=2 dispatcher=flex overlap=experts accumulation=4",
        ),
        "parity/test_low_precision.py::test_layouts_with_activation_inputs_in_fp8_equal_one_rank": (
            "tp=2 sp=on shared=on",
        ),
        "parity/test_low_precision.py::test_layouts_with_mxfp8_equal_one_rank": ("tp=2 sp=on shared=on",),
        "parity/test_low_precision.py::test_layouts_with_nvfp4_and_given_scales_equal_one_rank": (
            "dp=2 ep=2 etp=2 tp=2 sp=on dispatcher=allgather accumulation=2",
        ),
        "parity/test_low_precision.py::test_layouts_with_plain_weight_gradients_equal_one_rank": (
            "dp=2 ep=2 dispatcher=alltoall zero=params overlap=experts accumulation=4",
        ),
        "parity/test_low_precision.py::test_layouts_with_tensorwise_and_given_scales_equal_one_rank": (
            "tp=2 sp=on shared=on",
        ),
        "parity/test_low_precision.py::test_layouts_with_the_same_tensors_equal_one_rank": (
            "nvfp4-pp=2 accumulation=2 recompute=small",
        ),
        "parity/test_low_precision.py::test_padded_expert_rows_equal_one_rank": (
            "dp=2 ep=2 dispatcher=alltoall loss=token",
        ),
        "parity/test_parity.py::test_ranks_that_are_processes_equal_one_rank": (
            "dp=4 ep=4 dispatcher=hierarchical overlap=experts zero=on accumulation=2",
        ),
        "parity/test_special_plans.py::test_kimi_delta_and_latent_attention_without_positions_equal_one_rank": (
            "pp=2 vpp=2 dp=2 ep=2 dispatcher=alltoall zero=on recompute=small accumulation=2",
        ),
        "parity/test_special_plans.py::test_several_residual_streams_and_hash_layers_equal_one_rank": (
            "dp=2 zero=params mtp=on recompute=full documents=packed",
        ),
        "parity/test_special_plans.py::test_states_passed_between_chunks_equal_one_rank": ("delta",),
        "recipes/test_proxies.py::test_remainders_of_master_weights_train_to_the_bits_of_whole_ones": ("m8",),
        "recipes/test_published.py::test_published_hybrids_start": (
            "Nemotron-3-Ultra, FSDP, H100, bf16, 2/1/2/64, 512/1/8192",
        ),
        "recipes/test_published.py::test_published_layouts_with_sharded_weights_start": (
            "Nemotron-3-Ultra, FSDP, H100, bf16, 2/1/1/64, 256/1/8192",
        ),
        "tools/test_plan.py::test_cluster_options_equal_those_of_a_dry_run": ("--gpus 16",),
        "tools/test_preprocess_data.py::test_an_interrupted_run_leaves_no_files": ("15",),
        "train/test_context_parallel.py::test_context_parallel_steps_equal_one_rank": ("a2a+p2p-gqa-parallel3",),
        "train/test_context_parallel.py::test_packed_documents_equal_one_rank": ("per microbatch-",),
        "train/test_late_weight_gradients.py::test_batched_weight_gradients_equal_immediate_ones": (
            "one expert on every rank",
        ),
        "train/test_logit_clip.py::test_layouts_equal_one_rank": ("cp=2 cpcomm=a2a attention=mla pp=2 accumulation=2",),
        "train/test_low_precision.py::test_casts_fused_into_norms_change_no_bit": ("weight gradients-small modules",),
        "train/test_low_precision.py::test_recomputed_and_stored_activations_give_the_same_bits": (
            "paged stash-nvfp4", "moe-delayed",
        ),
        "train/test_low_precision.py::test_resume_is_bitwise_identical": ("delayed",),
        "train/test_low_precision.py::test_runs_are_reproducible_and_differ_from_runs_without_low_precision": (
            "blockwise",
        ),
        "train/test_low_precision.py::test_state_of_delayed_scaling_is_optional": ("padded-resume",),
        "train/test_low_precision_diagnosis.py::test_diagnosis_and_anomaly_detection_find_nothing_in_a_healthy_step": (
            "blockwise", "delayed",
        ),
        "train/test_overflow.py::test_steps_without_free_pages_on_one_rank_equal_steps_without_a_stash": (
            "bounded rows",
        ),
        "train/test_overlap.py::test_overlapped_schedule_replays_captured_modules": (
            "weights gathered late-pairs-modules6",
        ),
        "train/test_overlap.py::test_schedule_orders_train_the_same_weights": ("tensor parallel-within the backward",),
        "train/test_packing.py::test_packed_steps_of_ranks_equal_steps_of_single_sequences": ("tp",),
        "train/test_pipeline.py::test_data_parallel_pipelines_equal_one_rank": ("reduce at the end",),
        "train/test_pipeline.py::test_pipeline_equals_one_rank": ("tied embeddings",),
        "train/test_resharding.py::test_a_checkpoint_resumes_on_another_layout": (
            "mla, latent: dp=4 zero=on ep=2 dispatcher=alltoall -> tp=2 sp=on dp=2 etp=2 dispatcher=alltoall",
        ),
        "train/test_resume_table.py::test_low_precision_moments_resume_bitwise_and_convert_to_fp32": ("fp16",),
        "train/test_routing_trace.py::test_replays_with_any_layout_equal_one_rank": ("one rank", "sequence parallel"),
        "train/test_stored_weights.py::test_checkpoints_are_those_of_unquantized_weights_and_load_in_any_layout": (
            "nvfp4-bf16",
        ),
        "train/test_stored_weights.py::test_layouts_equal_one_rank_with_unquantized_weights": (
            "dp=2 zero=on overlap=params accumulation=2",
        ),
        "train/test_stored_weights.py::test_overlapped_gathers_and_steps_change_no_bit": ("nvfp4, step-dp2, tp2, ep2",),
        "train/test_stored_weights.py::test_ranks_whose_shards_cut_blocks_store_the_bytes_of_whole_weights": (
            "mxfp8, fp16 masters-dp4, ep2",
        ),
        "train/test_stored_weights.py::test_state_in_host_memory_changes_no_bit": (
            "delayed-None-host-", "nvfp4-None-half streamed, in chunks-",
        ),
        "train/test_trainer.py::test_expert_row_overflow_on_one_rank_stops_updates_of_all_ranks": ("True",),
        "train/test_trainer.py::test_two_ranks_equal_one": ("dropout_and_jitter", "expert_bias_and_sequence_aux_loss"),
    }
)  # fmt: skip
"""Test -> ids of cases that only the nightly run has besides those that `SAMPLED` leaves out: each takes seconds, and
other cases or tests of CI run its code."""


def sample(cases: Sequence[frozenset[Hashable]], n: int) -> set[int]:
    """Indices of one in every n cases, but at least two. A case is the set of its parameters' values.

    Taking every n-th case could select only one value of a parameter. Therefore cases with the most values that are
    not yet covered are selected first, then evenly spaced ones.
    """
    number = max(-(-len(cases) // n), min(len(cases), LEAST))
    order = [place for first in range(n) for place in range(first, len(cases), n)]
    covered: set[Hashable] = set()
    taken: list[int] = []
    while len(taken) < number and (best := max(order, key=lambda place: len(cases[place] - covered))) not in taken:
        taken.append(best)
        covered |= cases[best]
    taken += [place for place in order if place not in taken]
    return set(taken[:number])
