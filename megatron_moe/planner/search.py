"""Search for the fastest plans that fit into device memory, over layouts and memory options.

The search is best-first: it visits sets of parallel sizes, and the layouts with these sizes, in order of a lower bound
on the step time, which `estimator.py` computes. Each layout gets the cheapest memory options with which it fits. The
search ends when all remaining lower bounds are above the step times of the best plans.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, combinations
from itertools import count as count_up

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GIB, GPU
from megatron_moe.cost_model.memory import RankBytes, RankMemory, rank_with_peak_memory
from megatron_moe.cost_model.placement import Placements
from megatron_moe.planner.estimator import Estimator, StepEstimate
from megatron_moe.planner.layouts import LayoutGrid, Layouts, with_microbatch_overlap
from megatron_moe.planner.memory_options import (
    recomputable_modules,
    with_bf16_moments,
    with_full_recompute,
    with_host_optimizer,
    with_offload,
    with_recompute,
    with_remainders,
    with_sharding,
    without_options,
)
from megatron_moe.planner.report import RESERVE_GIB

_OFFLOADED = ((), ("expert_fc1",), ("expert_fc1", "moe_act"), ("expert_fc1", "moe_act", "core_attn"))
_MOST_WAYS, _MOST_DOUBLINGS = 3, 10
_SAFETY = 0.97
"""Minimum sum of the options' savings, as a fraction of the excess memory, for a set of options to be tried. It is
below 1 because the sum is not exact: options may also change the peak workspace."""


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A plan with its estimated step time and memory."""

    plan: RunPlan
    step: StepEstimate
    memory: RankBytes
    """Memory of the pipeline rank with the highest peak."""
    plain_bytes: float
    """Highest peak of all pipeline ranks in bytes, for the plan without recompute and activation offload."""


class Planner:
    """Searches for plans on one kind of GPU."""

    def __init__(self, gpu: GPU, imbalance: float = 1.0, *, offload: bool = True) -> None:
        """`imbalance`: expert rows of the most loaded rank as a multiple of the mean. `offload`: allows activation
        offload."""
        self.gpu = gpu
        self._offloads = _OFFLOADED if offload else _OFFLOADED[:1]
        self.imbalance = imbalance
        self.room = (gpu.memory_gib - RESERVE_GIB) * GIB
        self._placements = Placements(gpu)
        self._fitted: dict[tuple[RunPlan, float], PlannedLayout | None] = {}

    def fastest_plans(
        self, plan: RunPlan, count: int = 10, accepts: Callable[[RunPlan], bool] = lambda plan: True
    ) -> list[PlannedLayout]:
        """Searches for the `count` fastest plans for the model, precision, global batch and number of GPUs of `plan`.

        `accepts`: additional check of each plan that fits, for rules that the planner does not implement.
        """
        layouts = Layouts(plan, self.gpu)
        order = count_up()  # breaks ties in the heap
        queue: list[tuple[float, int, LayoutGrid | RunPlan]] = []
        for grid, simple, _ in self._with_room(layouts):
            heappush(queue, (self._lower_bound(with_microbatch_overlap(simple)), next(order), grid))
        found: list[PlannedLayout] = []
        while queue:
            bound, _, each = heappop(queue)
            if len(found) == count and bound >= found[-1].step.total:
                break
            if isinstance(each, LayoutGrid):
                for option in layouts.of_grid(each):
                    heappush(queue, (self._lower_bound(option), next(order), option))
                continue
            fitting = self.fit_memory_options(each)
            if fitting is not None and accepts(fitting.plan):
                found = sorted([*found, fitting], key=lambda one: one.step.total)[:count]
        return found

    def has_layouts(self, plan: RunPlan) -> bool:
        """Whether any layout divides the model, the global batch and the number of GPUs of `plan`."""
        layouts = Layouts(plan, self.gpu)
        return any(layouts.of(grid) is not None for grid in layouts.grids())

    def find_any_fitting(
        self, plan: RunPlan, accepts: Callable[[RunPlan], bool] = lambda plan: True
    ) -> PlannedLayout | None:
        """Finds some layout that fits, fast: tries one layout per set of parallel sizes. Returns None if none fits."""
        order = sorted(self._with_room(Layouts(plan, self.gpu)), key=lambda each: each[-1])
        found = (self.fit_memory_options(simple) for _, simple, _ in order)
        return next((each for each in found if each is not None and accepts(each.plan)), None)

    def _with_room(self, layouts: Layouts) -> Iterator[tuple[LayoutGrid, RunPlan, float]]:
        """Yields (parallel sizes, plan without virtual stages, bytes) for the sizes with which weights, gradients and
        optimizer state of the middle pipeline rank fit into device memory."""
        states: dict[ParallelConfig, float] = {}  # they do not depend on the microbatch size
        for grid in layouts.grids():
            simple = layouts.of(grid)
            if simple is None:
                continue
            if grid.parallel not in states:
                states[grid.parallel] = RankMemory(simple).state_of_rank(grid.parallel.pp // 2).total
            if states[grid.parallel] < self.room:
                yield grid, simple, states[grid.parallel]

    def _lower_bound(self, plan: RunPlan) -> float:
        """Lower bound on the step time in seconds: the estimated time without pipeline bubble."""
        return self.estimator(plan).step(bubble=False).total

    def estimator(self, plan: RunPlan) -> Estimator:
        """Creates the estimator of a plan's step time on this GPU."""
        return Estimator(plan, self.gpu, self._placements.placements_of_groups(plan.parallel))

    def evaluate(self, plan: RunPlan) -> PlannedLayout:
        """Estimates step time and memory of a plan as given, whether or not it fits into device memory."""
        plain = self.rank_with_peak_memory(without_options(plan))
        return PlannedLayout(
            plan=plan,
            step=self.estimator(plan).step(),
            memory=self.rank_with_peak_memory(plan),
            plain_bytes=plain.total,
        )

    def fits(self, memory: RankBytes) -> bool:
        """Whether a rank with this peak leaves `RESERVE_GIB` of memory for CUDA, NCCL, workspaces and fragmentation."""
        return memory.total <= self.room

    def rank_with_peak_memory(self, plan: RunPlan) -> RankBytes:
        """Memory of the pipeline rank with the highest peak."""
        return rank_with_peak_memory(RankMemory(plan, self.imbalance).all_ranks())

    def fit_with_optimizer(self, plan: RunPlan) -> PlannedLayout | None:
        """Fits the plan into device memory with `fit_memory_options`. If that fails or selects recompute or offload,
        selects the fastest of three alternatives: 16-bit master remainders (with bf16 moments if necessary), sharded
        gradients, and sharded weights. If none fits, moves the optimizer to the host, with remainders and if necessary
        bf16 moments."""
        plain = self.fit_memory_options(plan)
        if plain is not None and plain.plan == without_options(plan):
            return plain
        exact, narrow = with_remainders(plan), with_bf16_moments(plan)
        smaller = next(filter(None, map(self.fit_memory_options, (exact, narrow))), None)
        found = [each for each in (smaller, *map(self.fit_memory_options, _with_sharding(plan))) if each is not None]
        if found:
            return min(found, key=lambda each: each.step.total)
        on_host = map(self.fit_memory_options, map(with_host_optimizer, (exact, narrow)))
        return next(filter(None, on_host), None)

    def ways_to_fit(self, plan: RunPlan, accepts: Callable[[RunPlan], bool] = lambda plan: True) -> list[PlannedLayout]:
        """Finds up to three plans with the layout of `plan` that fit into device memory: the choice of
        `fit_with_optimizer`, then the fastest others, including those with smaller microbatches."""
        first = self.fit_with_optimizer(plan)
        exact, narrow = with_remainders(plan), with_bf16_moments(plan)
        variants = [plan, exact, narrow, *map(with_host_optimizer, (exact, narrow)), *_smaller_microbatches(exact)]
        variants += _with_sharding(plan)
        others = sorted(filter(None, map(self.fit_memory_options, variants)), key=lambda found: found.step.total)
        distinct = {found.plan: found for found in (first, *others) if found is not None}
        return [found for found in distinct.values() if accepts(found.plan)][:_MOST_WAYS]

    def add_gpus_until_fit(
        self, plan: RunPlan, accepts: Callable[[RunPlan], bool] = lambda plan: True
    ) -> PlannedLayout | None:
        """Doubles the data-parallel ranks until the plan fits, with recompute and offload if necessary. Returns None if
        the global batch has too few sequences."""
        for _ in range(_MOST_DOUBLINGS):
            if plan.num_microbatches % 2:
                return None
            plan = replace(plan, parallel=replace(plan.parallel, world_size=2 * plan.parallel.world_size))
            found = self.fit_memory_options(plan)
            if found is not None and accepts(found.plan):
                return found
        return None

    def fit_memory_options(self, plan: RunPlan) -> PlannedLayout | None:
        """Replaces the plan's recompute and activation offload by the cheapest options with which the plan fits into
        device memory. Returns None if no options suffice."""
        plain = without_options(plan)
        key = plain, self.room
        if key not in self._fitted:
            self._fitted[key] = self._fit_memory_options(plain)
        return self._fitted[key]

    def _fit_memory_options(self, plain: RunPlan) -> PlannedLayout | None:
        memory = RankMemory(plain, self.imbalance)
        # the heaviest rank is one of the first two (most microbatches in flight) or the last (loss)
        likely = sorted({0, min(1, plain.layout.pp - 1), plain.layout.pp - 1})
        before = rank_with_peak_memory([memory.of_rank(rank) for rank in likely])
        for changed in self._candidates(plain, memory, before):
            changed_memory = memory.with_options(changed.memory)
            if not self.fits(changed_memory.of_rank(before.rank)):
                continue
            after = self._heaviest_fitting(changed_memory)
            if after is not None:
                step = self.estimator(changed).step()
                return PlannedLayout(plan=changed, step=step, memory=after, plain_bytes=before.total)
        return None

    def _heaviest_fitting(self, memory: RankMemory) -> RankBytes | None:
        """Memory of the pipeline rank with the highest peak; None as soon as a rank does not fit."""
        found = []
        for rank in range(memory.plan.layout.pp):
            found.append(memory.of_rank(rank))
            if not self.fits(found[-1]):
                return None
        return rank_with_peak_memory(found)

    def _candidates(self, plain: RunPlan, memory: RankMemory, before: RankBytes) -> Iterator[RunPlan]:
        """Variants of the plan with sets of options that may save enough memory, cheapest first."""
        excess = before.total - self.room
        singles = [with_recompute(plain, [name]) for name in recomputable_modules(plain.model)]
        singles += [with_offload(plain, names) for names in self._offloads if names]
        gains: dict[object, float] = {(): 0.0}
        for each in singles:
            after = memory.with_options(each.memory).of_rank(before.rank)
            gains[_key(each)] = before.total - after.total
        found = [each for each in self._sets(plain) if _is_full(each) or _sum(each, gains) >= _SAFETY * excess]
        if found and excess > 0:
            base = self._lower_bound(plain)
            costs = {_key(each): self._lower_bound(each) - base for each in singles} | {(): 0.0}
            found.sort(key=lambda each: self._lower_bound(each) - base if _is_full(each) else _sum(each, costs))
        return iter(found)

    def _sets(self, plain: RunPlan) -> Iterator[RunPlan]:
        """Yields variants of the plan: combinations of selective recompute and offload, then full recompute."""
        every = recomputable_modules(plain.model)
        modules = [name for name in every if name != "moe"]
        sets = chain.from_iterable(combinations(modules, count) for count in range(len(modules) + 1))
        for names in sets:
            for offloaded in self._offloads:
                yield with_offload(with_recompute(plain, names), offloaded)
        if not plain.pipeline.overlap:
            if "moe" in every:
                outside = [name for name in modules if name not in ("moe_act", "shared_experts")]
                yield with_recompute(plain, ["moe"])
                yield with_recompute(plain, [*outside, "moe"])
            yield with_full_recompute(plain)


def _with_sharding(plan: RunPlan) -> list[RunPlan]:
    """Returns variants of the plan with sharded gradients and with sharded weights; empty unless the optimizer is
    sharded over several ranks."""
    config, replicas = plan.data_parallel, plan.parallel.dp * plan.parallel.cp
    if config.fsdp is not None or not config.use_distributed_optimizer or replicas == 1:
        return []
    return [with_sharding(plan, weights=weights) for weights in (False, True)]


def _smaller_microbatches(plan: RunPlan) -> Iterator[RunPlan]:
    """Yields the plan with a half, a quarter, ... of the microbatch size."""
    size = plan.batch.micro_batch_size
    while size > 1 and size % 2 == 0:
        size //= 2
        yield replace(plan, batch=replace(plan.batch, micro_batch_size=size))


def _key(plan: RunPlan) -> object:
    """Dictionary key for a plan with one memory option: the tuple of offloaded modules, or the recomputed module."""
    return plan.memory.offload.offload_modules or plan.memory.recompute.recompute_modules[0]


def _is_full(plan: RunPlan) -> bool:
    return plan.memory.recompute.recompute_method is not None


def _sum(plan: RunPlan, of_options: Mapping[object, float]) -> float:
    """Sums the values of a plan's options: one value per recomputed module and one for all offloaded modules."""
    return (
        sum(of_options[name] for name in plan.memory.recompute.recompute_modules)
        + of_options[plan.memory.offload.offload_modules]
    )
