"""The fastest plans that fit, by the cost model of `estimate.py`, among all layouts and sets of memory switches.

Phase 1 asks what fits, phase 2 which layout is best, phase 3 which switches are cheapest. All three are one search here
(best first): grids, and then their layouts, come in the order of a time that they cannot beat, each layout takes the
cheapest switches with which it fits, and the search ends when nothing that is left can be better than what is found.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, combinations
from itertools import count as count_up
from math import inf

from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GIB, GPU
from megatron_moe.cost_model.memory import (
    RankBytes,
    RankMemory,
    heaviest,
)
from megatron_moe.cost_model.placement import Placements
from megatron_moe.cost_model.report import RESERVE_GIB
from megatron_moe.cost_model.traffic import Destinations
from megatron_moe.planner.estimator import Estimator, StepEstimate
from megatron_moe.planner.layouts import (
    Degrees,
    Layouts,
    overlapped,
)
from megatron_moe.planner.memory_options import (
    modules_of,
    moments_in_bf16,
    moving,
    optimizer_on_host,
    precision_aware,
    recomputing,
    whole_layers,
    without_switches,
)

_MOVED = ((), ("expert_fc1",), ("expert_fc1", "moe_act"), ("expert_fc1", "moe_act", "core_attn"))
_SAFETY = 0.97
"""Savings of single switches add up but for what is at work: sets this much below the need are not tried."""


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A plan that fits."""

    plan: RunPlan
    step: StepEstimate
    memory: RankBytes
    """Of its heaviest pipeline rank."""
    plain_bytes: float
    """What it would need there without switches."""


class Planner:
    """Plans on one kind of GPU."""

    def __init__(self, gpu: GPU, imbalance: float = 1.0, *, offload: bool = True) -> None:
        """`imbalance`: rows of the fullest rank's experts, as a multiple of the mean. `offload`: inputs of modules may
        wait in host memory."""
        self.gpu = gpu
        self._moves = _MOVED if offload else _MOVED[:1]
        self.imbalance = imbalance
        self.room = (gpu.memory_gib - RESERVE_GIB) * GIB
        self._placements = Placements(gpu)
        self._destinations = Destinations()

    def best(
        self, plan: RunPlan, count: int = 10, accepts: Callable[[RunPlan], bool] = lambda plan: True
    ) -> list[PlannedLayout]:
        """The fastest `count` plans of the model, precision and global batch of `plan` on its number of GPUs.

        `accepts`: does a plan that fits obey the rules that are not known here?
        """
        layouts = Layouts(plan, self.gpu)
        order = count_up()
        waiting: list[tuple[float, int, Degrees | RunPlan]] = []
        for grid in layouts.grids():
            simple = layouts.of(grid)
            if simple is not None and RankMemory(simple).state_of_rank(grid.pp // 2).total < self.room:
                heappush(waiting, (self._at_least(overlapped(simple)), next(order), grid))
        found: list[PlannedLayout] = []
        while waiting:
            at_least, _, each = heappop(waiting)
            if len(found) == count and at_least >= found[-1].step.total:
                break
            if isinstance(each, Degrees):
                for option in layouts.of_grid(each):
                    heappush(waiting, (self._at_least(option), next(order), option))
                continue
            fitting = self.fit(each)
            if fitting is not None and accepts(fitting.plan):
                found = sorted([*found, fitting], key=lambda one: one.step.total)[:count]
        return found

    def _at_least(self, plan: RunPlan) -> float:
        """Seconds that no schedule and no switch can go below."""
        return self.estimator(plan).without_bubble().total

    def estimator(self, plan: RunPlan) -> Estimator:
        """The cost model of a plan."""
        return Estimator(plan, self.gpu, self._placements.of_all(plan.parallel), self._destinations)

    def as_it_is(self, plan: RunPlan) -> PlannedLayout:
        """A plan with its own switches, whether it fits or not."""
        plain = self.heaviest(without_switches(plan))
        return PlannedLayout(
            plan=plan, step=self.estimator(plan).step(), memory=self.heaviest(plan), plain_bytes=plain.total
        )

    def fits(self, memory: RankBytes) -> bool:
        """Is enough left for CUDA, NCCL, workspaces and fragmentation?"""
        return memory.total <= self.room

    def heaviest(self, plan: RunPlan) -> RankBytes:
        """The pipeline rank that needs most."""
        return heaviest(RankMemory(plan, self.imbalance).all_ranks(_microbatches(plan)))

    def fit_at_any_price(self, plan: RunPlan) -> PlannedLayout | None:
        """As `fit`, but before any activation is traded master weights are kept as what their weights lack, which costs
        no time; where activations are not enough, with moments in bf16, the optimizer on the host, or both."""
        found = self.fit(plan)
        if found is not None and found.plan == without_switches(plan):
            return found
        exact, narrow = precision_aware(plan), moments_in_bf16(plan)
        ways = map(self.fit, (exact, narrow, optimizer_on_host(exact), optimizer_on_host(narrow)))
        return next((found for found in ways if found is not None), None)

    def fit(self, plan: RunPlan) -> PlannedLayout | None:
        """The plan with the cheapest recompute and offload of activations with which it fits, whatever it has now; None
        when none are enough."""
        plain, count = without_switches(plan), _microbatches(plan)
        memory = RankMemory(plain, self.imbalance)
        # the heaviest are among the first, who have most in flight, or it is the one with the loss
        likely = sorted({0, min(1, plain.layout.pp - 1), plain.layout.pp - 1})
        before = heaviest([memory.of_rank(rank, count) for rank in likely])
        for changed in self._ways(plain, memory, before):
            counted = memory.with_switches(changed.memory)
            if not self.fits(counted.of_rank(before.rank, count)):
                continue
            after = heaviest(counted.all_ranks(count))
            if self.fits(after):
                step = self.estimator(changed).step()
                return PlannedLayout(plan=changed, step=step, memory=after, plain_bytes=before.total)
        return None

    def _ways(self, plain: RunPlan, memory: RankMemory, before: RankBytes) -> Iterator[RunPlan]:
        """Plans with sets of switches that may be enough, the cheapest first."""
        need = before.total - self.room
        singles = [recomputing(plain, [name]) for name in modules_of(plain.model)]
        moves = [moving(plain, names) for names in self._moves if names]
        gains: dict[object, float] = {(): 0.0}
        for each in (*singles, *moves):
            after = memory.with_switches(each.memory).of_rank(before.rank, _microbatches(plain))
            gains[_key(each)] = before.total - after.total
        hopeful = [each for each in self._sets(plain) if _hope(each, gains) >= _SAFETY * need]
        if hopeful and need > 0:
            base = self._at_least(plain)
            costs = {_key(each): self._at_least(each) - base for each in (*singles, *moves)} | {(): 0.0}
            hopeful.sort(key=lambda each: self._cost(each, base, costs))
        return iter(hopeful)

    def _cost(self, plan: RunPlan, base: float, costs: Mapping[object, float]) -> float:
        """Seconds that a set of switches adds."""
        recompute = plan.memory.recompute
        if recompute.granularity == "full":
            return self._at_least(plan) - base
        return sum(costs[name] for name in recompute.modules) + costs[plan.memory.offload.modules]

    def _sets(self, plain: RunPlan) -> Iterator[RunPlan]:
        """Selective modules and moved inputs in every combination that makes sense, and whole layers."""
        modules = [name for name in modules_of(plain.model) if name != "moe"]
        sets = chain.from_iterable(combinations(modules, count) for count in range(len(modules) + 1))
        for names in sets:
            for moved in self._moves:
                yield moving(recomputing(plain, names), moved)
        if not plain.pipeline.overlap:
            dense = [name for name in modules if name not in ("moe_act", "shared_experts")]
            yield recomputing(plain, ["moe"])
            yield recomputing(plain, [*dense, "moe"])
            yield whole_layers(plain)


def _key(plan: RunPlan) -> object:
    """Of a plan with one switch."""
    return plan.memory.offload.modules or plan.memory.recompute.modules[0]


def _hope(plan: RunPlan, gains: Mapping[object, float]) -> float:
    """Bytes that a set of switches saves, as if savings added up."""
    recompute = plan.memory.recompute
    if recompute.granularity == "full":
        return inf
    return sum(gains[name] for name in recompute.modules) + gains[plan.memory.offload.modules]


def _microbatches(plan: RunPlan) -> int:
    return plan.batch.global_size // (plan.batch.micro * plan.parallel.dp)
