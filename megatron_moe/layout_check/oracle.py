"""The one rank that a layout is compared with: it is given the layout's partition of the tokens.

A layout's results are defined per microbatch, with two exceptions. Capacity limits, Sinkhorn and expert choice are
defined per rank: the oracle's routers apply them to every rank's share of a microbatch. The global balancing loss
counts the microbatches of all data-parallel ranks together: the oracle counts them in a forward pass before the one
that trains.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MethodType

import torch
from torch import Tensor, nn

from megatron_moe.config.memory import MemoryConfig
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import CapacityConfig, MoEConfig
from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.parallel import Launch, ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.data.batch import MicroBatch, context_degree
from megatron_moe.data.datasets import Datasets
from megatron_moe.kernels.kernel_set import KernelSet
from megatron_moe.kernels.ops import RoutedTokens
from megatron_moe.layout_check.record import RankRecord, record_run
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe.balancing import BatchTokens
from megatron_moe.moe.router import Router
from megatron_moe.moe.token_dispatcher.base import Routing
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import split_places
from megatron_moe.parallel.rng import Key, RNGKey
from megatron_moe.train.trainer import Trainer


def record_oracle(
    plan: RunPlan, context: ParallelContext, kernels: KernelSet, datasets: Datasets, *, num_steps: int
) -> RankRecord:
    """What the one rank of `context` records, which is given the partition of the tokens of the layout `plan`."""
    return record_run(
        oracle_plan(plan),
        context,
        kernels,
        datasets,
        num_steps=num_steps,
        prepare=lambda trainer: follow_layout(trainer, plan),
    )


def oracle_plan(plan: RunPlan) -> RunPlan:
    """The plan of one rank that sees the microbatches of all data-parallel ranks, one after the other."""
    return replace(
        plan,
        model=_local(plan.model),
        parallel=ParallelConfig(),
        pipeline=PipelineConfig(),
        memory=MemoryConfig(),
        optimizer=replace(plan.optimizer, offload=OptimizerOffloadConfig()),
        launch=Launch(),
        device="cpu",
    )


def follow_layout(trainer: Trainer, plan: RunPlan) -> None:
    """Gives the oracle's routers the partition of the tokens of the layout `plan`."""
    _partition_tokens(trainer, plan)
    if plan.parallel.dp > 1 and any("global_aux_loss" in router.config.balancing for router in trainer.routers):
        trainer._prepare = MethodType(_counting_ahead(plan.parallel.dp), trainer)  # type: ignore[method-assign]


def _counting_ahead(dp: int) -> Callable[..., list[MicroBatch]]:
    """Returns a replacement of `Trainer._prepare` that also counts the choices of all microbatches of the step.

    The step's forward then finds the counts of the global balancing loss where a recomputed forward does.
    """

    def prepare(trainer: Trainer, batches: Sequence[MicroBatch], iteration: int) -> list[MicroBatch]:
        prepared = Trainer._prepare(trainer, batches, iteration)
        with torch.no_grad():
            for batch in prepared:
                trainer.model(replace(batch, context=replace(batch.context, metrics=MetricAccumulator())))
        for router in trainer.routers:
            _count_together(router._counts_ahead, dp)
        return prepared

    return prepare


def _count_together(counts_ahead: dict[RNGKey | None, Tensor], dp: int) -> None:
    """Turns running sums over microbatches, in order, into running sums over groups of `dp` microbatches: the layout's
    data-parallel ranks route one microbatch each at the same time. Keys differ in the microbatch and the MTP depth."""

    def group_of(key: RNGKey | None) -> tuple[int, Key]:
        assert key is not None, "a microbatch without a key"
        return key.microbatch // dp, key.scope

    of_groups: dict[tuple[int, Key], Tensor] = {}
    before: Tensor | int = 0
    for key, counts_E in counts_ahead.items():
        of_groups[group_of(key)] = of_groups.get(group_of(key), 0) + (counts_E - before)
        before = counts_E
    sums = dict(zip(of_groups, accumulate(of_groups.values()), strict=True))
    counts_ahead.update({key: sums[group_of(key)] for key in counts_ahead})


def _partition_tokens(trainer: Trainer, plan: RunPlan) -> None:
    """Makes the oracle's routers handle the tokens of every rank of the layout separately where the layout's do."""
    by_rank = [router for router in trainer.routers if router.capacity is not None or _chooses_by_rank(router)]
    if not by_rank:
        return
    partition = _Partition(plan)
    if plan.parallel.max_seqlen_per_rank is not None:
        trainer.model.register_forward_pre_hook(partition.look_at)
    for router in by_rank:
        router._limit = MethodType(_limit_by_parts(partition), router)  # type: ignore[method-assign]
        if _chooses_by_rank(router):
            router._choose_experts = MethodType(_experts_by_parts(partition), router)  # type: ignore[method-assign]
            router._choose_tokens = MethodType(_tokens_by_parts(partition), router)  # type: ignore[method-assign]


def _chooses_by_rank(router: Router) -> bool:
    return not {"sinkhorn", "expert_choice"}.isdisjoint(router.config.balancing)


class _Partition:
    """Which tokens of the oracle's microbatch the ranks of a layout hold."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self.parts = self._over(plan.parallel.cp)
        """int64, one tensor per rank: its tokens in its order."""

    def look_at(self, model: nn.Module, arguments: tuple[MicroBatch, ...]) -> None:
        """The documents of a microbatch decide over how many context-parallel ranks its sequences are split."""
        self.parts = self._over(context_degree(arguments[0], self._plan.parallel))

    def _over(self, degree: int) -> list[Tensor]:
        """Each sequence is split over `degree` context-parallel ranks, and groups of so many share the sequences."""
        num_sequences = self._plan.batch.micro
        sequences = torch.arange(num_sequences).chunk(self._plan.parallel.cp // degree)
        shares = _position_parts(self._plan.parallel, self._plan.data.seq_length, degree)
        # token t = s * B + b
        return [(share[:, None] * num_sequences + group).flatten() for share in shares for group in sequences]


def _position_parts(config: ParallelConfig, num_positions: int, degree: int) -> list[Tensor]:
    """The positions of a sequence that each of `degree` x tp ranks holds, in its order: int64, one tensor per rank."""
    shares = split_places(config.cp_split, num_positions, degree)
    held = [torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]) for chunks in shares]
    return [part for share in held for part in share.chunk(config.tp if config.sequence_parallel else 1)]


def _limit_by_parts(partition: _Partition) -> Callable[[Router, Routing, CapacityConfig], Routing]:
    """A method that stands in for `Router._limit`: every part of the tokens has a capacity of its own."""

    def limit(router: Router, routing: Routing, config: CapacityConfig) -> Routing:
        assert routing.ids_TK is not None and routing.probs_TK is not None
        ids_TK, probs_TK, counts_E = routing.ids_TK.clone(), routing.probs_TK, torch.zeros_like(routing.counts_E)
        for part in partition.parts:
            limited = Router._limit(router, _rows_of(routing, part, router), config)
            assert limited.ids_TK is not None and limited.probs_TK is not None
            ids_TK[part] = limited.ids_TK
            probs_TK = probs_TK.index_copy(0, part, limited.probs_TK)
            counts_E = counts_E + limited.counts_E
        # The rows that pad experts to their capacity hold nothing, so the oracle has none.
        return replace(routing, ids_TK=ids_TK, probs_TK=probs_TK, counts_E=counts_E, capacity=None)

    return limit


def _experts_by_parts(partition: _Partition) -> Callable[..., RoutedTokens]:
    """A method that stands in for `Router._choose_experts`: every part of the tokens is balanced by itself."""

    def choose(
        router: Router, logits_TE: Tensor, tokens: BatchTokens, given_ids_TK: Tensor | None, **asked: bool
    ) -> RoutedTokens:
        chosen = []
        for part in partition.parts:
            valid_T = None if tokens.valid_T is None else tokens.valid_T[part]
            of_part = BatchTokens(valid_T, len(part), tokens.batch_size, tokens.group)
            given = None if given_ids_TK is None else given_ids_TK[part]
            chosen.append(Router._choose_experts(router, logits_TE[part], of_part, given, **asked))
        z_sums = [each.z_sum for each in chosen if each.z_sum is not None]
        return RoutedTokens(
            ids_TK=_whole([each.ids_TK for each in chosen], partition),
            probs_TK=_whole([each.probs_TK for each in chosen], partition),
            counts_E=torch.stack([each.counts_E for each in chosen]).sum(dim=0),
            balance=None,
            z_sum=torch.stack(z_sums).sum() if z_sums else None,
        )

    return choose


def _tokens_by_parts(partition: _Partition) -> Callable[..., Routing]:
    """A method that stands in for `Router._choose_tokens`: the experts choose among every part of the tokens."""

    def choose(router: Router, logits_TE: Tensor, valid_T: Tensor | None) -> Routing:
        chosen = [
            Router._choose_tokens(router, logits_TE[part], None if valid_T is None else valid_T[part])
            for part in partition.parts
        ]
        return Routing(
            num_experts=router.config.num_experts,
            map_TE=_whole([each.map_TE for each in chosen], partition),
            probs_TE=_whole([each.probs_TE for each in chosen], partition),
            counts_E=torch.stack([each.counts_E for each in chosen]).sum(dim=0),
        )

    return choose


def _whole(of_parts: Sequence[Tensor | None], partition: _Partition) -> Tensor:
    """What was computed of every part, in the order of the tokens."""
    return torch.cat([each for each in of_parts if each is not None])[torch.cat(partition.parts).argsort()]


def _rows_of(routing: Routing, rows: Tensor, router: Router) -> Routing:
    assert routing.ids_TK is not None and routing.probs_TK is not None
    ids_TK = routing.ids_TK[rows]
    counts_E = router.kernels.count_tokens(ids_TK, routing.num_experts)
    return replace(routing, ids_TK=ids_TK, probs_TK=routing.probs_TK[rows], counts_E=counts_E, chosen_TK=ids_TK)


def _local(config: ModelConfig) -> ModelConfig:
    """The same model with experts that are all here."""
    return with_experts(config, lambda moe: replace(moe, dispatcher="local", shared_overlap=False))


def with_experts(config: ModelConfig, change: Callable[[MoEConfig], MoEConfig]) -> ModelConfig:
    """The same model with every MoE layer's feed-forward changed."""

    def changed(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.feed_forward, MoEConfig):
            return layer
        return replace(layer, feed_forward=change(layer.feed_forward))

    return replace(config, layers=tuple(map(changed, config.layers)))
