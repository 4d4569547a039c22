"""Enumeration of the valid parallel layouts of a model on a given number of GPUs."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import isqrt
from typing import NamedTuple

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.pipeline_layout import LayoutError, PipelineLayout
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.cost_model.stage_costs import flop_costs
from megatron_moe.pipeline.schedule import ScheduleError, check_schedule
from megatron_moe.planner.auto_layout import auto_layout
from megatron_moe.planner.memory_options import without_options

LONG = 8192
"""Minimum sequence length for context parallelism, which costs more time than it saves on shorter sequences."""
MICRO_BATCHES = (1, 2, 4)
MAX_CP = 64
CHUNKS = (1, 2, 3, 4, 6, 8)
"""Numbers of model chunks (virtual stages) per pipeline rank that the search considers."""


class LayoutGrid(NamedTuple):
    """Microbatch size and all parallel sizes except the number of chunks per pipeline rank, which is 1 here."""

    parallel: ParallelConfig
    micro: int


class Layouts:
    """Enumerates the layouts for the model, global batch size and number of GPUs of a plan."""

    def __init__(self, plan: RunPlan, gpu: GPU) -> None:
        self.plan = without_options(plan)
        self.gpu = gpu
        self.world = plan.parallel.world_size
        self._costs = flop_costs(plan.model, plan.data.seq_length)
        self._kinds = tuple(dict.fromkeys(plan.model.layers))
        self._stages: dict[tuple[int, int], PipelineLayout | None] = {}

    def grids(self) -> Iterator[LayoutGrid]:
        """Yields the parallel sizes that the model and the number of GPUs allow, with each of `MICRO_BATCHES`."""
        model = self.plan.model
        tps = [tp for tp in _divisors(self.world) if tp <= self.gpu.per_node]
        cps = [cp for cp in _divisors(self.world) if cp == 1 or (self.plan.data.seq_length >= LONG and cp <= MAX_CP)]
        pps = [pp for pp in _divisors(self.world) if pp <= len(model.layers)]
        num_experts = max(layer.feed_forward.num_routed_experts for layer in model.layers) or 1
        eps = [ep for ep in _divisors(self.world) if num_experts % ep == 0]
        for tp, cp, pp, ep in product(tps, cps, pps, eps):
            for etp in sorted({1, tp}):
                if self._divides(tp, cp, pp, ep, etp):
                    parallel = replace(self.plan.parallel, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
                    parallel = replace(parallel, virtual_stages=1, sequence_parallel=tp > 1, cp_sub_axes=None)
                    yield from (LayoutGrid(parallel, micro) for micro in MICRO_BATCHES)

    def of_grid(self, grid: LayoutGrid) -> Iterator[RunPlan]:
        """Yields plans with these sizes for each of `CHUNKS`: plain, and with overlapped expert communication or, where
        that is impossible, with delayed weight gradients."""
        for vpp in CHUNKS if grid.parallel.pp > 1 else (1,):
            plan = self.of(grid, vpp)
            if plan is not None:
                yield plan
                if _may_overlap(plan):
                    yield with_microbatch_overlap(plan)
                elif grid.parallel.pp > 1:
                    yield replace(plan, pipeline=replace(plan.pipeline, delay_wgrad_compute=True))

    def of(self, grid: LayoutGrid, vpp: int = 1) -> RunPlan | None:
        """Plan with these sizes and `vpp` chunks per pipeline rank; None if layers or batch cannot be divided."""
        parallel, plan = replace(grid.parallel, virtual_stages=vpp), self.plan
        stages = self._layout(parallel.pp, vpp)
        size, unit = plan.batch.global_batch_size, grid.micro * parallel.dp
        if stages is None or size % unit:
            return None
        try:
            check_schedule(replace(plan.pipeline_schedule(size // unit), pp=parallel.pp, vpp=vpp, group_size=None))
        except ScheduleError:
            return None
        batch = replace(plan.batch, micro_batch_size=grid.micro)
        return replace(plan, parallel=parallel, pipeline=PipelineConfig(layout=stages), batch=batch)

    def _divides(self, tp: int, cp: int, pp: int, ep: int, etp: int) -> bool:
        """Whether the dimensions of the model, the sequence and the world size are divisible by these sizes."""
        model = self.plan.model
        if self.world % (tp * cp * pp) or (self.world // pp) % (ep * etp):
            return False
        if model.vocab_size % tp or self.plan.data.seq_length % (tp * cp * (2 if cp > 1 else 1)):
            return False
        for layer in self._kinds:
            if layer.layout_problem(ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)) is not None:
                return False
        return True

    def _layout(self, pp: int, vpp: int) -> PipelineLayout | None:
        """Pipeline layout with stages balanced by FLOPs; None if the model has too few layers to fill them."""
        if (pp, vpp) not in self._stages:
            self._stages[pp, vpp] = None
            with suppress(LayoutError):
                self._stages[pp, vpp] = auto_layout(self._costs, pp=pp, vpp=vpp, num_mtp=self.plan.model.num_mtp)
        return self._stages[pp, vpp]


def with_microbatch_overlap(plan: RunPlan) -> RunPlan:
    """Copy of the plan that overlaps expert communication with another microbatch and delays weight gradients."""
    return replace(plan, pipeline=replace(plan.pipeline, overlap=True, delay_wgrad_compute=True))


def _may_overlap(plan: RunPlan) -> bool:
    """Whether the plan allows `--overlap-moe-expert-parallel-comm`."""
    if plan.parallel.ep == 1 or not all(each.feed_forward.can_overlap_microbatches for each in plan.model.layers):
        return False
    staged = plan.parallel.pp == 1 or plan.layout.vpp > 1
    return plan.model.num_mtp <= 1 and staged and plan.precision.params == "bf16"


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
