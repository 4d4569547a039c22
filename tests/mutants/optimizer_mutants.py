"""Mutants of Muon, QK-clip and sharded gradients and weights (FSDP)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.mutants.mutants import PARITY, mutant

MUON = "tests/optim/test_muon.py"
STEPS = f"{MUON}::test_steps_follow_the_definition[fp64-False]"
CLIP = "tests/train/test_logit_clip.py"
FSDP = "tests/optim/test_fsdp.py"
SHARDS = "tests/optim/test_unit_shards.py"


def with_muon(method: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    """The method of a `Muon` whose config has other values."""

    def changed(self: Any, *args: Any) -> Any:
        usual, self._config = self._config, replace(self._config, **changes)
        try:
            return method(self, *args)
        finally:
            self._config = usual

    return changed


@mutant(
    "optim.muon:newton_schulz_coefficients",
    f"{MUON}::test_further_iterations_repeat_the_table_or_its_last_entry",
    f"{MUON}::test_singular_values_after_the_iterations",
)
def all_iterations_have_the_first_coefficients(original: Any) -> Any:
    """Singular values do not approach 1."""
    return lambda name, num_steps: original(name, 1) * num_steps


@mutant("optim.muon:newton_schulz", f"{MUON}::test_sharded_matrices_give_the_weights_of_one_rank")
def gram_matrices_of_shards_are_transposed(original: Any) -> Any:
    """The Gram matrix sums over the dim that is not sharded, so that its sum over ranks is of another matrix."""
    return lambda x, coefficients, kernels, *, tall=False, shards=None: original(
        x, coefficients, kernels, tall=tall != (shards is not None), shards=shards
    )


@mutant("optim.muon:newton_schulz", f"{MUON}::test_sharded_matrices_give_the_weights_of_one_rank")
def norms_of_shards_are_not_summed(original: Any) -> Any:
    """Every rank divides by the norm of its shard, so that singular values start above 1."""

    def scaled(x: Any, *args: Any, shards: Any = None, **options: Any) -> Any:
        return original(x * (1 if shards is None else shards.size), *args, **options)

    return scaled


@mutant(
    "optim.muon:update_scale",
    f"{MUON}::test_an_update_has_unit_root_mean_square_norm",
    f"{MUON}::test_scales_depend_on_the_shape_of_the_whole_matrix",
)
def scales_exchange_rows_and_columns(original: Any) -> Any:
    """Updates of matrices with more inputs than outputs are too large."""
    return lambda config, rows, columns: original(config, columns, rows)


@mutant("optim.muon:Muon._scaled", f"{MUON}::test_sharded_matrices_give_the_weights_of_one_rank")
def scales_are_those_of_the_shard(original: Any) -> Any:
    """Updates shrink with tensor parallelism."""
    return with_muon(original, muon_tp_mode="blockwise")


@mutant("optim.muon:Muon._splits", STEPS)
def projections_are_not_split(original: Any) -> Any:
    """q, k and v are orthogonalised as one matrix."""
    return lambda self, param: False


@mutant("optim.param_slices:ParamSlice.split", STEPS)
def projections_are_split_without_regard_to_groups(original: Any) -> Any:
    """q, k and v are taken to be contiguous rows, but every query group has rows of all three."""

    def split(self: Any, matrices: Any) -> Any:
        sizes = [part.shape[-2] for part in original(self, matrices)]
        return list(matrices.split(sizes, dim=-2))

    return split


@mutant("optim.muon:Muon._step", f"{MUON}::test_steps_follow_the_definition[fp64-True]")
def updates_have_no_nesterov_momentum(original: Any) -> Any:
    """--muon-nesterov has no effect."""
    return with_muon(original, muon_nesterov=False)


@mutant("optim.muon:Muon._step", STEPS)
def updates_have_no_momentum(original: Any) -> Any:
    """Every update follows the gradient of one step."""
    return with_muon(original, muon_momentum=0.0)


@mutant(
    "optim.adaptive_muon:AdaptiveMuon.adapt_direction",
    f"{MUON}::test_adaptive_muon_divides_by_the_root_of_a_second_moment",
)
def adaptive_updates_are_those_of_muon(original: Any) -> Any:
    """The second moment has no effect."""

    def direction(self: Any, scalars: Any, operands: Any, param: Any, orthogonal: Any) -> Any:
        original(self, scalars, operands, param, orthogonal)
        return orthogonal

    return direction


@mutant(
    "config.matrix_owners:assign_matrices_to_owners",
    "tests/optim/test_param_layout.py::test_owners_without_a_matrix_in_one_bucket_get_those_of_the_next",
    "tests/optim/test_param_layout.py::test_the_updates_of_whole_matrices_of_all_units_are_divided_evenly",
)
def one_rank_owns_all_matrices(original: Any) -> Any:
    """All other ranks wait for the updates of the first."""

    def first(costs: Any, loads: Any) -> list[int]:
        loads[0] += sum(costs)
        return [0, *[len(costs)] * (len(loads) - 1)]

    return first


@mutant(
    "config.matrix_owners:assign_matrices_to_owners",
    "tests/optim/test_param_layout.py::test_the_updates_of_whole_matrices_of_all_units_are_divided_evenly",
)
def owners_ignore_other_buckets(original: Any) -> Any:
    """The rank with the larger share of one bucket also has the larger share of the next."""

    def first(costs: Any, loads: Any) -> Any:
        own = [0.0] * len(loads)
        found = original(costs, own)
        loads[:] = [load + more for load, more in zip(loads, own, strict=True)]
        return found

    return first


@mutant("train.logit_clip:LogitClip.end_step", f"{CLIP}::test_logits_of_twice_the_threshold_shrink_to_it[mla]")
def logits_shrink_to_twice_the_threshold(original: Any) -> Any:
    """QK-clip begins too late."""

    def end_step(self: Any, *args: Any) -> Any:
        if self._config is not None:
            self._config = replace(self._config, qk_clip_threshold=2 * self._config.qk_clip_threshold)
        return original(self, *args)

    return end_step


@mutant("train.logit_clip:all_reduce_", f"{CLIP}::test_layouts_equal_one_rank[dp=2 cp=2 cpcomm=allgather sinks=on]")
def logits_of_other_ranks_are_ignored(original: Any) -> Any:
    """Replicas scale their weights differently."""
    return lambda tensor, *args: tensor


@mutant("model.attention:Attention.logit_factors", f"{CLIP}::test_every_row_of_a_query_group_has_its_factor")
def queries_and_keys_have_equal_factors(original: Any) -> Any:
    """--qk-clip-alpha has no effect."""
    return lambda self, eta_N, alpha: original(self, eta_N, 0.5)


@mutant("model.attention:Attention.logit_factors", f"{CLIP}::test_logits_of_twice_the_threshold_shrink_to_it[gqa]")
def factors_of_queries_and_keys_are_multiplied_twice(original: Any) -> Any:
    """q and k both get the whole factor, so that logits shrink by its square."""
    return lambda self, eta_N, alpha: original(self, eta_N**2, alpha)


@mutant("model.attention:Attention.logit_factors", f"{CLIP}::test_every_row_of_a_query_group_has_its_factor")
def a_group_has_the_factor_of_its_first_head(original: Any) -> Any:
    """The logits of other heads of the group remain above the threshold."""

    def factors(self: Any, eta_N: Any, alpha: float) -> Any:
        first = eta_N.view(self.num_groups, -1)[:, :1]
        return original(self, first.expand(-1, self.heads_per_group).flatten(), alpha)

    return factors


MLA_ROWS = f"{CLIP}::test_the_rotated_part_of_latent_attention_gets_the_whole_factor_in_q[None]"


@mutant("model.mla:MLA.logit_factors", MLA_ROWS)
def heads_have_the_factors_of_other_heads(original: Any) -> Any:
    """Heads with small logits are scaled, and those with large logits are not."""
    return lambda self, eta_N, alpha: original(self, eta_N.flip(0), alpha)


@mutant("model.mla:MLA.logit_factors", MLA_ROWS)
def the_rotated_part_of_q_has_a_part_of_the_factor(original: Any) -> Any:
    """The rotated key is not scaled, so that logits stay above the threshold."""

    def factors(self: Any, eta_N: Any, alpha: float) -> Any:
        (of_q, rows), *rest = original(self, eta_N, alpha)
        return [(of_q, rows.view(len(eta_N), -1)[:, :1].expand(-1, len(rows) // len(eta_N)).flatten()), *rest]

    return factors


IN_ORDER = f"{FSDP}::test_weights_of_two_layers_are_gathered_in_the_order_of_their_use"


@mutant("optim.unit_store:GatheringStore.acquire", f"{FSDP}::test_updates_of_units_overlap_with_the_next_forward")
def weights_are_released_before_their_use(original: Any) -> Any:
    """Layers read the weights of another unit."""

    def acquire(self: Any, unit: str, direction: str = "forward") -> None:
        original(self, unit, direction)
        found = self._sharded_units.get(unit)
        if found is not None and found.memory is not None:
            found.memory.free()
            found.memory.allocate()

    return acquire


@mutant("optim.unit_store:GatheringStore.publish", IN_ORDER)
def gathered_weights_survive_an_update(original: Any) -> Any:
    """The next forward reads the weights before the update."""
    return lambda self, bucket, streams=None: None


@mutant("optim.unit_store:GatheringStore._gather_into", IN_ORDER)
def units_are_gathered_only_once(original: Any) -> Any:
    """Layers compute with the weights of the layer that used their memory before."""

    def gather(self: Any, buffers: Any, flats: Any) -> None:
        if not getattr(buffers[0], "was_gathered", False):
            original(self, buffers, flats)
        buffers[0].was_gathered = True

    return gather


@mutant(
    "optim.unit_shards:UnitReducer._reduce_by_collective",
    f"{SHARDS}::test_tiny_parameters_and_empty_shards_are_reduced[adam-zero-3]",
)
def gradients_of_units_are_not_reduced(original: Any) -> Any:
    """Every shard is updated with the gradient of its owner's tokens."""
    return lambda self, buffers: [buffer.store_grads() for buffer in buffers] and None


@mutant("optim.unit_shards:start_all_reduce_", f"{PARITY}[dp=4 zero=replicas]")
def replicas_of_shards_are_not_summed(original: Any) -> Any:
    """Replicas of the weights drift apart."""

    class Done:
        wait = staticmethod(lambda: None)

    return lambda *args, **options: Done()


@mutant(
    "optim.unit_shards:UnitBuffer.store_grads",
    f"{SHARDS}::test_tiny_parameters_and_empty_shards_are_reduced[adam-zero-3]",
)
def shards_begin_at_the_first_element(original: Any) -> Any:
    """All ranks add the gradients of the first shard."""

    def store(self: Any) -> None:
        part = self.grads[: len(self.grad_shard)]
        self.grad_shard.add_(part) if self.is_stored else self.grad_shard.copy_(part)

    return store


@mutant(
    "optim.unit_shards:UnitBuffer.owned_grads",
    f"{SHARDS}::test_tiny_parameters_and_empty_shards_are_reduced[muon-zero-3]",
)
def gradients_have_the_offsets_of_the_unit(original: Any) -> Any:
    """A matrix is updated with the gradient of another one."""
    return lambda self, start, end: self.grad_shard[: end - start]


@mutant(
    "optim.unit_shards:UnitBuffer.store_grads",
    f"{SHARDS}::test_tiny_parameters_and_empty_shards_are_reduced[adam-zero-3]",
)
def the_last_microbatch_replaces_earlier_gradients(original: Any) -> Any:
    """Gradients of all but one microbatch are lost."""

    def store(self: Any) -> None:
        self.is_stored = False
        original(self)

    return store


@mutant("optim.unit_shards:UnitReducer._reduce_by_collective", f"{PARITY}[dp=2 zero=params]")
def gradients_are_averaged_over_the_ranks_of_a_shard(original: Any) -> Any:
    """Gradients are divided by the number of ranks twice."""

    def reduce(self: Any, buffers: Any) -> None:
        for buffer in buffers:
            buffer.grads.div_(buffer.group.size)
        original(self, buffers)

    return reduce


@mutant(
    "optim.unit_shards:UnitBuffer.__init__", f"{SHARDS}::test_gradients_sent_in_bf16_are_accumulated_in_fp32[zero-3]"
)
def gradients_are_accumulated_in_the_dtype_of_their_reduction(original: Any) -> Any:
    """Sums over microbatches lose bits, and --megatron-fsdp-main-grads-dtype has no effect."""

    def init(
        self: Any, layout: Any, grad_dtype: Any, context: Any, config: Any, weights: Any, grads: Any, *more: Any
    ) -> None:
        original(self, layout, grads[1].dtype, context, config, weights, grads, *more)

    return init
