"""Enumeration of the valid layouts of a model on a number of GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt

from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.pipeline.auto_layout import auto_layout, flop_costs
from megatron_moe.pipeline.layout import LayoutError, PipelineLayout
from megatron_moe.pipeline.schedule import ScheduleError, check_schedule
from megatron_moe.planner.memory_options import without_options

LONG = 8192
"""Shortest sequence for context parallelism; below it, the exchange costs more than it saves (phase 2 of the paper)."""
MICRO_BATCHES = (1, 2, 4)
MAX_CP = 64
CHUNKS = (1, 2, 3, 4, 6, 8)
"""Virtual stages per pipeline rank."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Parallel sizes and the microbatch size."""

    tp: int
    cp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    micro: int


class Layouts:
    """Layouts of the model, batch and number of GPUs of a plan."""

    def __init__(self, plan: RunPlan, gpu: GPU) -> None:
        self.plan = without_options(plan)
        self.gpu = gpu
        self.world = plan.parallel.world_size
        self._costs = flop_costs(plan.model, plan.data.seq_length)
        self._stages: dict[tuple[int, int], PipelineLayout | None] = {}

    def grids(self) -> Iterator[Degrees]:
        """Sizes that divide the model and the ranks, for each microbatch size, with one chunk per pipeline rank."""
        model = self.plan.model
        tps = [tp for tp in _divisors(self.world) if tp <= self.gpu.per_node]
        cps = [cp for cp in _divisors(self.world) if cp == 1 or (self.plan.data.seq_length >= LONG and cp <= MAX_CP)]
        pps = [pp for pp in _divisors(self.world) if pp <= len(model.layers)]
        num_experts = model.moe_configs[0].experts.num_experts if model.moe_configs else 1
        eps = [ep for ep in _divisors(self.world) if num_experts % ep == 0]
        for tp, cp, pp, ep in product(tps, cps, pps, eps):
            for etp in sorted({1, tp}):
                degrees = Degrees(tp=tp, cp=cp, pp=pp, vpp=1, ep=ep, etp=etp, micro=1)
                if self._divides(degrees):
                    yield from (replace(degrees, micro=micro) for micro in MICRO_BATCHES)

    def of_grid(self, grid: Degrees) -> Iterator[RunPlan]:
        """Plans with these sizes and each number of chunks, without and with overlapped expert communication."""
        for vpp in CHUNKS if grid.pp > 1 else (1,):
            plan = self.of(replace(grid, vpp=vpp))
            if plan is not None:
                yield plan
                if _may_overlap(plan):
                    yield overlapped(plan)

    def of(self, degrees: Degrees) -> RunPlan | None:
        """The plan with these sizes; None if the layers or the batch do not divide."""
        stages = self._layout(degrees.pp, degrees.vpp)
        if stages is None:
            return None
        parallel = replace(
            self.plan.parallel,
            tp=degrees.tp,
            cp=degrees.cp,
            pp=degrees.pp,
            ep=degrees.ep,
            etp=degrees.etp,
            virtual_stages=degrees.vpp,
            sequence_parallel=degrees.tp > 1,
            cp_sub_axes=None,
        )
        if not self._batch_divides(parallel, degrees):
            return None
        return replace(
            self.plan,
            parallel=parallel,
            pipeline=PipelineConfig(layout=stages),
            batch=replace(self.plan.batch, micro_batch_size=degrees.micro),
        )

    def _divides(self, degrees: Degrees) -> bool:
        """Whether heads, channels, vocabulary and sequence divide among the ranks, and both grids cover the world."""
        model, tp, cp = self.plan.model, degrees.tp, degrees.cp
        ranks = tp * cp * degrees.pp
        if self.world % ranks or (self.world // degrees.pp) % (degrees.ep * degrees.etp):
            return False
        if model.vocab_size % tp or self.plan.data.seq_length % (tp * cp * (2 if cp > 1 else 1)):
            return False
        for layer in dict.fromkeys(model.layers):
            mixer, feed_forward = layer.mixer, layer.feed_forward
            if mixer.num_heads % tp or isinstance(mixer, AttentionConfig) and not mixer.groups_divide_over(tp):
                return False
            if isinstance(feed_forward, MoEConfig):
                wide = feed_forward.shared.mlp.ffn_hidden_size if feed_forward.shared else 0
                if wide % tp or feed_forward.experts.ffn_hidden_size % degrees.etp:
                    return False
            elif feed_forward.ffn_hidden_size % tp:
                return False
        return True

    def _batch_divides(self, parallel: ParallelConfig, degrees: Degrees) -> bool:
        size, unit = self.plan.batch.global_batch_size, degrees.micro * parallel.dp
        if size % unit:
            return False
        try:
            check_schedule(replace(self.plan.schedule(size // unit), pp=degrees.pp, vpp=degrees.vpp, group_size=None))
        except ScheduleError:
            return False
        return True

    def _layout(self, pp: int, vpp: int) -> PipelineLayout | None:
        """Stages balanced by operations; None if the layers cannot fill them."""
        if (pp, vpp) not in self._stages:
            try:
                found = auto_layout(self._costs, pp=pp, vpp=vpp, num_mtp=self.plan.model.num_mtp)
            except LayoutError:
                found = None
            self._stages[pp, vpp] = found
        return self._stages[pp, vpp]


def overlapped(plan: RunPlan) -> RunPlan:
    """The plan with expert communication overlapped with another microbatch."""
    return replace(plan, pipeline=replace(plan.pipeline, overlap=True, delay_wgrad_compute=True))


def _may_overlap(plan: RunPlan) -> bool:
    """Whether the rules of `--overlap-moe-expert-parallel-comm` allow it for this plan."""
    moe = plan.model.moe_configs
    if plan.parallel.ep == 1 or not moe or any(each.dispatcher == "allgather" or each.shared_overlap for each in moe):
        return False
    staged = plan.parallel.pp == 1 or plan.layout.vpp > 1
    return plan.model.num_mtp <= 1 and staged and plan.precision.params == "bf16"


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
