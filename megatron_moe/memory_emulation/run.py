"""Emulates the memory of the requested ranks (`--fake-init-process-group`) and writes a table, JSON report and plot."""

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GIB, GPU, GPUS
from megatron_moe.logs.plots import draw_memory
from megatron_moe.memory_emulation.rank import EmulatedRun, emulate_rank
from megatron_moe.memory_emulation.tracker import CATEGORIES, MemoryPeak
from megatron_moe.parallel.collectives import ignore_renamed_collectives
from megatron_moe.parallel.grid import all_groups

ReportValues = dict[str, Any]
_LEAST_SHARE = 0.0005
"""A table row is omitted if all its values are below this fraction of the largest peak."""
_POINTS = 1500
"""Number of points in the timeline plot."""


def emulate(plan: RunPlan) -> str:
    """Emulates the requested ranks and returns the table. Writes the JSON report and the plot if they are requested.

    Raises RunError if the plan cannot be emulated or a file cannot be written.
    """
    config = plan.emulation
    assert config is not None, "the plan has no emulation"
    ignore_renamed_collectives()
    device = _device(plan)
    # default: the first rank of every pipeline stage
    ranks = config.ranks or tuple(all_groups(plan.parallel)["pp"][0])
    runs = []
    for rank in ranks:
        runs.append(emulate_rank(plan, rank, device))
        gc.collect()
    gpu = GPUS[config.gpu]
    gpu = gpu if config.gpu_memory is None else replace(gpu, memory_gib=config.gpu_memory)
    values = report_values(plan, gpu, runs, real=device.type == "cuda")
    try:
        if config.emulate_json is not None:
            config.emulate_json.write_text(json.dumps(values, indent=2) + "\n")
        if config.emulate_plot is not None:
            curves = {
                f"rank {run.rank}, pipeline rank {run.pipeline_rank}": run.timeline.curves(_POINTS)[1] for run in runs
            }
            draw_memory(curves, config.emulate_plot)
    except OSError as error:
        raise EnvironmentProblem(f"the emulation's results could not be written: {error}") from error
    return report(values)


def _device(plan: RunPlan) -> torch.device:
    """Device on which to emulate: `meta` if the plan requests the CPU or torch finds no GPU, otherwise GPU 0."""
    if plan.device == "cpu" or not torch.cuda.is_available():
        if plan.device == "cuda":
            raise EnvironmentProblem("--device cuda was requested, but torch finds no CUDA device; use --device cpu")
        return torch.device("meta")
    if plan.parallel.ep > 1 and not all(each.feed_forward.uses_route_kernel for each in plan.model.layers):
        raise EnvironmentProblem(
            "on a GPU, sinkhorn balancing selects experts itself, which is incompatible with the expert load that the "
            "emulation assumes; emulate with --device cpu"
        )
    return torch.device("cuda", 0)


def report_values(plan: RunPlan, gpu: GPU, runs: Sequence[EmulatedRun], *, real: bool) -> ReportValues:
    """Contents of the JSON report, with sizes in bytes. `real`: whether the steps ran on a GPU, not on `meta`."""
    assert plan.emulation is not None
    return {
        "world_size": plan.parallel.world_size,
        "device": {"kind": gpu.kind, "memory_bytes": int(gpu.memory_gib * GIB), "real": real},
        "imbalance": plan.emulation.emulate_imbalance,
        "layout": str(plan.layout),
        "ranks": [_rank(each) for each in runs],
    }


def _rank(run: EmulatedRun) -> ReportValues:
    peak = run.timeline.peak()
    values: ReportValues = {
        "rank": run.rank,
        "pipeline_rank": run.pipeline_rank,
        "microbatches": run.num_microbatches,
        "peak_bytes": peak.total,
        "peak_phase": peak.phase,
        "categories": dict(peak.categories),
        "by_module": {name: _modules(peak, name) for name in CATEGORIES if _modules(peak, name)},
    }
    if run.allocator_peak is not None:
        values["allocator_peak_bytes"] = run.allocator_peak
        values["requested_peak_bytes"] = run.requested_peak
    return values


def _modules(peak: MemoryPeak, category: str) -> dict[str, int]:
    found = {label or "elsewhere": size for (name, label), size in peak.modules.items() if name == category}
    return dict(sorted(found.items(), key=lambda each: -each[1])) if set(found) != {"elsewhere"} else {}


def report(values: ReportValues) -> str:
    """Formats the contents of the JSON report as a table for the terminal."""
    return "\n".join([*_head(values), *_table(values["ranks"]), *_fit(values)])


def _head(values: ReportValues) -> Iterator[str]:
    device, world = values["device"], values["world_size"]
    kind = device["kind"].upper()
    how = "a real step on this GPU without peers" if device["real"] else f"tensors without data, kernels of {kind}"
    load = (
        "balanced routing"
        if values["imbalance"] == 1
        else f"its experts receive {values['imbalance']:g} times a balanced share"
    )
    yield f"Emulation of {world:,} rank{'s' * (world != 1)}: {how}; {load}"
    _, unit = _unit(values["ranks"])
    yield f"  pipeline layout {values['layout']}; peak memory of a step in {unit}"


def _unit(ranks: Sequence[ReportValues]) -> tuple[int, str]:
    """Number of bytes and name of the unit of the table."""
    return (GIB, "GiB") if max(rank["peak_bytes"] for rank in ranks) >= GIB else (1 << 20, "MiB")


def _table(ranks: Sequence[ReportValues]) -> Iterator[str]:
    unit, _ = _unit(ranks)
    rows: list[tuple[str, list[float]]] = []
    for name in CATEGORIES:
        rows.append((name, [rank["categories"][name] for rank in ranks]))
        labels = list(dict.fromkeys(label for rank in ranks for label in rank["by_module"].get(name, {})))
        if len(labels) > 1 or name == "activations":
            rows += [
                (f"  {label}", [rank["by_module"].get(name, {}).get(label, 0) for rank in ranks]) for label in labels
            ]
    rows.append(("total", [rank["peak_bytes"] for rank in ranks]))
    if "allocator_peak_bytes" in ranks[0]:
        rows.append(("allocator peak", [rank["allocator_peak_bytes"] for rank in ranks]))
    most = max(rank["peak_bytes"] for rank in ranks)
    kept = [row for row in rows if max(row[1]) >= _LEAST_SHARE * most]
    heads = {"rank of the world": "rank", "pipeline rank": "pipeline_rank"}
    wide = max(map(len, (*heads, *(name for name, _ in kept))))
    for name, key in heads.items():
        yield f"  {name:<{wide}}" + "".join(f"{rank[key]:>10,}" for rank in ranks)
    for name, sizes in kept:
        yield f"  {name:<{wide}}" + "".join(f"{size / unit:>10.2f}" for size in sizes)


def _fit(values: ReportValues) -> Iterator[str]:
    most = max(rank.get("allocator_peak_bytes", rank["peak_bytes"]) for rank in values["ranks"])
    device = values["device"]
    spare, kind = (device["memory_bytes"] - most) / GIB, device["kind"].upper()
    if spare < 0:
        yield f"  does not fit: {-spare:.1f} GiB more than a {kind} has"
    else:
        yield f"  {spare:.1f} GiB of a {kind} are left for CUDA, NCCL and fragmentation"
