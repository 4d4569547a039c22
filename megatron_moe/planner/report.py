"""Contents of the dry-run report as JSON values. Memory is in GiB, communication in GB (1e9 bytes)."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.activations import activation_sizes
from megatron_moe.cost_model.expert_load import expected_maximum
from megatron_moe.cost_model.hardware import GIB, GPU
from megatron_moe.cost_model.memory import RankBytes, RankMemory, rank_with_peak_memory
from megatron_moe.cost_model.microbatch_counts import num_simulated_groups
from megatron_moe.cost_model.parameters import count_parameters
from megatron_moe.cost_model.placement import Placement, Placements
from megatron_moe.cost_model.shards import elements_of_stage
from megatron_moe.cost_model.step_time import MANY_GROUPS, StepTime, peak_in_flight, stage_costs, step_time
from megatron_moe.cost_model.traffic import Communication, Traffic
from megatron_moe.parallel.grid import ATTENTION_GROUPS, EXPERT_GROUPS, attention_grid, expert_grid
from megatron_moe.planner.estimator import Estimator, StepEstimate, estimate_values
from megatron_moe.planner.memory_options import enabled_options

ReportValues = dict[str, Any]
RESERVE_GIB = 3.0
"""GPU memory that a plan must leave free for the CUDA context, NCCL, library workspaces and fragmentation."""
_MAX_COMPUTATIONS = 50_000
"""Maximum number of forwards in a simulated schedule, over all ranks. Simulating this many takes half a second."""


def too_long_to_simulate(plan: RunPlan) -> str | None:
    """Message if simulating the plan's pipeline schedule would take longer than about a second, else None."""
    interval = plan.memory.moe_expert_wgrad_interval
    config = plan.pipeline_schedule(plan.num_microbatches)
    groups = max(MANY_GROUPS, num_simulated_groups(interval))
    simulated = min(config.num_microbatches, groups * config.group)
    if simulated * config.vpp * config.pp <= _MAX_COMPUTATIONS:
        return None
    return (
        f"the schedule is periodic only after {simulated:,} microbatches on {config.pp} pipeline ranks x "
        f"{config.vpp} chunks (groups of {config.group:,} microbatches, weight gradients of experts every "
        f"{interval:,}): too long to simulate"
    )


def report_values(plan: RunPlan, gpu: GPU) -> ReportValues:
    """Dry-run report of a plan. If layers are unsupported, it contains only the device, the ranks and the schedule."""
    placements = Placements(gpu).placements_of_groups(plan.parallel)
    sizes: ReportValues = {
        "unknown_layers": list(plan.unknown_layers),
        "device": {
            "kind": gpu.kind,
            "name": gpu.label,
            "figures": gpu.summary if gpu.is_custom else None,
            "memory_gib": gpu.memory_gib,
            "bf16_tflops": gpu.bf16 / 1e12,
        },
        "ranks": _ranks(plan, gpu, placements),
        "schedule": _schedule(plan),
    }
    if plan.unknown_layers:
        return sizes
    memory = RankMemory(plan)
    ranks = memory.all_ranks()
    time, estimate = step_time(plan, gpu), Estimator(plan, gpu, placements).step()
    traffic = Communication(plan, placements)
    return {
        **sizes,
        "model": _model(plan),
        "stages": list(_stages(plan)),
        "memory": {
            **_memory(ranks, memory, plan, gpu),
            "switches": list(_switches(plan, memory, rank_with_peak_memory(ranks), gpu, placements, estimate)),
        },
        "schedule": sizes["schedule"] | {"layout": str(plan.layout), "bubble": time.bubble},
        "communication": [_traffic(each, gpu) for each in traffic.of_rank(rank_with_peak_memory(ranks).rank)],
        "experts": _experts(plan, traffic),
        "padding": {"expert_rows": _expert_rows(plan), "packed_rows": None},
        "time": _time(plan, time, gpu) | {"estimate": estimate_values(plan, estimate)},
    }


def _model(plan: RunPlan) -> ReportValues:
    total, active = count_parameters(plan.model), count_parameters(plan.model, active=True)
    layers = plan.model.layers
    return {
        "parameters": total.total,
        "active_parameters": active.total,
        "parameters_without_mtp": total.without_mtp.total,
        "dense_layers": sum(layer.feed_forward.present and not layer.is_moe for layer in layers),
        "moe_layers": sum(layer.is_moe for layer in layers),
        "mtp_layers": plan.model.num_mtp,
        "by_kind": {kind: count for kind, count in asdict(total).items() if count},
    }


def _ranks(plan: RunPlan, gpu: GPU, placements: dict[str, Placement]) -> ReportValues:
    parallel = plan.parallel
    names = [name for name, _ in (*ATTENTION_GROUPS, *EXPERT_GROUPS)]
    return {
        "world_size": parallel.world_size,
        "nodes": -(-parallel.world_size // gpu.per_node),
        "ranks_per_node": min(gpu.per_node, parallel.world_size),
        "ranks_per_nvlink_domain": min(gpu.domain_ranks(parallel.world_size), parallel.world_size),
        "order": parallel.order,
        "attention_grid": dict(attention_grid(parallel).axes),
        "expert_grid": dict(expert_grid(parallel).axes),
        "groups": {
            name: {"size": placements[name].size, "where": str(placements[name])}
            for name in names
            if placements[name].size > 1
        },
    }


def _stages(plan: RunPlan) -> Iterator[ReportValues]:
    costs = stage_costs(plan)
    for index, stage in enumerate(plan.layout.stages):
        rank, chunk = plan.layout.stage_map.rank_and_chunk(index)
        yield {
            "stage": index,
            "pipeline_rank": rank,
            "chunk": chunk,
            "holds": str(stage) or "nothing",
            "layers": len(stage.layers),
            "parameters_per_rank": elements_of_stage(plan.model, stage, plan.parallel).total,
            "share_of_flops": costs[index] / sum(costs),
        }


def _memory(ranks: Sequence[RankBytes], memory: RankMemory, plan: RunPlan, gpu: GPU) -> ReportValues:
    most = rank_with_peak_memory(ranks)
    spare = gpu.memory_gib - most.total / GIB
    return {
        "pipeline_ranks": [
            {
                "pipeline_rank": rank.rank,
                "parameters_per_rank": rank.parameters.total,
                "state_gib": rank.state.total / GIB,
                "activations_gib": rank.activation_bytes / GIB,
                "total_gib": rank.total / GIB,
                "in_flight": rank.in_flight,
            }
            for rank in ranks
        ],
        "heaviest": {"pipeline_rank": most.rank, "gib": {name: size / GIB for name, size in _categories(most)}},
        "total_gib": most.total / GIB,
        "device_gib": gpu.memory_gib,
        "spare_gib": spare,
        "fits": spare >= RESERVE_GIB,
        "host_gib": most.on_host / GIB,
        "tensors": list(_tensors(memory, plan)),
    }


def _categories(rank: RankBytes) -> Iterator[tuple[str, float]]:
    yield from vars(rank.state).items()
    for module, size in rank.activations:
        yield f"activations: {module}", size
    yield "dispatch buffers", rank.dispatch
    yield "dispatch receive slots", rank.receive_slots
    yield "tensor-parallel slots", rank.sequence_slots
    yield "context-parallel slots", rank.context_slots
    yield "workspace", rank.workspace
    yield "graph pools", rank.graphs
    yield "pipeline buffers", rank.transfers


def _tensors(memory: RankMemory, plan: RunPlan) -> Iterator[ReportValues]:
    """Yields the tensors saved for backward by each distinct layer for one microbatch."""
    for layer in dict.fromkeys(plan.model.layers):
        sizes: ReportValues = {"layer": plan.model.layers.index(layer)}
        for each in memory.tensors(layer):
            yield sizes | {name: getattr(each, name) for name in ("module", "name", "shape", "bytes")}


def _switches(
    plan: RunPlan,
    memory: RankMemory,
    most: RankBytes,
    gpu: GPU,
    placements: dict[str, Placement],
    estimate: StepEstimate,
) -> Iterator[ReportValues]:
    """Yields the memory saving and the slowdown of each enabled memory option, estimated by disabling only this option.
    Options overlap, so their savings cannot be added: a module may be recomputed as part of a larger one."""
    for option in enabled_options(plan):
        without = option.apply(plan)
        saves = memory.on_another_plan(without).of_rank(most.rank).total - most.total
        slower = estimate.total / Estimator(without, gpu, placements).step().total - 1
        yield {"flags": option.flags, "saves_gib": saves / GIB, "slower": slower}


def _schedule(plan: RunPlan) -> ReportValues:
    config = plan.pipeline_schedule(plan.num_microbatches)
    return {
        "microbatches": config.num_microbatches,
        "micro_batch_size": plan.batch.micro_batch_size,
        "global_batch_size": plan.batch.global_batch_size,
        "pipeline_ranks": config.pp,
        "virtual_stages": config.vpp,
        "in_flight": list(peak_in_flight(config)),
    }


def _traffic(traffic: Traffic, gpu: GPU) -> ReportValues:
    return {
        "group": traffic.group,
        "what": traffic.what,
        "gb": traffic.bytes / 1e9,
        "network_gb": traffic.network_bytes / 1e9,
        "ms": traffic.seconds(gpu) * 1e3,
        "overlapped": traffic.hidden,
    }


def _experts(plan: RunPlan, communication: Communication) -> ReportValues | None:
    """Expert load and dispatch volume for one MoE layer and microbatch; None without MoE or expert parallelism."""
    exchange = next(filter(None, map(communication.exchange, plan.model.layers)), None)
    if exchange is None or plan.parallel.ep == 1:
        return None
    traffic, num_ranks = communication.expert_traffic(exchange), plan.parallel.ep
    megabytes = {
        "a row per choice": traffic.rows_sent * traffic.row_bytes / 1e6,
        "a copy per rank": traffic.copies_sent * traffic.row_bytes / 1e6,
    }
    return {
        "transport": exchange.transport.name,
        "experts_per_rank": exchange.num_experts // num_ranks,
        "ranks_per_token": asdict(traffic.ranks),
        "nvlink_domains_per_token": asdict(traffic.domains),
        "rows_per_rank": asdict(traffic.rows_taken) | {"fullest": expected_maximum(traffic.rows_taken, num_ranks)},
        "dispatch_mb": {
            **megabytes,
            "a row per choice, fp8": traffic.rows_sent * traffic.low_row_bytes / 1e6,
            "a copy per rank, fp8": traffic.copies_sent * traffic.low_row_bytes / 1e6,
        },
        "combine_mb": megabytes,
    }


def _expert_rows(plan: RunPlan) -> ReportValues | None:
    """Rows of the first MoE layer's experts, with the fractions that are padding; None if there are no experts."""
    num_tokens = activation_sizes(plan).residual
    found = (layer.feed_forward.expected_rows(plan.parallel, num_tokens) for layer in plan.model.layers)
    rows = next(filter(None, found), None)
    if rows is None:
        return None
    shares = {f"padding_of_{name}": 1 - rows.routed / getattr(rows, name) for name in ("computed", "allocated")}
    return asdict(rows) | shares if max(shares.values()) > 1e-9 else None


def _time(plan: RunPlan, time: StepTime, gpu: GPU) -> ReportValues:
    tokens = plan.batch.global_batch_size * plan.data.seq_length
    world = plan.parallel.world_size
    return {
        "flops_per_step": time.flops.total,
        "flops_per_token": time.per_token,
        "by_kind": {kind: count / time.flops.total for kind, count in asdict(time.flops).items() if count},
        "tokens_per_step": tokens,
        "gemms_in": "fp8" if plan.precision.low_precision else gpu.peak_flops_for(plan.precision.params)[1],
        "compute_ms": time.compute * 1e3,
        "bound_ms": time.bound * 1e3,
        "bound_tflops_per_gpu": time.flops.total / time.bound / world / 1e12,
        "bound_tokens_per_second_per_gpu": tokens / time.bound / world,
    }
