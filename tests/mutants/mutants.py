"""Mutants: replacements of a function or method by one with a semantic error, and the tests that must fail then.

The docstring of a mutant describes the consequence of its error.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from sys import modules
from typing import Any

import torch

from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.parallel.collectives import all_reduce_

Replacement = Callable[[Any], Any]

PARITY = "tests/parity/test_parity.py::test_one_feature_equals_one_rank"
NORMS = "tests/optim/test_norms_over_ranks.py::test_norms_in_every_fold_of_four_ranks_are_those_of_one"


@dataclass(frozen=True)
class Mutant:
    """Replacement of one function or method by a version with a semantic error."""

    name: str
    target: str
    """Target as `module:qualified.name`, relative to the package megatron_moe."""
    replacement: Replacement
    """Function that takes the original function and returns the wrong one."""
    tests: tuple[str, ...]
    """Arguments of pytest: the shortest selection that must fail."""
    reason: str

    def owner(self) -> tuple[Any, str]:
        """Returns the module or class of the target and its attribute name. Raises AttributeError or ImportError."""
        module, _, path = self.target.partition(":")
        found: Any = import_module(f"megatron_moe.{module}")
        *classes, name = path.split(".")
        for each in classes:
            found = getattr(found, each)
        getattr(found, name)
        return found, name

    def apply(self) -> None:
        """Replaces the target, and its imports by name if the target module defines it."""
        owner, name = self.owner()
        original = getattr(owner, name)
        wrong = self.replacement(original)
        setattr(owner, name, wrong)
        if getattr(owner, "__name__", "") != original.__module__:
            return
        for module in list(modules.values()):
            if getattr(module, "__name__", "").startswith("megatron_moe") and getattr(module, name, None) is original:
                setattr(module, name, wrong)


MUTANTS: dict[str, Mutant] = {}


def mutant(target: str, *tests: str) -> Callable[[Replacement], Replacement]:
    """Registers the decorated replacement as a mutant with the name of the function, whose docstring is the reason."""

    def register(replacement: Replacement) -> Replacement:
        name = replacement.__name__
        MUTANTS[name] = Mutant(name, target, replacement, tests, replacement.__doc__ or "")
        return replacement

    return register


def nothing(*args: Any, **kwargs: Any) -> None:
    """Replacement of a function that has no effect."""


@mutant("optim.grad_buffers:_is_first_owner", NORMS)
def norm_counts_replicated_parameters_per_tp_rank(original: Any) -> Any:
    """Gradient clipping depends on the layout."""
    return lambda key, context, *, sharded: original(replace(key, replicated=False), context, sharded=sharded)


@mutant("optim.grad_buffers:replica_group_name", NORMS)
def norm_misses_experts_of_other_ranks(original: Any) -> Any:
    """The norm is too small, so clipping is too weak. In an upstream report, it was 11.51 instead of 12.28."""
    return lambda grid: "dp_cp"


@mutant("train.trainer:clip_coefficient", "tests/train/test_trainer.py::test_gradients_are_clipped_by_the_global_norm")
def gradients_are_not_clipped(original: Any) -> Any:
    """A single bad batch moves the weights without bound."""
    return lambda norm, limit: torch.ones_like(norm)


@mutant("optim.grad_buffers:_sum_parts", f"{PARITY}[tp=2 sp=on]", f"{PARITY}[pp=2 accumulation=4 head=tied]")
def partial_gradients_are_not_summed(original: Any) -> Any:
    """Copies of norms, routers and tied embeddings drift apart."""
    return nothing


@mutant("train.trainer:all_reduce_", f"{PARITY}[dp=2 loss=token]")
def per_token_loss_counts_local_tokens(original: Any) -> Any:
    """Gradients are dp times too large."""
    return lambda tensor, group, *args: tensor if group.name == "dp_cp" else original(tensor, group, *args)


@mutant("moe.router:Router._losses", f"{PARITY}[dp=2 balance=global]")
def balancing_loss_shrinks_with_data_parallelism(original: Any) -> Any:
    """The effect of the balancing loss decreases with the number of data-parallel ranks, as reported upstream."""
    return lambda self, *args: [
        (loss, value / self.ctx.group("dp").size, coeff) for loss, value, coeff in original(self, *args)
    ]


@mutant("moe.router:Router._count", "tests/moe/test_balancing.py::test_bias_is_updated_once_per_global_batch")
def expert_bias_sees_the_last_microbatch(original: Any) -> Any:
    """The expert bias follows the noise of single microbatches."""

    def count(self: Any, *args: Any) -> None:
        if self.expert_bias is not None:
            self.tokens_since_update.zero_()
        original(self, *args)

    return count


@mutant("moe.balancing:all_reduce_", f"{PARITY}[dp=2 balance=bias]")
def expert_bias_sees_local_tokens(original: Any) -> Any:
    """Replicas of the router select different experts."""
    return lambda tensor, *args: tensor


@mutant("moe.router:Router._attach_losses", f"{PARITY}[dp=2 accumulation=4]")
def aux_losses_are_not_scaled_by_microbatches(original: Any) -> Any:
    """The weight of auxiliary losses grows with gradient accumulation."""
    return lambda self, routing, made, meta: original(self, routing, made, replace(meta, aux_scale=1.0))


@mutant("moe.balancing:BalancingLosses._whole_counts", f"{PARITY}[tp=2 sp=on balance=seq]")
def sequence_loss_sees_the_local_part(original: Any) -> Any:
    """Each rank balances the load of its own positions instead of whole sequences."""
    return lambda self: self._counts_GE


@mutant("moe.token_dispatcher.alltoall:index_rows", f"{PARITY}[dp=2 ep=2 dispatcher=alltoall]")
def dispatched_probabilities_have_no_gradient(original: Any) -> Any:
    """The router learns from the balancing loss alone."""

    def index(*args: Any) -> Any:
        rows, probs = original(*args)
        return rows, probs.detach()

    return index


@mutant(
    "moe.token_dispatcher.alltoall:_arrival_order",
    "tests/moe/parallel/test_dispatch_over_ranks.py::test_combine_undoes_dispatch_forward_and_backward",
)
def received_rows_are_in_reverse_order(original: Any) -> Any:
    """Tokens reach the wrong experts."""
    return lambda ctx: original(ctx)[::-1]


@mutant("moe.token_dispatcher.allgather:AllGatherDispatcher.__init__", f"{PARITY}[dp=2 ep=2 dispatcher=allgather]")
def every_rank_holds_the_first_experts(original: Any) -> Any:
    """Half of the experts never receive tokens."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.first = 0

    return init


@mutant(
    "moe.token_dispatcher.hierarchical:_ExchangeStage.send_back",
    "tests/moe/parallel/test_dispatch_over_ranks.py::"
    "test_partial_sums_are_added_in_fp32_and_sent_in_bf16_once_per_host",
)
def partial_sums_of_ranks_are_added_in_bf16(original: Any) -> Any:
    """Every addition is rounded to bf16."""

    def send_back(self: Any, sums: torch.Tensor) -> Callable[[], torch.Tensor]:
        wait, totals = self.over.transposed.launch(sums), sums.new_zeros(len(self.index.rows_TK), sums.shape[1])

        def finish() -> torch.Tensor:
            for token, row in zip(self.index.token_R.tolist(), wait(), strict=True):
                totals[token] += row
            return totals

        return finish

    return send_back


@mutant(
    "moe.token_dispatcher.hierarchical:HierarchicalTransport.start_send_sums",
    f"{PARITY}[dp=4 ep=4 dispatcher=hierarchical]",
)
def probabilities_have_no_gradient_between_hosts(original: Any) -> Any:
    """The router learns from the balancing loss alone."""

    def start_send_sums(self: Any, rows: Any, exchange: Any, grad: torch.Tensor | None) -> Any:
        return original(self, rows, exchange, None if grad is None else torch.zeros_like(grad))

    return start_send_sums


@mutant("moe.experts:GroupedLinear.__init__", "tests/moe/parallel/test_layer_over_ranks.py")
def every_etp_rank_adds_the_bias(original: Any) -> Any:
    """The bias is added etp times."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._bias_is_here = True

    return init


@mutant("moe.routing_methods:within_capacity", "tests/moe/test_capacity.py")
def capacity_drops_by_position(original: Any) -> Any:
    """Tokens at the end of sequences are dropped more often."""
    return lambda ids, probs, counts, capacity, policy: original(ids, probs, counts, capacity, "position")


@mutant("data.batch:split_sequence", "tests/data/test_batch.py")
def labels_of_a_split_sequence_are_shifted(original: Any) -> Any:
    """The model learns to predict a token that is not the next one."""

    def split(batch: Any, context: Any) -> Any:
        part = original(batch, context)
        return part if part is batch else replace(part, labels_BS=part.labels_BS.roll(1, dims=1))

    return split


@mutant("model.mtp:shift_left", "tests/model/test_mtp.py::test_shift_moves_every_document_left_by_one_position")
def mtp_predicts_across_documents(original: Any) -> Any:
    """The last tokens of a packed document predict the first tokens of the next one."""
    return lambda x_BS, segments_BS, fill=0: original(x_BS, None, fill)


@mutant("optim.grad_reduce:GradReducer._complete", "tests/optim/test_grad_reduce.py")
def bucket_is_reduced_after_one_microbatch(original: Any) -> Any:
    """Gradients of later microbatches are not reduced."""
    return lambda self, bucket: bucket.num_arrived == bucket.per_microbatch


@mutant("optim.grad_buffers:MainGrad.begin_step", "tests/optim/test_grad_buffers.py")
def gradients_of_the_last_step_are_kept(original: Any) -> Any:
    """Gradients of earlier steps act like momentum."""

    def begin(self: Any, *args: Any) -> None:
        filled = self.filled
        original(self, *args)
        self.filled = filled

    return begin


@mutant("parallel.parameter:BatchedWeightGrad.merged_with", "tests/train/test_late_weight_gradients.py")
def only_the_last_deferred_weight_gradient_counts(original: Any) -> Any:
    """Expert gradients of earlier microbatches in a batched GEMM are lost."""
    return lambda self, later: later


@mutant("optim.param_layout:has_weight_decay", "tests/optim/test_distributed_optimizer.py")
def norms_and_biases_decay(original: Any) -> Any:
    """Training is slightly worse, and no message indicates it."""
    return lambda parameter, *, decay_qk_norm: True


@mutant(
    "train.trainer:Trainer._accept",
    "tests/train/test_trainer.py::test_infinite_gradient_of_a_finite_loss_is_not_applied",
)
def an_infinite_gradient_is_applied(original: Any) -> Any:
    """One infinite gradient corrupts the weights, and the next checkpoint contains them."""
    return lambda self, loss, norm, overflow: original(self, loss, torch.zeros_like(norm), overflow)


@mutant(
    "data.loader:TrainLoader.restore",
    "tests/data/test_loader.py::test_resuming_after_any_step_continues_the_same_order",
)
def a_resumed_run_repeats_a_sample(original: Any) -> Any:
    """The data order depends on the number of interruptions."""
    return lambda self, consumed: original(self, max(consumed - 1, 0))


@mutant("checkpoint.load:tensor_mismatches", "tests/checkpoint/test_load.py")
def missing_tensors_keep_random_values(original: Any) -> Any:
    """Tensors that the checkpoint lacks remain random, without an error."""
    return lambda *args: [line for line in original(*args) if not line.startswith("missing")]


@mutant(
    "checkpoint.async_save:HostBuffer._copy_all",
    "tests/checkpoint/test_async_save.py::test_files_equal_those_of_a_synchronous_save_although_tensors_change",
)
def a_background_save_reads_live_weights(original: Any) -> Any:
    """The checkpoint contains weights of different iterations, with valid checksums."""
    return lambda self, sources: (source.detach() for source in sources)


@mutant("train.checkpointing:Checkpointing._wait_for_pending", "tests/train/test_resume_table.py")
def a_pending_save_is_not_completed(original: Any) -> Any:
    """A checkpoint that is being written at the end of the run is lost."""
    return nothing


@mutant("resilience.replica_check:differing_replicas", "tests/resilience/test_replica_check.py")
def replica_differences_are_not_reported(original: Any) -> Any:
    """Silent data corruption is not reported."""

    @wraps(original)
    def none(*args: Any) -> list[str]:
        return []

    return none


STORED = "tests/train/test_stored_weights.py::test_ranks_whose_shards_cut_blocks_store_the_bytes_of_whole_weights"


@mutant("optim.stored_weights:all_reduce_", STORED)
def owners_quantise_stored_weights_with_scales_of_their_shards(original: Any) -> Any:
    """The gathered bytes of a block were quantised with different scales."""
    return lambda tensor, *args: tensor


@mutant("optim.stored_weights:weight_scales", STORED)
def matrices_stored_in_fp4_have_the_factor_of_their_first_block(original: Any) -> Any:
    """The scales of blocks with larger values saturate."""
    return lambda amax: (*original(amax)[:2], original(amax[..., :1, :1])[2])


@mutant(
    "optim.state:OptimizerState.masters", "tests/train/test_stored_weights.py::test_state_in_host_memory_changes_no_bit"
)
def stored_weights_lack_the_part_in_host_memory(original: Any) -> Any:
    """Weights whose master weights are in host memory stay zero."""
    return lambda self, *args: original(self, *args) if self.placement == "device" else iter(())


@mutant(
    "optim.distributed_optimizer:Optimizer.step",
    "tests/train/test_low_precision.py::test_an_evaluation_quantises_the_weights_of_the_last_step",
)
def an_evaluation_uses_earlier_quantised_weights(original: Any) -> Any:
    """Validation uses the weights before the last step."""

    def step(self: Any, **arguments: Any) -> None:
        on_new_weights, self.on_new_weights = self.on_new_weights, nothing
        original(self, **arguments)
        self.on_new_weights = on_new_weights

    return step


@mutant(
    "train.step_results:largest_overflows",
    "tests/moe/parallel/test_gather_in_fc1.py::test_overflow_on_one_pipeline_stage_is_visible_on_all_stages",
)
def an_overflow_is_unknown_to_other_pipeline_stages(original: Any) -> Any:
    """One stage repeats the step, and the others wait forever for its tensors."""
    return lambda context, comm, _: {"overflow": all_reduce_(comm.overflow.clone(), context.group("dp_cp"), "max")}


@mutant(
    "train.trainer:Trainer.prepare_repetition", "tests/train/test_overflow.py::test_metrics_of_void_steps_are_dropped"
)
def metrics_of_void_steps_are_kept(original: Any) -> Any:
    """Balancing metrics count the tokens of a repeated step twice."""

    def prepare_repetition(self: Any, *args: Any) -> Any:
        metrics, self.metrics = self.metrics, MetricAccumulator()
        steps = original(self, *args)
        self.metrics = metrics
        return steps

    return prepare_repetition


@mutant(
    "layers.node_chain:_acquiring",
    "tests/optim/test_gather_in_forward.py::test_every_reader_of_a_weight_waits_for_its_gather[recomputed-moe]",
)
def recomputed_nodes_do_not_acquire_their_parameters(original: Any) -> Any:
    """Recomputed experts read weights that are still being gathered."""
    return lambda node, store: node if node.acquiring else original(node, store)


@mutant(
    "train.train_state:TrainState.last_iteration",
    "tests/train/test_exit_conditions.py::test_skipped_iterations_count_towards_train_samples",
)
def train_samples_exclude_skipped_samples(original: Any) -> Any:
    """A run that skips a batch reads more than --train-samples samples."""
    return lambda self, config: original(replace(self, consumed_samples=self.trained_samples), config)


@mutant(
    "precision.carried_copies:carried_copy",
    "tests/kernels/test_quantized_gemms.py::test_layers_with_the_same_input_share_its_copy",
)
def a_modified_input_keeps_its_quantised_copy(original: Any) -> Any:
    """A layer computes with the values before an in-place operation."""
    return lambda x, fmt, columnwise: getattr(x, "_copy", None)


ENTRIES = "tests/model/test_compressed_attention.py::test_output_and_gradients_equal_the_formulas"


@mutant("model.token_groups:TokenGroups.visible", f"{ENTRIES}[heavy-sequences]")
def queries_see_entries_of_their_unfinished_group(original: Any) -> Any:
    """A query attends to an entry that contains later tokens."""
    return lambda self, positions_C: original(self, positions_C + 1)


@mutant("model.token_groups:TokenGroups.tokens_of_preceding_groups", f"{ENTRIES}[few entries-sequences]")
def entries_do_not_overlap(original: Any) -> Any:
    """An entry counts its own group twice instead of the group before it."""
    return lambda self, x_SBC: self.tokens(x_SBC)


@mutant("model.query_rotation:grouped_output", f"{ENTRIES}[window-sequences]")
def outputs_keep_the_rotation_of_their_keys(original: Any) -> Any:
    """The output depends on absolute positions."""

    def unrotated(context_SBND: Any, weight: Any, rotation: Any, groups: int) -> Any:
        still = replace(rotation, cos_SBD=torch.ones_like(rotation.cos_SBD), sin_SBD=0 * rotation.sin_SBD)
        return original(context_SBND, weight, still, groups)

    return unrotated


@mutant("model.entry_choice:AttentionTarget.probabilities", f"{ENTRIES}[few entries-sequences]")
def targets_of_indexers_exclude_the_window(original: Any) -> Any:
    """Heads that mostly attend to the window have as much weight as heads that attend to entries."""
    return lambda self, rows: original(replace(self, lse_UBN=self.lse_UBN - 1e4), rows)
