"""Splits the cases of large parametrised tests between CI and the nightly run."""

from collections.abc import Hashable, Sequence

SAMPLED = {
    "arguments/test_checks.py::test_a_similar_command_line_is_legal": 3,
    "arguments/test_dry_run.py::test_the_totals_of_a_recipe_equal_the_golden_table": 4,
    "arguments/test_export.py::test_a_plan_is_equal_after_export_in_every_format": 4,
    "arguments/test_read.py::test_a_plan_is_the_same_when_its_run_yaml_is_read_back": 4,
    "benchmarks/test_bench_step.py": 8,
    "benchmarks/test_count_kernels.py": 2,
    "benchmarks/test_timed_run.py": 2,
    "checkpoint/test_convert.py": 6,
    "checkpoint/test_huggingface.py": 6,
    "checkpoint/test_huggingface_parity.py::test_a_generated_config_has_the_logits_of_the_published_one": 3,
    "checkpoint/test_huggingface_parity.py::test_logits_and_gradients_equal_those_of_transformers": 2,
    "end_to_end/test_entry_point.py::test_train_samples_end_with_the_last_whole_batch": 3,
    "examples/test_components.py::test_layouts_equal_one_rank": 3,
    "examples/test_functions.py::test_layouts_equal_one_rank": 3,
    "examples/test_quantization_recipe.py::test_layouts_equal_one_rank": 3,
    "examples/test_transport.py::test_layouts_equal_one_rank": 3,
    "examples/test_update_rule.py": 4,
    "kernels/test_attention_blocks.py": 4,
    "kernels/test_backends.py": 11,
    "kernels/test_cudnn_attention.py": 4,
    "kernels/test_fp8_kernels.py": 5,
    "kernels/test_linear_attention.py": 5,
    "kernels/test_matrix_ops.py": 3,
    "kernels/test_pages.py": 3,
    "kernels/test_push.py": 4,
    "kernels/test_sparse_attention.py": 2,
    "kernels/test_triton_kernels.py": 5,
    "kernels/test_triton_packed.py": 4,
    "kernels/test_triton_routing.py": 5,
    "memory/test_activation_offload.py": 3,
    "memory/test_cuda_graphs.py": 3,
    "memory/test_graph_combinations.py": 3,
    "memory/test_low_precision_graphs.py": 5,
    "memory/test_recompute.py": 6,
    "memory_emulation/test_agreement.py": 5,
    "memory_emulation/test_graphs.py": 2,
    "memory_emulation/test_rank.py": 2,
    "memory_emulation/test_sharded.py": 4,
    "model/test_compressed_attention.py::test_emulated_memory_agrees_with_the_cost_model": 2,
    "model/test_compressed_attention.py::test_layouts_equal_one_rank": 2,
    "model/test_context_parallel.py": 4,
    "model/test_context_parallel_gpt.py": 4,
    "model/test_dsa.py": 2,
    "model/test_linear_attention_mixers.py": 3,
    "model/test_mtp.py": 2,
    "model/test_tensor_parallel.py": 4,
    "moe/parallel/test_balance_over_ranks.py": 4,
    "moe/parallel/test_dispatch_over_ranks.py": 13,
    "moe/parallel/test_fp8_exchange.py": 7,
    "moe/parallel/test_layer_over_ranks.py": 4,
    "moe/test_against_loop.py": 7,
    "moe/test_routing_replay.py": 3,
    "optim/test_fsdp.py": 2,
    "optim/test_grad_reduce.py": 3,
    "optim/test_lion.py": 3,
    "optim/test_muon.py": 2,
    "optim/test_norms_over_ranks.py": 6,
    "optim/test_sharded.py": 2,
    "optim/test_state_formats.py": 5,
    "optim/test_unit_shards.py": 2,
    "parallel/test_fake.py": 2,
    "parity/test_fused_casts.py": 3,
    "parity/test_low_precision.py": 5,
    "pipeline/test_simulator.py": 3,
    "precision/test_optimizer_state.py": 4,
    "precision/test_stored_weight.py": 3,
    "recipes/test_recipes.py::test_a_recipe_survives_a_yaml_round_trip": 4,
    "recipes/test_recipes.py::test_a_supported_recipe_is_accepted_on_its_ranks": 3,
    "recipes/test_recipes.py::test_all_ranks_agree_on_groups_that_cover_the_world_once": 4,
    "tools/test_import_megatron.py::test_weights_are_megatrons_and_give_its_logits": 2,
    "tools/test_plan.py::test_cluster_options_equal_those_of_a_dry_run": 2,
    "train/test_context_parallel.py": 2,
    "train/test_hf_export.py": 4,
    "train/test_late_weight_gradients.py": 4,
    "train/test_logit_clip.py::test_layouts_equal_one_rank": 2,
    "train/test_loss_scale.py": 2,
    "train/test_low_precision.py": 5,
    "train/test_low_precision_diagnosis.py": 2,
    "train/test_overflow.py": 2,
    "train/test_overlap.py": 4,
    "train/test_packing.py": 3,
    "train/test_pipeline.py": 3,
    "train/test_resharding.py": 3,
    "train/test_routing_trace.py": 2,
    "train/test_stored_weights.py": 6,
}
"""Files, or tests as FILE::NAME, with many cases -> n: CI runs one of n cases of each test, but at least two, and the
nightly run all cases."""
LEAST = 2


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
