"""Runs a training step of one rank without the other ranks and tracks its memory.

Model, schedule and optimizer are those of a real run. On the `meta` device, tensors have no data and kernels are the
fakes selected by `kernels.py`. On a GPU, real kernels run, and placeholders replace the data from other ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_moe import build
from megatron_moe.config.emulation import RoutedLoad
from megatron_moe.config.model import with_feed_forwards
from megatron_moe.config.run import RunPlan
from megatron_moe.config.transport import ECHO, HIERARCHICAL, NCCL, SYMMETRIC, ExpertTransport
from megatron_moe.cost_model.expert_load import RoutingSizes, token_copies
from megatron_moe.data.batch import MicroBatch, MicrobatchContext, TokenMeta, split_sequence
from megatron_moe.kernels.kernel_set import KernelSet
from megatron_moe.kernels.ops import RoutedTokens
from megatron_moe.logs.timers import Timers
from megatron_moe.memory_emulation.graphs import EmulatedGraphRecorder
from megatron_moe.memory_emulation.kernels import emulated_kernels
from megatron_moe.memory_emulation.labels import label_model, label_received_tensors, mark_pages, mark_state
from megatron_moe.memory_emulation.tracker import HOST, Phase, Timeline, Tracker
from megatron_moe.moe.token_dispatcher.alltoall import AllToAllDispatcher
from megatron_moe.moe.token_dispatcher.base import ExpertComm
from megatron_moe.moe.token_dispatcher.echo import EchoDispatcher, HostPlacement
from megatron_moe.moe.token_dispatcher.flex import ExchangeState
from megatron_moe.moe.token_dispatcher.hierarchical import ExchangeSizes, HierarchicalTransport
from megatron_moe.parallel.context import ParallelContext, torch_dtype
from megatron_moe.parallel.streams import MetaHostCopies
from megatron_moe.pipeline.schedule import num_warmup
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer


@dataclass(frozen=True)
class EmulatedRun:
    """Memory of one rank during the emulated step."""

    rank: int
    """Global rank that was emulated."""
    pipeline_rank: int
    num_microbatches: int
    """Number of microbatches in the emulated step."""
    timeline: Timeline
    allocator_peak: int | None
    """Peak of allocated bytes in the CUDA caching allocator; None without a GPU."""
    requested_peak: int | None
    """Peak of requested bytes, before the CUDA caching allocator rounds sizes up; None without a GPU."""


def emulate_rank(plan: RunPlan, rank: int, device: torch.device, *, num_microbatches: int | None = None) -> EmulatedRun:
    """Emulates global rank `rank` of the plan on `device`: runs a warm-up step, then a step whose memory is returned.

    `num_microbatches`: number of microbatches in that step; None means a number that suffices to reach the memory peak.
    """
    emulation = plan.emulation
    assert emulation is not None, "the plan has no emulation"
    parallel = replace(plan.parallel, embedding_ranks=plan.layout.embedding_ranks(tied=plan.model.tied_embeddings))
    context = ParallelContext.fake(parallel, rank, dtype=torch_dtype(plan.precision.params), device=device)
    load = assumed_load(context, emulation.emulate_imbalance)
    try:
        if device.type == "meta":
            kernels = emulated_kernels(plan.kernels, context.dtype)
        else:
            kernels = with_assumed_choices(build.build_kernels(plan, context), load)
        return measure_step_memory(plan, context, kernels, num_microbatches or enough_microbatches(plan), load)
    finally:
        context.stop()


def measure_step_memory(
    plan: RunPlan, context: ParallelContext, kernels: KernelSet, num_microbatches: int, load: RoutedLoad | None = None
) -> EmulatedRun:
    """Runs a warm-up step and returns the memory of a second step. `load`: assumed expert load; None means real
    routing."""
    on_gpu = context.device.type == "cuda"
    tracker = Tracker(device_type=context.device.type)
    with tracker:
        trainer = _trainer(plan, context, kernels, tracker, load)
        mark_state(trainer, tracker)
        state, config = TrainState(), build.build_train_state_config(plan)
        fewest = min(plan.pipeline_schedule(num_microbatches).group, num_microbatches)
        for is_last, number in ((False, fewest), (True, num_microbatches)):
            batches = make_batches(plan, context, number)
            if is_last:
                tracker.begin_peak_interval()
                if on_gpu:
                    torch.cuda.synchronize(context.device)
                    torch.cuda.reset_peak_memory_stats(context.device)
            outcome = trainer.step(batches, state)
            mark_pages(trainer, tracker)
            state.advance(outcome.counts, config)
            del batches, outcome
    return EmulatedRun(
        rank=context.rank,
        pipeline_rank=context.group("pp").rank,
        num_microbatches=num_microbatches,
        timeline=tracker.timeline(),
        allocator_peak=torch.cuda.max_memory_allocated(context.device) if on_gpu else None,
        requested_peak=torch.cuda.memory_stats(context.device)["requested_bytes.all.peak"] if on_gpu else None,
    )


def enough_microbatches(plan: RunPlan) -> int:
    """Number of microbatches per step that suffices to reach the memory peak, at most that of the plan: the warm-up
    microbatches of the first pipeline rank, plus 2 * pp, plus those for which expert weight gradients can be delayed.
    With virtual stages, the number is rounded up to whole groups."""
    whole = plan.num_microbatches
    config = plan.pipeline_schedule(whole)
    warmup = -(-num_warmup(config, 0) // config.vpp)
    wanted = warmup + 2 * config.pp + plan.memory.moe_expert_wgrad_interval - 1
    rounds = -(-wanted // config.group) * config.group
    return min(rounds if config.vpp > 1 else wanted, whole)


class _Spans(Timers):
    """Stand-in for the timers that sets the phase of the memory tracker instead of measuring time."""

    def __init__(self, tracker: Tracker, device: torch.device) -> None:
        super().__init__(0, device)
        self._tracker = tracker

    @contextmanager
    def span(self, name: str, level: int) -> Iterator[None]:
        """Sets the tracker's phase in the body: "forward" in the span "forward-backward", otherwise "update"."""
        phase: Phase = "forward" if name == "forward-backward" else "update"
        with self._tracker.in_phase(phase):
            yield


class _TrackedHostCopies(MetaHostCopies):
    """Copies of meta tensors to and from the host. The tracker counts the host buffers as host memory."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def host_buffer(self, size: int, dtype: torch.dtype, *, pinned: bool = True, exact: bool = True) -> Tensor:
        buffer = super().host_buffer(size, dtype, pinned=pinned, exact=exact)
        self._tracker.mark_persistent(buffer, HOST)
        return buffer


def _trainer(
    plan: RunPlan, context: ParallelContext, kernels: KernelSet, tracker: Tracker, load: RoutedLoad | None
) -> Trainer:
    host_copies = None
    if context.device.type == "meta":
        host_copies = _TrackedHostCopies(tracker)
        plan = replace(plan, model=with_feed_forwards(plan.model, lambda each: each.without_host_reads()))
    stand_in = None if load is None else partial(transport_without_peers, load)
    model = build.build_model(
        plan, context, kernels, initial=load is None, host_copies=host_copies, stand_in_transport=stand_in
    )
    label_model(model, tracker)
    timers = _Spans(tracker, context.device)
    trainer = build.build_trainer(plan, context, model, kernels, timers, has_peers=load is None)
    label_received_tensors(trainer.pipeline, tracker)
    if context.device.type == "meta":
        # the first of the two steps runs eagerly; the second one captures and is the one whose memory counts
        graphs = replace(plan.cuda_graphs, cuda_graph_warmup_steps=1)
        recorder = EmulatedGraphRecorder(tracker)
        build.record_steps(trainer, recorder, graphs, plan.memory.moe_expert_wgrad_interval)
    return trainer


def make_batches(plan: RunPlan, context: ParallelContext, number: int) -> list[MicroBatch]:
    """Returns this rank's part of `number` microbatches of placeholder tokens."""
    return [split_sequence(_batch(plan, context.device), context) for _ in range(number)]


def _batch(plan: RunPlan, device: torch.device) -> MicroBatch:
    """Microbatch of placeholder tokens with one document per sequence."""
    size, length = plan.batch.micro_batch_size, plan.data.seq_length
    tokens_BS = torch.arange(size * length, device=device).remainder(plan.data.vocab_size).view(size, length)
    wide = torch.promote_types(torch.float32, torch_dtype(plan.precision.params))
    positions_BS = torch.arange(length, device=device).repeat(size, 1)
    packed = plan.data.packing is not None
    segments_BS = torch.zeros_like(positions_BS) if plan.data.reset_attention_mask or packed else None
    meta = TokenMeta(
        positions_BS=positions_BS,
        segments_BS=segments_BS,
        max_seqlen=length if segments_BS is not None else None,
        valid_BS=torch.ones_like(positions_BS, dtype=torch.bool) if packed else None,
    )
    mask_BS = torch.ones(size, length, device=device, dtype=wide)
    return MicroBatch(
        tokens_BS=tokens_BS, labels_BS=tokens_BS.clone(), loss_mask_BS=mask_BS, context=MicrobatchContext(tokens=meta)
    )


def assumed_load(context: ParallelContext, imbalance: float = 1.0) -> RoutedLoad:
    """Expert load assumed for all ranks: this rank's experts receive `imbalance` times a balanced share of the rows."""
    ep = context.group("ep")
    return RoutedLoad(ep.size, ep.rank, imbalance)


class _AssumedAllToAll(AllToAllDispatcher):
    """All-to-all dispatcher that takes the numbers of rows from the assumed load instead of from the other ranks."""

    def __init__(self, load: RoutedLoad, comm: ExpertComm, *settings: Any) -> None:
        super().__init__(comm, *settings)
        self._load = load

    def read_rows(self, rows_PQ: Tensor, num_choices: int) -> list[list[int]]:
        counts_E = self._load.counts(self.comm.num_experts, num_choices)
        starts = range(0, len(counts_E), self.num_local)
        return [[sum(counts_E[start : start + self.num_local]) for start in starts]] * len(rows_PQ)


class _AssumedEcho(EchoDispatcher):
    """All-to-all dispatcher with clones that, without data, takes the numbers of rows from the assumed load and uses
    all clone slots. The clones of a rank are those of the experts that follow its own."""

    def __init__(self, load: RoutedLoad, comm: ExpertComm, *settings: Any) -> None:
        super().__init__(comm, *settings)
        self._load = load

    def read_placement(self, clones_Qc: Tensor, counts_PQs: Tensor, num_choices: int) -> HostPlacement:
        if not clones_Qc.is_meta:
            return super().read_placement(clones_Qc, counts_PQs, num_choices)
        num_experts, ranks = self.comm.num_experts, range(self.ep.size)
        counts_E = self._load.counts(num_experts, num_choices)
        rows_Q = [sum(counts_E[rank * self.num_own :][: self.num_own]) for rank in ranks]
        held = rows_Q[self.ep.rank] * len(counts_PQs)
        following = [[(rank + 1) * self.num_own + slot for slot in range(self.num_clones)] for rank in ranks]
        clones = [sorted(expert % num_experts for expert in experts) for experts in following]
        return HostPlacement([rows_Q] * len(counts_PQs), clones, held * self.num_own // self.num_local)


class _AssumedHierarchical(HierarchicalTransport):
    """Hierarchical transport that estimates the sizes of an exchange instead of gathering them."""

    def __init__(self, load: RoutedLoad, router: RoutingSizes, comm: ExpertComm) -> None:
        super().__init__(comm)
        self._load = load
        self._token_copies = token_copies(router, comm.ctx.config, rank=comm.ctx.rank)

    def read_sizes(self, exchange: ExchangeState) -> ExchangeSizes:
        """Split sizes of the hierarchical all-to-all for random routing, in which this rank's experts have the assumed
        load."""
        num_tokens, copies, parallel = len(exchange.ids_TK), self._token_copies, self._comm.ctx.config
        to_host = (round(num_tokens * copies.per_token / copies.num_hosts),) * copies.num_hosts
        to_rank = (round(num_tokens * copies.forwarded / copies.ranks_per_host),) * copies.ranks_per_host
        counts_E = self._load.counts(self._comm.num_experts, exchange.ids_TK.numel())
        counts_e = counts_E[self._load.busiest_ep_rank * self._num_local :][: self._num_local]
        return ExchangeSizes(to_host, to_host, to_rank, to_rank, parallel.ep * parallel.etp * sum(counts_e))


def transport_without_peers(load: RoutedLoad, transport: ExpertTransport, router: RoutingSizes) -> ExpertTransport:
    """Returns a transport that replaces another one on a single emulated rank and has the same shapes."""
    if transport.library is not None:
        return SYMMETRIC
    if transport is NCCL:
        return replace(transport, dispatcher=partial(_AssumedAllToAll, load))
    if transport is ECHO:
        return replace(transport, dispatcher=partial(_AssumedEcho, load))
    if transport is HIERARCHICAL:
        return replace(transport, transport=partial(_AssumedHierarchical, load, router))
    return transport


def assumed_ids(load: RoutedLoad, router: RoutingSizes, num_tokens: int, device: torch.device) -> Tensor:
    """Expert ids, int64 [T, K]. Each expert occurs as often as `load` assumes. The experts of a token are distinct."""
    num_choices = num_tokens * router.topk
    counts_E = torch.tensor(load.counts(router.num_experts, num_choices), device=device)
    experts = torch.arange(router.num_experts, device=device)
    ids = experts.repeat_interleave(counts_E, output_size=num_choices)
    # an expert has at most num_tokens consecutive entries of `ids`, so each token gets it at most once
    return ids.view(router.topk, num_tokens).T.contiguous()


def with_assumed_choices(
    kernels: KernelSet, load: RoutedLoad, choose: Callable[..., Tensor] = assumed_ids
) -> KernelSet:
    """Kernel set whose `route` returns expert ids with the assumed load. Probabilities are those of the real top-k.

    `choose`: replaces `assumed_ids`, for example by a function that caches its results.
    """

    def route(logits_TE: Tensor, bias_E: Tensor | None, router: Any, **given: Any) -> RoutedTokens:
        ids_TK = choose(load, router, len(logits_TE), logits_TE.device)
        routed = kernels.route(logits_TE, bias_E, router, **given)
        return routed._replace(ids_TK=ids_TK, counts_E=kernels.count_tokens(ids_TK, router.num_experts))

    chosen = copy(kernels)
    vars(chosen)["route"] = route
    return chosen
