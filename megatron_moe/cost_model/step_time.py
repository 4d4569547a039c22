"""FLOPs of a step, a lower bound on its time, and the pipeline bubble."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_moe.config.pipeline import ScheduleConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.flops import FlopCount, count_flops
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.cost_model.stage_costs import StageCosts, flop_costs
from megatron_moe.pipeline.actions import actions_of
from megatron_moe.pipeline.schedule import Task, completed_task, computations, num_warmup, required_tasks

MANY_GROUPS = 6
"""Number of microbatch groups to simulate. Every further group prolongs the steady phase by the same time."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """FLOPs of a training step, a lower bound on its time, and the pipeline bubble."""

    flops: FlopCount
    """FLOPs of the step over all ranks, according to Megatron's formula."""
    per_token: float
    """FLOPs per token."""
    compute: float
    """Compute time of one rank in seconds, at peak rates and with FLOPs divided evenly over ranks."""
    bubble: float
    """Fraction of the step in which ranks are idle because of the pipeline."""

    @property
    def bound(self) -> float:
        """Lower bound on the time of the step in seconds: compute time plus bubble, without communication."""
        return self.compute / (1 - self.bubble)


def step_time(plan: RunPlan, gpu: GPU) -> StepTime:
    """FLOPs, time and bubble of a step with the full global batch size."""
    seq, batch, world = plan.data.seq_length, plan.batch.global_batch_size, plan.parallel.world_size
    flops = count_flops(plan.model, batch, seq)
    low = plan.precision.low_precision is not None
    gemms = flops.attention + flops.dense_mlp + flops.experts + flops.shared
    rate, _ = gpu.rate(plan.precision.params)
    seconds = (flops.total - gemms) / rate + gemms / (gpu.fp8 if low else rate)
    return StepTime(
        flops=flops,
        per_token=flops.total / (batch * seq),
        compute=seconds / world,
        bubble=pipeline_bubble(plan.pipeline_schedule(plan.num_microbatches), stage_costs(plan)),
    )


def stage_costs(plan: RunPlan) -> tuple[float, ...]:
    """Forward and backward FLOPs of each pipeline stage for one sequence, in model order."""
    costs: StageCosts = flop_costs(plan.model, plan.data.seq_length)
    return tuple(costs.of_stage(stage) for stage in plan.layout.stages)


def pipeline_bubble(config: ScheduleConfig, costs: Sequence[float]) -> float:
    """Fraction of a step in which ranks are idle if transfers take no time and backward takes twice as long as forward.

    `costs`: relative cost of each stage, in model order. Simulates the first groups of microbatches and extrapolates,
    because every further group prolongs the steady phase by the same time.
    """
    if config.pp == 1:
        return 0.0
    few = config
    if config.num_microbatches > MANY_GROUPS * config.group:
        few = replace(config, num_microbatches=MANY_GROUPS * config.group + config.num_microbatches % config.group)
    time = _step_length(few, costs)
    groups_left = (config.num_microbatches - few.num_microbatches) // config.group
    if groups_left:
        fewer = replace(few, num_microbatches=few.num_microbatches - config.group)
        time += groups_left * (time - _step_length(fewer, costs))
    return 1 - config.num_microbatches * 3 * sum(costs) / (time * config.pp)


def _step_length(config: ScheduleConfig, costs: Sequence[float]) -> float:
    """Duration of a step in units of `costs`. A computation starts once its rank is idle and its inputs exist."""
    stages = config.stages
    queues = [
        [action for entry in computations(config, rank) for action in actions_of(entry)] for rank in range(config.pp)
    ]
    done: dict[Task, float] = {}
    free, at, moved = [0.0] * config.pp, [0] * config.pp, True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue):
                action = queue[at[rank]]
                start = free[rank]
                for task in required_tasks(stages, rank, action):
                    ready = done.get(task, inf)
                    start = ready if ready > start else start
                if start == inf:
                    break
                weight = 2 if action.kind == "backward" else 1
                free[rank] = start + weight * costs[stages.stage(rank, action.chunk)]
                for task in completed_task(stages, rank, action):
                    done[task] = free[rank]
                at[rank] += 1
                moved = True
    assert all(place == len(queue) for place, queue in zip(at, queues, strict=True)), (
        f"the schedule {config} has no end"
    )
    return max(free)


def peak_in_flight(config: ScheduleConfig) -> tuple[int, ...]:
    """Returns, for each pipeline rank, the peak number of (microbatch, chunk) pairs between forward and backward."""
    total = config.num_microbatches * config.vpp
    return tuple(min(num_warmup(config, rank) + 1, total) for rank in range(config.pp))
