"""Oracle of the layout check: a single-rank run whose results a layout with several ranks must reproduce.

Most results of a microbatch do not depend on the layout. There are two exceptions. Capacity limits, Sinkhorn and expert
choice are applied per rank: the oracle's routers apply them separately to each rank's tokens of a microbatch. The
global balancing loss uses the token counts of all data-parallel ranks: the oracle obtains them in an additional forward
pass.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.build import build_packer
from megatron_moe.config.memory import MemoryConfig
from megatron_moe.config.model import with_experts
from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.parallel import ParallelConfig, ProcessInfo
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.data.batch import MicroBatch, context_degree
from megatron_moe.data.datasets import Datasets
from megatron_moe.kernels.kernel_set import KernelSet
from megatron_moe.kernels.ops import RoutedTokens
from megatron_moe.layout_check.record import BeforeStep, RankRecord, record_run
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe.router import ExpertSelection, Router
from megatron_moe.moe.token_dispatcher.base import Routing
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import split_positions
from megatron_moe.parallel.rng import Key, RNGKey
from megatron_moe.train.trainer import Trainer


def record_oracle(
    plan: RunPlan, context: ParallelContext, kernels: KernelSet, datasets: Datasets, *, num_steps: int
) -> RankRecord:
    """Trains `num_steps` steps on a single rank, with the token partition of the layout `plan`. Returns the results."""
    return record_run(
        oracle_plan(plan),
        context,
        kernels,
        datasets,
        num_steps=num_steps,
        prepare=lambda trainer: configure_routers_for_layout(trainer, plan),
        packer=build_packer(plan),
    )


def oracle_plan(plan: RunPlan) -> RunPlan:
    """Single-rank plan whose steps process the microbatches of all data-parallel ranks in order."""
    return replace(
        plan,
        model=with_experts(plan.model, lambda moe: replace(moe, dispatcher="local", shared_overlap=False)),
        parallel=ParallelConfig(),
        pipeline=PipelineConfig(),
        memory=MemoryConfig(),
        optimizer=replace(plan.optimizer, offload=OptimizerOffloadConfig()),
        process=ProcessInfo(),
        device="cpu",
    )


def configure_routers_for_layout(trainer: Trainer, plan: RunPlan) -> BeforeStep | None:
    """Configures the oracle's routers to apply capacity limits, Sinkhorn and expert choice separately to the tokens of
    each rank of the layout `plan`. Returns a callback to run before every step, or None if none is needed."""
    by_rank = [router for router in trainer.routers if router.capacity is not None or _chooses_by_rank(router)]
    partition = _Partition(plan)
    if by_rank and plan.parallel.max_seqlen_per_dp_cp_rank is not None:
        trainer.model.register_forward_pre_hook(partition.adopt_degree)
    for router in by_rank:
        router.selection = _SelectionByRank(router, partition)
    if plan.parallel.dp > 1 and any("global_aux_loss" in router.config.balancing for router in trainer.routers):
        return partial(_count_ahead, trainer, plan.parallel.dp)
    return None


def _count_ahead(trainer: Trainer, dp: int, batches: Sequence[MicroBatch], iteration: int) -> None:
    """Runs an additional forward over all microbatches of a step and stores the number of choices per expert in
    `Router.counts_for_recompute`. The step's forward reads the counts for the global balancing loss from there."""
    with torch.no_grad():
        for batch in trainer.prepare_microbatches(batches, iteration):
            trainer.model(replace(batch, context=replace(batch.context, metrics=MetricAccumulator())))
    for router in trainer.routers:
        _count_together(router.counts_for_recompute, dp)


def _count_together(counts_for_recompute: dict[RNGKey | None, Tensor], dp: int) -> None:
    """Replaces the running sum of token counts after each microbatch by the sum after its group of `dp`
    microbatches, which data-parallel ranks route at the same time. Keys identify microbatch and MTP depth."""

    def microbatch_group_of(key: RNGKey | None) -> tuple[int, Key]:
        assert key is not None, "the microbatch has no RNG key"
        return key.microbatch // dp, key.scope

    of_groups: dict[tuple[int, Key], Tensor] = {}
    before: Tensor | int = 0
    for key, counts_E in counts_for_recompute.items():
        of_groups[microbatch_group_of(key)] = of_groups.get(microbatch_group_of(key), 0) + (counts_E - before)
        before = counts_E
    sums = dict(zip(of_groups, accumulate(of_groups.values()), strict=True))
    counts_for_recompute.update({key: sums[microbatch_group_of(key)] for key in counts_for_recompute})


def _chooses_by_rank(router: Router) -> bool:
    return not {"sinkhorn", "expert_choice"}.isdisjoint(router.config.balancing)


class _Partition:
    """Partition of the tokens of an oracle microbatch over the ranks of the layout."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self.parts = self._over(plan.parallel.cp)
        """Token indices of each rank, int64, in the order in which that rank stores its tokens."""

    def adopt_degree(self, model: nn.Module, arguments: tuple[MicroBatch, ...]) -> None:
        """Forward pre-hook: adapts `parts` to the context-parallel degree of the microbatch, which its documents
        determine."""
        self.parts = self._over(context_degree(arguments[0], self._plan.parallel))

    def _over(self, degree: int) -> list[Tensor]:
        """Computes the token indices of each rank if every sequence is split over `degree` context-parallel ranks."""
        num_sequences = self._plan.batch.micro_batch_size
        sequences = torch.arange(num_sequences).chunk(self._plan.parallel.cp // degree)
        shares = _position_parts(self._plan.parallel, self._plan.data.seq_length, degree)
        # token index t = s * B + b
        return [(share[:, None] * num_sequences + group).flatten() for share in shares for group in sequences]


def _position_parts(config: ParallelConfig, num_positions: int, degree: int) -> list[Tensor]:
    """Sequence positions of each rank, in storage order: `degree` tensors (`degree` * tp with sequence parallelism)."""
    shares = split_positions(config.cp_split, num_positions, degree)
    held = [torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]) for chunks in shares]
    return [part for share in held for part in share.chunk(config.tp if config.sequence_parallel else 1)]


class _SelectionByRank(ExpertSelection):
    """Applies a router's selection and capacity limit separately to the tokens of every rank."""

    def __init__(self, router: Router, partition: _Partition) -> None:
        super().__init__(router.config, router.capacity, router.kernels)
        self._partition = partition
        self._selects_by_rank = _chooses_by_rank(router)

    def select_by_token(
        self,
        logits_TE: Tensor,
        valid_T: Tensor | None,
        forced_ids_TK: Tensor | None,
        *state: Tensor | None,
        **options: Any,
    ) -> RoutedTokens:
        """See `ExpertSelection.select_by_token`."""
        if not self._selects_by_rank:
            return super().select_by_token(logits_TE, valid_T, forced_ids_TK, *state, **options)
        chosen = []
        for part in self._partition.parts:
            valid, given = (None if each is None else each[part] for each in (valid_T, forced_ids_TK))
            chosen.append(super().select_by_token(logits_TE[part], valid, given, *state, **options))
        z_sums = [each.z_sum for each in chosen if each.z_sum is not None]
        return RoutedTokens(
            ids_TK=_whole([each.ids_TK for each in chosen], self._partition),
            probs_TK=_whole([each.probs_TK for each in chosen], self._partition),
            counts_E=torch.stack([each.counts_E for each in chosen]).sum(dim=0),
            balance=None,
            z_sum=torch.stack(z_sums).sum() if z_sums else None,
        )

    def select_by_expert(self, logits_TE: Tensor, valid_T: Tensor | None) -> Routing:
        chosen = [
            super(_SelectionByRank, self).select_by_expert(logits_TE[part], None if valid_T is None else valid_T[part])
            for part in self._partition.parts
        ]
        return Routing(
            num_experts=self.config.num_experts,
            map_TE=_whole([each.map_TE for each in chosen], self._partition),
            probs_TE=_whole([each.probs_TE for each in chosen], self._partition),
            counts_E=torch.stack([each.counts_E for each in chosen]).sum(dim=0),
        )

    def apply_capacity(self, routing: Routing) -> Routing:
        """See `ExpertSelection.apply_capacity`."""
        if self.capacity is None:
            return routing
        assert routing.ids_TK is not None and routing.probs_TK is not None
        ids_TK, probs_TK, counts_E = routing.ids_TK.clone(), routing.probs_TK, torch.zeros_like(routing.counts_E)
        for part in self._partition.parts:
            ids, probs = routing.ids_TK[part], routing.probs_TK[part]
            counts = self.kernels.count_tokens(ids, routing.num_experts)
            limited = super().apply_capacity(
                replace(routing, ids_TK=ids, probs_TK=probs, counts_E=counts, chosen_TK=ids)
            )
            assert limited.ids_TK is not None and limited.probs_TK is not None
            ids_TK[part] = limited.ids_TK
            probs_TK = probs_TK.index_copy(0, part, limited.probs_TK)
            counts_E = counts_E + limited.counts_E
        # the result spans several ranks and has no fixed number of rows per expert
        return replace(routing, ids_TK=ids_TK, probs_TK=probs_TK, counts_E=counts_E, capacity=None)


def _whole(of_parts: Sequence[Tensor | None], partition: _Partition) -> Tensor:
    """Concatenates the per-rank results and restores the token order of the microbatch."""
    return torch.cat([each for each in of_parts if each is not None])[torch.cat(partition.parts).argsort()]
