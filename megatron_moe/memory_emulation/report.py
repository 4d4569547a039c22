"""Memory emulation report, as JSON facts and as a table."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GIB, GPU
from megatron_moe.memory_emulation.rank import EmulatedRun
from megatron_moe.memory_emulation.tracker import CATEGORIES, MemoryPeak

Facts = dict[str, Any]
_LEAST_SHARE = 0.0005
"""Share of the total below which an item is merged into 'other'."""


def facts_of(plan: RunPlan, gpu: GPU, played: Sequence[EmulatedRun], *, real: bool) -> Facts:
    """Facts of the report in bytes. `real`: measured on a GPU."""
    assert plan.emulation is not None
    return {
        "world_size": plan.parallel.world_size,
        "device": {"kind": gpu.kind, "memory_bytes": int(gpu.memory_gib * GIB), "real": real},
        "imbalance": plan.emulation.emulate_imbalance,
        "layout": str(plan.layout),
        "ranks": [_rank(each) for each in played],
    }


def _rank(played: EmulatedRun) -> Facts:
    peak = played.timeline.peak()
    facts: Facts = {
        "rank": played.rank,
        "pipeline_rank": played.pipeline_rank,
        "microbatches": played.num_microbatches,
        "peak_bytes": peak.total,
        "peak_phase": peak.phase,
        "categories": dict(peak.categories),
        "by_module": {name: _modules(peak, name) for name in CATEGORIES if _modules(peak, name)},
    }
    if played.allocator_peak is not None:
        facts["allocator_peak_bytes"] = played.allocator_peak
        facts["requested_peak_bytes"] = played.requested_peak
    return facts


def _modules(peak: MemoryPeak, category: str) -> dict[str, int]:
    found = {label or "elsewhere": size for (name, label), size in peak.modules.items() if name == category}
    return dict(sorted(found.items(), key=lambda each: -each[1])) if set(found) != {"elsewhere"} else {}


def report(facts: Facts) -> str:
    """Formats the facts as a table."""
    return "\n".join([*_head(facts), *_table(facts["ranks"]), *_fit(facts)])


def _head(facts: Facts) -> Iterator[str]:
    device, world = facts["device"], facts["world_size"]
    kind = device["kind"].upper()
    how = "a real step on this GPU without peers" if device["real"] else f"tensors without data, kernels of {kind}"
    load = "even routing" if facts["imbalance"] == 1 else f"its experts get {facts['imbalance']:g} times an even share"
    yield f"Emulation of {world:,} rank{'s' * (world != 1)}: {how}; {load}"
    yield f"  pipeline layout {facts['layout']}; the fullest moment of a step, GiB"


def _table(ranks: Sequence[Facts]) -> Iterator[str]:
    unit = GIB if max(rank["peak_bytes"] for rank in ranks) >= GIB else 1 << 20
    if unit != GIB:
        yield "  (all figures in MiB)"
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
        rows.append(("the allocator's", [rank["allocator_peak_bytes"] for rank in ranks]))
    most = max(rank["peak_bytes"] for rank in ranks)
    kept = [row for row in rows if max(row[1]) >= _LEAST_SHARE * most]
    wide = max(len(name) for name, _ in kept)
    yield f"  {'rank of the world':<{wide}}" + "".join(f"{rank['rank']:>10,}" for rank in ranks)
    yield f"  {'pipeline rank':<{wide}}" + "".join(f"{rank['pipeline_rank']:>10,}" for rank in ranks)
    for name, sizes in kept:
        yield f"  {name:<{wide}}" + "".join(f"{size / unit:>10.2f}" for size in sizes)


def _fit(facts: Facts) -> Iterator[str]:
    most = max(rank.get("allocator_peak_bytes", rank["peak_bytes"]) for rank in facts["ranks"])
    device = facts["device"]
    spare = (device["memory_bytes"] - most) / GIB
    kind = device["kind"].upper()
    if spare < 0:
        yield f"  does not fit: {-spare:.1f} GiB more than a {kind} has"
    else:
        yield f"  {spare:.1f} GiB of a {kind} are left for CUDA, NCCL and fragmentation"
