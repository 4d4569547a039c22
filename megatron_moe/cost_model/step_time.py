"""FLOPs of a step, a lower bound on its time, and the pipeline bubble."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf

from megatron_moe.config.pipeline import ScheduleConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.flops import FlopCount, count_flops
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.cost_model.stage_costs import StageCosts, flop_costs
from megatron_moe.pipeline.schedule import chunk_order, num_delayed, num_warmup

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
    rate, _ = gpu.peak_flops_for(plan.precision.params)
    seconds = (flops.total - gemms) / rate + gemms / (gpu.fp8 if low else rate)
    return StepTime(
        flops=flops,
        per_token=flops.total / (batch * seq),
        compute=seconds / world,
        bubble=pipeline_bubble(
            plan.pipeline_schedule(plan.num_microbatches), stage_costs(plan), stage_costs(plan, with_weights=True)
        ),
    )


def stage_costs(plan: RunPlan, *, with_weights: bool = False) -> tuple[float, ...]:
    """Forward and backward FLOPs of each pipeline stage for one sequence, in model order. `with_weights`: only those of
    GEMMs with weight matrices."""
    costs: StageCosts = flop_costs(plan.model, plan.data.seq_length, with_weights=with_weights)
    return tuple(costs.of_stage(stage) for stage in plan.layout.stages)


def pipeline_bubble(config: ScheduleConfig, costs: Sequence[float], with_weights: Sequence[float] = ()) -> float:
    """Fraction of a step in which ranks are idle if transfers take no time and backward takes twice as long as forward.

    `costs`: relative cost of each stage, in model order. `with_weights`: cost of its GEMMs with weight matrices, a
    third of which is that of weight gradients; by default, its whole cost. Simulates the first groups of microbatches
    and extrapolates, because every further group prolongs the steady phase by the same time.
    """
    if config.pp == 1:
        return 0.0
    few = config
    if config.num_microbatches > MANY_GROUPS * config.group:
        few = replace(config, num_microbatches=MANY_GROUPS * config.group + config.num_microbatches % config.group)
    with_weights = with_weights or costs
    time = _step_length(few, costs, with_weights)
    groups_left = (config.num_microbatches - few.num_microbatches) // config.group
    if groups_left:
        fewer = replace(few, num_microbatches=few.num_microbatches - config.group)
        time += groups_left * (time - _step_length(fewer, costs, with_weights))
    return 1 - config.num_microbatches * 3 * sum(costs) / (time * config.pp)


def _step_length(config: ScheduleConfig, costs: Sequence[float], with_weights: Sequence[float]) -> float:
    """Duration of a step in units of `costs`. A computation starts once its rank is idle and its inputs exist.

    The order on a rank is that of `pipeline.schedule.computations`. Task t of a microbatch is its forward on stage t
    or, after the last stage, its backward on stage 2 * num_stages - 1 - t; it requires task t - 1.
    """
    num, pp, last = config.num_microbatches, config.pp, 2 * config.stages.num_stages - 1
    # task t of microbatch m ends at ends[t * num + m]; the last entries are the inputs of task 0, with negative indices
    ends = [inf] * ((last + 1) * num) + [0.0] * num
    order = chunk_order(config)
    queues = []
    for rank in range(pp):
        stages = [config.stages.stage(rank, chunk) for chunk in range(config.vpp)]
        forwards = [(stages[chunk] * num + microbatch, costs[stages[chunk]], 0.0) for microbatch, chunk in order]
        stages.reverse()
        backwards = [
            ((last - stages[chunk]) * num + microbatch, 2 * costs[stages[chunk]], 0.0) for microbatch, chunk in order
        ]
        warmup = num_warmup(config, rank)
        steady = len(order) - warmup
        if config.split_backward and pp > 1:  # the weight gradients are computed last; no other task requires them
            first = steady if config.overlap else 0
            late = [with_weights[stages[chunk]] for _, chunk in order[first:]]
            rests = _delayed(late, num_delayed(config, rank))
            split = zip(backwards[first:], late, rests, strict=True)
            backwards[first:] = [(index, time - weight_grads, rest) for (index, time, _), weight_grads, rest in split]
        pairs = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        queues.append([*forwards[:warmup], *pairs, *backwards[steady:]])
    free, at, moved = [0.0] * pp, [0] * pp, True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            now, position = free[rank], at[rank]
            for index, time, rest in islice(queue, position, None):
                ready = ends[index - num]
                if ready == inf:
                    break
                ends[index] = now = (now if now > ready else ready) + time
                now += rest
                position += 1
            moved = moved or position > at[rank]
            free[rank], at[rank] = now, position
    assert all(place == len(queue) for place, queue in zip(at, queues, strict=True)), (
        f"the schedule {config} has no end"
    )
    return max(free)


def _delayed(times: Sequence[float], delay: int) -> list[float]:
    """Returns `times` moved `delay` places towards the end; the last entry includes those moved beyond it."""
    kept = max(len(times) - delay, 0)
    moved = [*[0.0] * min(delay, len(times)), *times[:kept]]
    if moved:
        moved[-1] += sum(times[kept:])
    return moved


def peak_in_flight(config: ScheduleConfig) -> tuple[int, ...]:
    """Returns, for each pipeline rank, the peak number of (microbatch, chunk) pairs between forward and backward."""
    total = config.num_microbatches * config.vpp
    return tuple(min(num_warmup(config, rank) + 1 + num_delayed(config, rank), total) for rank in range(config.pp))
