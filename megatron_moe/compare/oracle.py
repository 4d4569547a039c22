"""The one rank that a layout is compared with: it is given the layout's partition of the tokens.

What a layout computes is defined by whole microbatches, with two exceptions. Capacity limits what one rank's tokens may
take of an expert, so the oracle's routers limit every rank's share of a microbatch by itself. And the global balancing
loss counts the microbatches of all data-parallel ranks at once, so the oracle takes them as one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType

import torch
from torch import Tensor

from megatron_moe.moe.dispatch.contract import Routing
from megatron_moe.moe.router import Router
from megatron_moe.parallel.sequence_split import split_places
from megatron_moe.specs.model import LayerSpec, ModelSpec
from megatron_moe.specs.moe import CapacitySpec, MoESpec
from megatron_moe.specs.parallel import Launch, ParallelSpec
from megatron_moe.specs.pipeline.spec import PipelineSpec
from megatron_moe.specs.run import RunPlan
from megatron_moe.train.step import Trainer


def oracle_plan(plan: RunPlan) -> RunPlan:
    """The plan of one rank that sees the microbatches of all data-parallel ranks, one after the other."""
    batch = plan.batch
    if balances_globally(plan.model):
        batch = replace(batch, micro=batch.micro * plan.parallel.dp)
    return replace(
        plan,
        model=_local(plan.model),
        parallel=ParallelSpec(),
        pipeline=PipelineSpec(),
        launch=Launch(),
        batch=batch,
        device="cpu",
    )


def partition_tokens(trainer: Trainer, plan: RunPlan) -> None:
    """Makes the routers of the oracle limit the tokens of every rank of the layout `plan` by themselves."""
    shares = _position_parts(plan.parallel, plan.data.seq_length)
    num_sequences = trainer.plan.batch.micro
    sequences = torch.arange(num_sequences).split(plan.batch.micro)
    # token t = s * B + b
    parts = [(share[:, None] * num_sequences + group).flatten() for share in shares for group in sequences]
    if len(parts) == 1:
        return
    for router in trainer.routers:
        if router.capacity is not None:
            router._limit = MethodType(_limit_by_parts(parts), router)  # type: ignore[method-assign]


def _position_parts(spec: ParallelSpec, num_positions: int) -> list[Tensor]:
    """The positions of a sequence that each rank of cp x tp holds, in its order: int64, one tensor per rank."""
    shares = split_places(spec.cp_split, num_positions, spec.cp)
    held = [torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]) for chunks in shares]
    return [part for share in held for part in share.chunk(spec.tp if spec.sequence_parallel else 1)]


def _limit_by_parts(parts: Sequence[Tensor]) -> Callable[[Router, Routing, CapacitySpec], Routing]:
    """A method that stands in for `Router._limit`: every part of the tokens has a capacity of its own."""

    def limit(router: Router, routing: Routing, spec: CapacitySpec) -> Routing:
        assert routing.ids_TK is not None and routing.probs_TK is not None
        ids_TK, probs_TK, counts_E = routing.ids_TK.clone(), routing.probs_TK, torch.zeros_like(routing.counts_E)
        for part in parts:
            limited = Router._limit(router, _rows_of(routing, part, router), spec)
            assert limited.ids_TK is not None and limited.probs_TK is not None
            ids_TK[part] = limited.ids_TK
            probs_TK = probs_TK.index_copy(0, part, limited.probs_TK)
            counts_E = counts_E + limited.counts_E
        # The rows that pad experts to their capacity hold nothing, so the oracle has none.
        return replace(routing, ids_TK=ids_TK, probs_TK=probs_TK, counts_E=counts_E, capacity=None)

    return limit


def _rows_of(routing: Routing, rows: Tensor, router: Router) -> Routing:
    assert routing.ids_TK is not None and routing.probs_TK is not None
    ids_TK = routing.ids_TK[rows]
    counts_E = router.kernels.count_tokens(ids_TK, routing.num_experts)
    return replace(routing, ids_TK=ids_TK, probs_TK=routing.probs_TK[rows], counts_E=counts_E, chosen_TK=ids_TK)


def balances_globally(spec: ModelSpec) -> bool:
    """Does a loss count the microbatches of all data-parallel ranks at once?"""
    moe = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MoESpec)]
    return any("global_aux_loss" in each.router.balancing for each in moe)


def _local(spec: ModelSpec) -> ModelSpec:
    """The same model with experts that are all here."""

    def layer_here(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.feed_forward, MoESpec):
            return layer
        return replace(layer, feed_forward=replace(layer.feed_forward, dispatcher="local", shared_overlap=False))

    return replace(spec, layers=tuple(layer_here(layer) for layer in spec.layers))
