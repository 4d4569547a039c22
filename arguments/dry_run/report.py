"""Formats the dry-run report."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from arguments.run_length import ERROR_SOURCE, length_text, throughput_text
from megatron_moe.config.text import aligned_columns, counted, significant, with_unit

_WIDTH = 120
_FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
_LONGEST = 4
"""Number of components of the step time, longest first, that the report lists."""


def report(values: dict[str, Any]) -> str:
    unknown = values["unknown_layers"]
    assumed = "" if unknown else "; the figures include their known effects"
    sections = (
        _head(values),
        _list("missing or wrong, so that the run would not start", values["missing_inputs"]),
        _ranks(values["ranks"]),
        *([_schedule(values["schedule"])] if unknown else _of_layers(values)),
        _list("environment", [f"{name}={value}" for name, value in values["environment"].items()]),
        _list(f"not available yet, so that the run would not start{assumed}", values["cannot_train_yet"]),
        _list("notes", values["notes"]),
        _list("differences from the recipe", values["differences"]),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _of_layers(values: dict[str, Any]) -> tuple[Iterator[str], ...]:
    """Sections of the report whose figures depend on the layers of the model."""
    memory, communication = values["memory"], values["communication"]
    return (
        _stages(values["stages"], memory["pipeline_ranks"]),
        _memory(memory, values["device"]),
        _schedule(values["schedule"]),
        _communication(communication, memory["heaviest"]["pipeline_rank"]),
        _experts(values["experts"]),
        _padding(values["padding"]),
        _time(values["time"], communication, values["device"]),
    )


def _head(values: dict[str, Any]) -> Iterator[str]:
    ranks, unknown = values["ranks"], values["unknown_layers"]
    name = values["recipe"] or "this command line"
    machine = f"on {ranks['world_size']:,} {values['device']['name']}, {_of_nodes(ranks)}"
    if unknown:
        yield f"Dry run of {name}: its model cannot be built yet, so figures that depend on its layers are left out"
        yield from textwrap.wrap(
            f"  {machine}; layers of {' '.join(unknown)} are missing",
            _WIDTH,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        return
    yield f"Dry run of {name} {machine}"
    if values["device"]["figures"]:
        yield f"  {values['device']['name']}: {values['device']['figures']}"
    model = values["model"]
    layers = [f"{model['dense_layers']} dense", f"{model['moe_layers']} MoE"]
    layers += [f"{model['mtp_layers']} MTP"] * (model["mtp_layers"] > 0)
    mtp = f" ({_billions(model['parameters_without_mtp'])} without MTP)" if model["mtp_layers"] else ""
    total, active = _billions(model["parameters"]), _billions(model["active_parameters"])
    yield f"  {total} parameters{mtp}, {active} active per token; layers: {', '.join(layers)}"


def _of_nodes(ranks: dict[str, Any]) -> str:
    nodes, per_node, domain = ranks["nodes"], ranks["ranks_per_node"], ranks["ranks_per_nvlink_domain"]
    text = f"{nodes:,} node{'s' * (nodes != 1)} of {per_node}"
    return text if domain <= per_node else f"{text}, NVLink domains of {domain}"


def _ranks(ranks: dict[str, Any]) -> Iterator[str]:
    attention, expert = ranks["attention_grid"], ranks["expert_grid"]
    yield "ranks"
    yield "  attention grid " + " x ".join(f"{axis} {attention[axis]}" for axis in ("tp", "cp", "dp", "pp"))
    named = (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("pp", "pp"))
    yield "  expert grid    " + " x ".join(f"{name} {expert[axis]}" for name, axis in named)
    rows = [(name, f"{group['size']}", group["where"]) for name, group in ranks["groups"].items()]
    if rows:
        yield from _table(("group", "ranks", "where"), rows, left=(0, 2))


def _stages(stages: Sequence[dict[str, Any]], of_ranks: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "stages, with parameters per rank"
    rows = []
    for _, run in groupby(stages, key=lambda stage: (stage["holds"], stage["parameters_per_rank"])):
        first, *others = run
        last = others[-1] if others else first
        rows.append(
            (
                str(first["stage"]) if last is first else f"{first['stage']} to {last['stage']}",
                first["holds"],
                f"{first['parameters_per_rank'] / 1e6:,.1f} M",
                f"{first['share_of_flops']:.1%}",
            )
        )
    yield from _table(("stage", "holds", "parameters", "of the FLOPs"), rows, left=(0, 1))
    if len(of_ranks) > 1:
        of_each = [
            (
                str(rank["pipeline_rank"]),
                f"{rank['parameters_per_rank'] / 1e6:,.1f} M",
                str(rank["in_flight"]),
                *(f"{rank[key]:.2f}" for key in ("state_gib", "activations_gib", "total_gib")),
            )
            for rank in of_ranks
        ]
        head = ("pp rank", "parameters", "in flight", "state GiB", "activations GiB", "total GiB")
        yield from _table(head, of_each)


def _memory(memory: dict[str, Any], device: dict[str, Any]) -> Iterator[str]:
    heaviest = memory["heaviest"]
    unit, times = ("GiB", 1) if memory["total_gib"] >= 1 else ("MiB", 1024)
    yield f"peak memory per rank on pipeline rank {heaviest['pipeline_rank']}, which needs the most, {unit}"
    rows = [(name, f"{size * times:.2f}") for name, size in heaviest["gib"].items() if size * times >= 0.005]
    rows.append(("total", f"{memory['total_gib'] * times:.2f}"))
    yield from _table(None, rows, left=(0,))
    spare, limit = memory["spare_gib"], f"{memory['device_gib']:.1f} GiB of {device['name']}"
    if spare < 0:
        yield f"  does not fit: {-spare:.1f} GiB more than the {limit}"
    else:
        verdict = "fits" if memory["fits"] else "barely fits"
        yield f"  {verdict}: {spare:.1f} of the {limit} are left for CUDA, NCCL, workspaces and fragmentation"
    yield from _ways_out(memory)
    if memory["host_gib"] >= 0.005:
        yield f"  in host memory, per rank: {memory['host_gib']:.2f}"
    if memory["switches"] and memory["fits"]:
        yield "  options that are on: memory that each saves there, and its cost in step time (docs/planning.md)"
        effects = [(each["flags"], *_effect(each, unit, times)) for each in memory["switches"]]
        yield from (f"  {line}" for line in _table(None, effects, left=(0,)))


def _ways_out(memory: dict[str, Any]) -> Iterator[str]:
    if "ways_out" not in memory:
        return
    enough = memory["enough_gpus"]
    found = [(way["changes"], way) for way in memory["ways_out"]]
    found += [(f"{enough['gpus']:,} GPUs, {enough['changes']}", enough)] if enough else []
    if not found:
        yield "  no memory options suffice for this layout; this command finds another, or the number of GPUs needed"
        yield f"  {memory['command']}"
        return
    yield "  what fits instead, with its memory and estimated step time"
    rows = [
        (changes, f"{way['total_gib']:.1f} GiB", f"{significant(way['step_ms'] / 1e3)} s", f"{way['slower']:+.1%}")
        for changes, way in found
    ]
    yield from (f"  {line}" for line in _table(None, rows, left=(0,)))
    yield f"  {memory['command']}"


def _effect(switch: dict[str, Any], unit: str, times: int) -> tuple[str, str]:
    slower = switch["slower"]
    cost = f"step {slower:+.1%}" if abs(slower) >= 0.0005 else "no time"
    return f"{switch['saves_gib'] * times:.2f} {unit}", cost


def _schedule(schedule: dict[str, Any]) -> Iterator[str]:
    yield "schedule"
    count = schedule["microbatches"]
    yield (
        f"  {schedule['global_batch_size']:,} sequences a step = {count} microbatch{'es' * (count != 1)} of "
        f"{schedule['micro_batch_size']} per rank"
    )
    if schedule["pipeline_ranks"] > 1 and "layout" in schedule:
        yield f"  layout {schedule['layout']}, {counted(schedule['virtual_stages'], 'chunk')} per rank"
        waiting = " ".join(map(str, schedule["in_flight"]))
        yield f"  bubble at least {schedule['bubble']:.1%}; chunks in flight by pipeline rank: {waiting}"


def _communication(traffic: Sequence[dict[str, Any]], rank: int) -> Iterator[str]:
    if not traffic:
        return
    yield f"communication per step of one rank on pipeline rank {rank}"
    rows = [
        (
            each["group"],
            each["what"],
            f"{each['gb']:,.2f}",
            f"{each['network_gb']:,.2f}",
            f"{each['ms']:,.1f}",
            "yes" if each["overlapped"] else "no",
        )
        for each in traffic
    ]
    yield from _table(("group", "what", "GB", "over network", "ms", "overlapped"), rows, left=(0, 1))


def _experts(experts: dict[str, Any] | None) -> Iterator[str]:
    if experts is None:
        return
    ranks, domains, rows = experts["ranks_per_token"], experts["nvlink_domains_per_token"], experts["rows_per_rank"]
    yield f"expert traffic of one layer and microbatch, {experts['transport']} transport, random balanced routing"
    yield (
        f"  a token has experts on {ranks['mean']:.2f} ± {ranks['std']:.2f} ranks in {domains['mean']:.2f} ± "
        f"{domains['std']:.2f} NVLink domains"
    )
    held, most = experts["experts_per_rank"], rows["fullest"]
    mean = f"{rows['mean']:,.0f} ± {rows['std']:,.0f}"
    yield f"  a rank's {held} experts receive {mean} rows, the fullest rank about {most:,.0f}"
    fmt = "  MB dispatched per rank, one row per choice or one copy per target rank: {} or {}; in fp8 {} or {}"
    yield fmt.format(*(f"{size:,.1f}" for size in experts["dispatch_mb"].values()))


def _padding(padding: dict[str, Any]) -> Iterator[str]:
    experts, packed = padding["expert_rows"], padding["packed_rows"]
    if experts or packed:
        yield "padding"
    if experts:
        yield "  rows of a rank's experts for one layer and microbatch, random balanced routing:"
        listed = [
            f"{experts[name]:,.0f} are {name}, {experts[f'padding_of_{name}']:.1%} of them padding"
            for name in ("computed", "allocated")
            if experts[f"padding_of_{name}"] > 1e-9
        ]
        yield f"  {experts['routed']:,.0f} have a token; {'; '.join(listed)}"
    if packed:
        yield (
            f"  a step packs its documents into about {packed['rows']:,.0f} rows of {packed['positions']:,} positions, "
            f"{packed['padding']:.1%} of them padding, {packed['padding_between_sequences']:.1%} between sequences"
        )


def _time(time: dict[str, Any], traffic: Sequence[dict[str, Any]], device: dict[str, Any]) -> Iterator[str]:
    yield "time"
    shares = ", ".join(
        f"{kind.replace('_', ' ')} {share:.0%}" for kind, share in time["by_kind"].items() if share >= 0.005
    )
    per_token, per_step = (with_unit(time[f"flops_per_{name}"], _FLOPS) for name in ("token", "step"))
    yield f"  {per_token} per token, {per_step} a step"
    yield f"  {shares}"
    estimate = time["estimate"]
    longest = list(estimate["parts_ms"].items())[:_LONGEST]
    yield f"  {throughput_text(estimate)}"
    yield f"  ± {estimate['error']:.0%}: {ERROR_SOURCE}"
    yield f"  most of it {', '.join(f'{part} {ms:,.0f} ms' for part, ms in longest)}"
    yield f"  {length_text(time['run'])}"
    peak = f"{device['name']}'s {time['gemms_in']} peak"
    bubble = f", with the bubble {significant(time['bound_ms'])} ms" if time["bound_ms"] > time["compute_ms"] else ""
    yield f"  bound at {peak}: compute {significant(time['compute_ms'])} ms{bubble}"
    yield (
        f"  so never more than {time['bound_tflops_per_gpu']:,.0f} TFLOP/s and "
        f"{time['bound_tokens_per_second_per_gpu']:,.0f} tokens/s per GPU"
    )
    if traffic:
        alone = sum(each["ms"] for each in traffic if not each["overlapped"])
        yield f"  communication that is not overlapped: {alone:,.0f} ms"


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if not lines:
        return
    yield title
    for line in lines:
        yield from textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="      ")


def _billions(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.2f} M" if count >= 1e6 else f"{count:,}"


def _table(head: tuple[str, ...] | None, rows: Iterable[tuple[str, ...]], left: tuple[int, ...] = ()) -> Iterator[str]:
    """Yields the lines of a table. Columns whose indices are in `left` are left-aligned, all others right-aligned."""
    lines = [*([head] if head else []), *rows]
    for line in aligned_columns(lines, set(range(len(lines[0]))).difference(left)):
        yield f"  {line}"
