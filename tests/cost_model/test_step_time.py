"""Pipeline bubble against the published formula and the simulator; step-time bound against peak rates."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig, ScheduleConfig
from megatron_moe.config.pipeline_layout import even_layout
from megatron_moe.config.precision import PrecisionConfig, low_precision_config
from megatron_moe.config.training import BatchConfig
from megatron_moe.cost_model.hardware import GPUS
from megatron_moe.cost_model.step_time import peak_in_flight, pipeline_bubble, stage_costs, step_time
from megatron_moe.pipeline.actions import actions_of
from megatron_moe.pipeline.schedule import (
    ScheduleError,
    Task,
    build_schedule,
    check_schedule,
    completed_task,
    computations,
    required_tasks,
)
from megatron_moe.pipeline.simulator import Durations, most_in_flight, simulate
from tests.helpers import tiny
from tests.helpers.tolerances import FP64_REF


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"), [(1, 1, 4), (4, 1, 8), (4, 1, 3), (8, 4, 16), (4, 2, 200), (2, 3, 64)]
)
def test_bubble_of_even_stages_is_warm_up_and_cool_down(pp, vpp, microbatches):
    """The bubble is (pp - 1) / vpp of a microbatch's time per rank (arXiv 2104.04473, section 2.2)."""
    config = ScheduleConfig(num_microbatches=microbatches, pp=pp, vpp=vpp)
    idle = (pp - 1) / vpp
    FP64_REF.check(pipeline_bubble(config, (1.0,) * (pp * vpp)), idle / (idle + microbatches))


@pytest.mark.parametrize("vpp", [1, 2])
def test_bubble_of_uneven_stages_is_bounded_by_the_slowest_rank(vpp):
    costs = tuple(1.0 + index % 3 for index in range(4 * vpp))
    config = ScheduleConfig(num_microbatches=16, pp=4, vpp=vpp)
    bubble = pipeline_bubble(config, costs)
    dearest = max(sum(costs[rank::4]) for rank in range(4))
    assert bubble > 1 - sum(costs) / (4 * dearest)
    strict = simulate(config.stages, build_schedule(config), durations=Durations(stage_costs=costs)).bubble
    assert bubble <= strict + 1e-12  # that one also waits for transfers


def test_many_microbatches_are_extrapolated():
    costs = (1.0, 3.0, 2.0, 1.5, 1.0, 1.0, 2.5, 1.0)
    few = ScheduleConfig(num_microbatches=24, pp=4, vpp=2)
    many = replace(few, num_microbatches=240)
    dearest = max(sum(costs[rank::4]) for rank in range(4))

    def length(config: ScheduleConfig) -> float:
        return config.num_microbatches * 3 * sum(costs) / 4 / (1 - pipeline_bubble(config, costs))

    FP64_REF.check((length(many) - length(few)) / 216, 3 * dearest)


def step_length(config: ScheduleConfig, costs: Sequence[float], weight_grads: Sequence[float]) -> float:
    """Duration of the schedule's computations on all ranks, where transfers take no time."""
    ends: dict[Task, float] = {}
    free = [0.0] * config.pp
    queues = [
        [action for entry in computations(config, rank) for action in actions_of(entry)] for rank in range(config.pp)
    ]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and all(task in ends for task in required_tasks(config.stages, rank, queue[0])):
                action = queue.pop(0)
                inputs = [ends[task] for task in required_tasks(config.stages, rank, action)]
                stage = config.stages.stage(rank, action.chunk)
                backward, late = 2 * costs[stage], weight_grads[stage]
                times = {"backward": backward, "backward_input": backward - late, "backward_weight": late}
                free[rank] = max([free[rank], *inputs]) + times.get(action.kind, costs[stage])
                ends |= {task: free[rank] for task in completed_task(config.stages, rank, action)}
    return max(free)


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("pp", "vpp", "group_size"), [(2, 1, None), (4, 1, None), (2, 3, 3), (3, 2, None)])
def test_bubble_is_that_of_the_scheduled_computations(pp, vpp, group_size, overlap, split_backward):
    config = ScheduleConfig(
        num_microbatches=12, pp=pp, vpp=vpp, group_size=group_size, overlap=overlap, split_backward=split_backward
    )
    costs = tuple(1.0 + 3 * index % 5 for index in range(pp * vpp))
    weights = tuple(cost / (1 + index % 3) for index, cost in enumerate(costs))
    bubble = pipeline_bubble(config, costs, weights)
    FP64_REF.check(bubble, 1 - 12 * 3 * sum(costs) / pp / step_length(config, costs, weights))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_microbatches_in_flight_are_those_of_the_simulated_schedule(pp, vpp, overlap, split):
    if pp == 1 and vpp > 1:
        return
    for microbatches in range(1, 5 * pp):
        for group in range(pp, 2 * pp + 1):
            config = ScheduleConfig(
                num_microbatches=microbatches, pp=pp, vpp=vpp, group_size=group, overlap=overlap, split_backward=split
            )
            with suppress(ScheduleError):
                check_schedule(config)
                assert peak_in_flight(config) == tuple(
                    most_in_flight(computations(config, rank)) for rank in range(pp)
                ), config


def test_the_bound_is_operations_over_peak_and_bubble():
    layout = even_layout(4, pp=2)
    plan = tiny.plan(
        model=tiny.model(num_layers=4),
        parallel=ParallelConfig(pp=2, world_size=4),
        pipeline=PipelineConfig(layout=layout),
        precision=PrecisionConfig(params="bf16"),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=16),
    )
    gpu = GPUS["h100"]
    time = step_time(plan, gpu)
    FP64_REF.check(time.compute, time.flops.total / 4 / gpu.bf16)
    FP64_REF.check(time.bound, time.compute / (1 - time.bubble))
    FP64_REF.check(time.per_token * 16 * tiny.SEQ, time.flops.total)
    FP64_REF.check(time.bubble, pipeline_bubble(plan.pipeline_schedule(4), stage_costs(plan)))
    weights, core = stage_costs(plan, with_weights=True), time.flops.core_attention / 16
    FP64_REF.check(sum(stage_costs(plan)) - sum(weights), core)
    batch = replace(plan.batch, global_batch_size=4)
    delayed = replace(plan, pipeline=replace(plan.pipeline, delay_wgrad_compute=True), batch=batch)
    schedule = delayed.pipeline_schedule(1)
    FP64_REF.check(step_time(delayed, gpu).bubble, pipeline_bubble(schedule, stage_costs(plan), weights))
    assert step_time(delayed, gpu).bubble > pipeline_bubble(schedule, stage_costs(plan))
    low = step_time(
        replace(plan, precision=PrecisionConfig(params="bf16", low_precision=low_precision_config("blockwise"))), gpu
    )
    in_bf16 = time.flops.head + time.flops.core_attention
    FP64_REF.check(low.compute, (in_bf16 + (time.flops.total - in_bf16) / 2) / 4 / gpu.bf16)


def test_gpu_rates_are_those_of_the_data_sheets():
    assert [gpu.bf16 / 1e12 for gpu in GPUS.values()] == [
        *(312, 989, 989, 989, 2250, 2250, 2500, 2500, 4000),
        *(71, 165.2, 209.5, 154.8, 362),  # cards for workstations
    ]
    assert [gpu.fp8 / 1e12 for gpu in GPUS.values()] == [
        *(312, 1978, 1978, 1978, 4500, 4500, 5000, 5000, 17500),
        *(71, 330.4, 419, 154.8, 724),
    ]
    assert all(gpu.nvlink > gpu.network for gpu in GPUS.values())
    assert GPUS["gb200"].domain_ranks(72) == 72
    assert GPUS["gb200"].domain_ranks(256) == 64
    assert GPUS["h100"].domain_ranks(256) == 8
