"""Converts settings to plans for the planner, and layouts found by the planner to settings and recipe files."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from arguments.checks.batch import train_length_given_once
from arguments.checks.run import FULL_SIZE_RULES, missing_flags, unknown_layers
from arguments.dry_run.cluster import about_lines
from arguments.errors import Problem
from arguments.files import read_files
from arguments.flags import Registry
from arguments.hf_source import hf_source, source_of
from arguments.parser import Given, Setting, Settings, merge_settings, split, start_settings
from arguments.plan_settings import PLANNER_FLAGS, on_one_rank, plan_as_given, switches_text, violations
from arguments.read import config_files
from arguments.run_length import COUNTS, RunLength, estimate_text
from arguments.tp_overlap import load_overlap_file
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.run import RunPlan
from megatron_moe.config.text import counted, with_unit
from megatron_moe.cost_model.hardware import GIB, GPU
from megatron_moe.cost_model.parameters import count_parameters
from megatron_moe.planner.search import PlannedLayout

_ONE_STEP = Given("--train-iters", ("1",), "plan")
"""Length of a run that is planned without one; `RunLength` says how to give it, and recipes leave it out."""
_NO_LENGTH = "The length of the run is not known: add train-iters, or plan with --tokens or --train-iters."
_WIDTH = 112
_NEEDED = ("model", "attention", "training")
"""Flag groups whose required flags must be given to plan a layout."""


def settings_of(words: Sequence[str], registry: Registry) -> Settings:
    """Settings of a command line with `--recipe`, `--config`, `--from-hf-config` and `--load hf:DIR`; flags override
    files. Raises FlagErrors if no flags describe the model of the folder."""
    given, problems = split(words)
    start = start_settings(words, registry)
    paths, missing = config_files(start)
    problems += [*missing, *(_of_another_program(name, start) for name in start.values if name not in PLANNER_FLAGS)]
    folder = start.setting("from_hf_config").value
    layers: list[list[Given]] = []
    for path in paths:
        files = read_files(path, registry, {})
        problems += [problem for file in files for problem in file.problems]
        layers += [file.flags for file in files]
    layers.append(given)
    source = source_of(Path(folder), registry) if folder else hf_source(layers, registry)
    settings = merge_settings(registry, layers if source is None else [[*source.layer, _ONE_STEP], *layers])
    if source is not None and not folder:
        settings.notes.append(source.note(settings))
        problems += source.contradictions(given, registry)
    settings.problems[:0] = problems
    load_overlap_file(settings)
    return settings


def _of_another_program(name: str, start: Settings) -> Problem:
    option = start.registry.flags[name].option
    return Problem(
        what=f"{option} is not supported by the planner", remedy="leave it out; --gpu and --gpus describe the machine"
    )


def unplannable(settings: Settings) -> list[Problem]:
    """Problems that rule out all layouts, on any number of GPUs."""
    missing = list(missing_flags(settings, _NEEDED))
    unknown = unknown_layers(settings)
    if unknown:
        what = f"the cost model does not know the layers of {' '.join(unknown)}, which cannot be built yet"
        missing.append(Problem(what=what, remedy="plan a model of attention, MLP and MoE layers"))
    return missing or violations(on_one_rank(settings), ProcessInfo(), (*FULL_SIZE_RULES, train_length_given_once))


def search_start_plan(settings: Settings, gpu: GPU, num_gpus: int) -> RunPlan:
    """Plan from which a search starts: pure data parallelism on `num_gpus` GPUs with a microbatch size of 1."""
    return plan_as_given(on_one_rank(settings), gpu, num_gpus)


def recipe_text(settings: Settings, found: PlannedLayout, gpu: GPU, length: RunLength, title: str) -> str:
    """Text of a recipe file for a layout, with its costs as comments."""
    model = textwrap.wrap(heading_comments(found.plan, gpu), _WIDTH, subsequent_indent="  ")
    missing = [_NO_LENGTH] if lacks_length(settings, length) else []
    settings = _with_batch_size(_with_length(settings, found.plan, length), found.plan)
    if not settings.setting("lr").value:
        missing.append("The learning rate is 0: the run would change no weight. Set lr.")
    lines = [f"# {line}" for line in (title, *model, *cost_comments(found, gpu, length), *missing)]
    lines += about_lines(gpu, found.plan.parallel.world_size)
    for name, flag in settings.registry.flags.items():
        if name in settings.values and flag.group != "start" and settings.setting(name).value is not None:
            lines.append(f"{flag.option[2:]}: {flag.yaml(settings.setting(name).value)}")
    return "\n".join(lines) + "\n"


def lacks_length(settings: Settings, length: RunLength) -> bool:
    """Whether the user gave no length of the run, so that written plans need `--train-iters` when they are started."""
    return length.tokens is None and settings.setting("train_iters").origin == _ONE_STEP.origin


def _with_length(settings: Settings, plan: RunPlan, length: RunLength) -> Settings:
    """Settings with the length of the run that the user gave; without any if the length is that of `_ONE_STEP`."""
    values = dict(settings.values)
    if length.tokens is not None:
        # the unit must be that of the learning-rate schedule
        unit = "train_iters" if settings.setting("train_samples").value is None else "train_samples"
        iterations = length.values(plan, 0.0)["iterations"]
        number = iterations if unit == "train_iters" else plan.batch.samples_after(iterations)
        values = {name: value for name, value in values.items() if name not in ("train_samples", "train_iters")}
        values[unit] = Setting(number, "--tokens")
    elif lacks_length(settings, length):
        del values["train_iters"]
    return replace(settings, values=values)


def _with_batch_size(settings: Settings, plan: RunPlan) -> Settings:
    """Settings with the global batch size of the plan, whose default would depend on the layout."""
    if {"global_batch_size", "step_batch_size_schedule"} & set(settings.values):
        return settings
    size = Setting(plan.batch.global_batch_size, "plan")
    return replace(settings, values={**settings.values, "global_batch_size": size})


def heading_comments(plan: RunPlan, gpu: GPU) -> str:
    """Line with the model, the sequence length, the global batch size, the precision and the GPUs of a plan."""
    total, active = (count_parameters(plan.model, active=active).total for active in (False, True))
    low = plan.precision.low_precision
    precision = plan.precision.params if low is None else f"{plan.precision.params} with {low.recipe}"
    sizes = f"{with_unit(total, COUNTS)} parameters, {with_unit(active, COUNTS)} active"
    model = f"{sizes}, {counted(len(plan.model.layers), 'layer')}"
    batch = f"global batch of {plan.batch.global_batch_size:,} sequences of {plan.data.seq_length:,} tokens"
    figures = f" ({gpu.summary})" if gpu.is_custom else ""
    return f"model: {model}; {batch}; {precision}; {plan.parallel.world_size:,} {gpu.label}{figures}"


def cost_comments(found: PlannedLayout, gpu: GPU, length: RunLength) -> list[str]:
    """Comment lines on a layout: memory, overhead of parallelism, step time with its largest parts, and run time."""
    plan, step, memory = found.plan, found.step, found.memory
    parallel, total = plan.parallel, step.total
    state = memory.state
    unit, name = (GIB, "") if memory.total >= GIB else (GIB >> 10, " MiB")
    switched = switches_text(plan)
    without = f"; without {switched} it would be {found.plain_bytes / unit:.1f}" if switched else ""
    shares = {name: seconds / total for name, seconds in step.parts}
    lost = [
        f"{text} {shares[name]:.1%}"
        for name, text in (
            ("tensor parallel", f"TP {parallel.tp}"),
            ("context parallel", f"CP {parallel.cp}"),
            ("expert parallel", f"EP {parallel.ep} x ETP {parallel.etp}"),
            ("bubble", f"the bubble of PP {parallel.pp} x {plan.layout.vpp} chunks"),
            ("data parallel", f"DP {parallel.dp}"),
            ("recompute", "recompute"),
            ("offload", "offload"),
        )
        if shares.get(name, 0) >= 0.0005
    ]
    longest = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in step.parts[:3])
    lines = [
        f"memory: {memory.total / unit:.1f}{name} of {gpu.memory_gib:.1f} GiB on pipeline rank {memory.rank} (weights "
        f"and gradients {(state.weights + state.gradients) / unit:.1f}, optimizer "
        f"{(state.master + state.moments) / unit:.1f}, activations {memory.activation_bytes / unit:.1f}){without}",
        f"overhead: {', '.join(lost)} of the step" if lost else "overhead: none",
        f"time: {estimate_text(plan, step)}; most of it {longest}",
        f"run: {length.text(plan, step)}",
    ]
    return [part for line in lines for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ")]
