"""Converts settings to plans for the planner, and layouts found by the planner to settings and recipe files."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from arguments.checks.batch import train_length_given_once
from arguments.checks.run import (
    FORCED_ROUTING,
    FULL_SIZE_RULES,
    RULES,
    Rule,
    broken_rules,
    missing_flags,
    unknown_layers,
)
from arguments.errors import Problem
from arguments.export import value_text
from arguments.files import read_files
from arguments.flags import Registry
from arguments.huggingface import published_flags
from arguments.parser import Setting, Settings, merge_settings, split, start_settings
from arguments.read import config_files
from arguments.recipe_table import planned
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GIB, GPU
from megatron_moe.planner.search import PlannedLayout, Planner

_LAYOUT_FLAGS = (
    *("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage"),
    *("num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers"),
    *("decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "microbatch_group_size_per_virtual_pipeline_stage"),
    *("hierarchical_context_parallel_sizes", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    "ep_overlap_early_attn_memory_release",
)
"""Flags of a layout, except the microbatch size. With the defaults of these flags, all parallel sizes are 1."""
_NEEDED = ("model", "attention", "training")
"""Flag groups whose required flags must be given to plan a layout."""
_FILES = ("recipe", "config", "from_hf_config")


def settings_of(words: Sequence[str], registry: Registry) -> Settings:
    """Settings of a command line with `--recipe`, `--config` and `--from-hf-config`; flags override files."""
    given, problems = split(words)
    start = start_settings(words, registry)
    paths, missing = config_files(start)
    problems += [*missing, *(_of_another_program(name, start) for name in start.values if name not in _FILES)]
    folder = start.setting("from_hf_config").value
    layers = [published_flags(folder, registry)[0]] if folder else []
    for path in paths:
        files = read_files(path, registry, {})
        problems += [problem for file in files for problem in file.problems]
        layers += [file.flags for file in files]
    settings = merge_settings(registry, [*layers, given])
    settings.problems[:0] = problems
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
    return missing or _forbidden(_on_one_rank(settings), 1, (*FULL_SIZE_RULES, train_length_given_once))


def forbidden(settings: Settings, num_gpus: int) -> list[Problem]:
    """Problems with the layout that the flags set, on `num_gpus` GPUs."""
    return _forbidden(settings, num_gpus, RULES)


def _forbidden(settings: Settings, num_gpus: int, rules: Sequence[Rule]) -> list[Problem]:
    """Problems from broken rules, except rules about features that are not available yet."""
    return [problem for problem in broken_rules(settings, ProcessInfo(world_size=num_gpus), rules) if not problem.waits]


def to_search(settings: Settings, gpu: GPU, num_gpus: int) -> RunPlan:
    """Plan from which a search starts: pure data parallelism on `num_gpus` GPUs with a microbatch size of 1."""
    return as_given(_on_one_rank(settings), gpu, num_gpus)


def as_given(settings: Settings, gpu: GPU, num_gpus: int) -> RunPlan:
    """Plan with the layout that the flags set."""
    if settings.setting("tokenizer_type").value is None:  # the tokenizer does not affect the layout
        settings = _with(settings, {"tokenizer_type": "NullTokenizer"})
    return planned(settings, ProcessInfo(world_size=num_gpus, local_world_size=min(gpu.per_node, num_gpus)))


def settings_for(settings: Settings, plan: RunPlan, *, layout: bool = True) -> Settings:
    """Copy of the settings with the memory options of `plan` and, if `layout`, with its parallel layout; the router is
    not forced."""
    settings = _with(settings, {name: settings.registry.flags[name].default for name in FORCED_ROUTING})
    if layout:
        settings = _with(_on_one_rank(settings), dict(_axes(plan)))
    return _with(settings, dict(_switches(plan)))


def _on_one_rank(settings: Settings) -> Settings:
    defaults = {name: settings.registry.flags[name].default for name in _LAYOUT_FLAGS}
    return _with(settings, {**defaults, "micro_batch_size": 1})


def _with(settings: Settings, changes: Mapping[str, object]) -> Settings:
    values = dict(settings.values)
    for name, value in changes.items():
        if value == settings.registry.flags[name].default:
            values.pop(name, None)
        else:
            values[name] = Setting(value, "plan")
    return replace(settings, values=values)


def _axes(plan: RunPlan) -> Iterator[tuple[str, object]]:
    parallel = plan.parallel
    yield "tensor_model_parallel_size", parallel.tp
    yield "context_parallel_size", parallel.cp
    yield "pipeline_model_parallel_size", parallel.pp
    yield "expert_model_parallel_size", parallel.ep
    yield "expert_tensor_parallel_size", parallel.etp
    yield "sequence_parallel", parallel.sequence_parallel
    yield "micro_batch_size", plan.batch.micro_batch_size
    yield "overlap_moe_expert_parallel_comm", plan.pipeline.overlap
    yield "delay_wgrad_compute", plan.pipeline.delay_wgrad_compute
    if parallel.pp > 1:
        yield "pipeline_model_parallel_layout", str(plan.layout)


def _switches(plan: RunPlan) -> Iterator[tuple[str, object]]:
    recompute, offload, precision = plan.memory.recompute, plan.memory.offload, plan.precision
    granularity = recompute.recompute_granularity
    whole = granularity == "full"
    yield "recompute_granularity", None if granularity == "none" else granularity
    yield "recompute_modules", recompute.recompute_modules if granularity == "selective" else None
    yield "recompute_method", recompute.recompute_method if whole else None
    yield "recompute_num_layers", recompute.recompute_num_layers if whole else None
    yield "fine_grained_activation_offloading", bool(offload.offload_modules)
    yield "offload_modules", offload.offload_modules
    if plan.optimizer.offload.cpu_step:
        yield from (("optimizer_cpu_offload", True), ("overlap_cpu_optimizer_d2h_h2d", True))
        yield "use_precision_aware_optimizer", True
    if precision.exp_avg_dtype == precision.exp_avg_sq_dtype == "bf16":
        yield "use_precision_aware_optimizer", True
        yield from (("exp_avg_dtype", "bf16"), ("exp_avg_sq_dtype", "bf16"))


def planner_of(settings: Settings, gpu: GPU, imbalance: float = 1.0) -> Planner:
    """Planner for the settings; it considers activation offload only if the settings do not use CUDA graphs."""
    return Planner(gpu, imbalance, offload=settings.setting("cuda_graph_impl").value == "none")


def legal(settings: Settings, plan: RunPlan) -> bool:
    """Whether the settings break no rule after the layout and memory options of `plan` are applied."""
    return not forbidden(settings_for(settings, plan), plan.parallel.world_size)


def recipe(settings: Settings, found: PlannedLayout, gpu: GPU, title: str) -> str:
    """Text of a recipe file for a layout, with its costs as comments."""
    lines = [f"# {line}" for line in (title, *reasons(found, gpu))]
    lines += ["about:", f"  gpu: {gpu.kind}", f"  gpus: {found.plan.parallel.world_size}"]
    for name, flag in settings.registry.flags.items():
        if name in settings.values and flag.group != "start" and settings.setting(name).value is not None:
            lines.append(f"{flag.option[2:]}: {value_text(flag, settings.setting(name).value)}")
    return "\n".join(lines) + "\n"


def reasons(found: PlannedLayout, gpu: GPU) -> list[str]:
    """Comment lines on a layout: memory, overhead of parallelism, and the largest parts of the step time."""
    plan, step, memory = found.plan, found.step, found.memory
    parallel, total = plan.parallel, step.total
    state = memory.state
    switched = switches_text(plan)
    without = f"; without {switched} it would be {found.plain_bytes / GIB:.1f}" if switched else ""
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
        f"memory: {memory.total / GIB:.1f} of {gpu.memory_gib:.1f} GiB on pipeline rank {memory.rank} (weights and "
        f"gradients {(state.weights + state.gradients) / GIB:.1f}, optimizer "
        f"{(state.master + state.moments) / GIB:.1f}, activations {memory.kept / GIB:.1f}){without}",
        f"overhead: {', '.join(lost)} of the step" if lost else "overhead: none",
        f"time: {total * 1e3:,.0f} ms a step, {step.tflops:,.0f} TFLOP/s per GPU by the cost model; most of it "
        f"{longest}",
    ]
    return [part for line in lines for part in textwrap.wrap(line, 112, subsequent_indent="  ")]


def switches_text(plan: RunPlan) -> str:
    """Names of the recomputed and offloaded modules of a plan, as a phrase; empty if there are none."""
    recompute, offload, words = plan.memory.recompute, plan.memory.offload, []
    if recompute.recompute_granularity == "full":
        words.append("recompute of whole layers")
    elif recompute.recompute_granularity == "selective" and recompute.recompute_modules:
        words.append(f"recompute of {' '.join(recompute.recompute_modules)}")
    if offload.offload_modules:
        words.append(f"offload of {' '.join(offload.offload_modules)}")
    return " and ".join(words)


def layout_text(found: PlannedLayout) -> str:
    """Summarizes parallel sizes, microbatch size and memory options in one line."""
    plan, parallel = found.plan, found.plan.parallel
    axes: list[Any] = [f"TP{parallel.tp}", f"CP{parallel.cp}", f"PP{parallel.pp}x{plan.layout.vpp}"]
    axes += [f"EP{parallel.ep}", f"ETP{parallel.etp}", f"MBS{plan.batch.micro_batch_size}"]
    more = [
        "overlap" if plan.pipeline.overlap else "",
        switches_text(plan),
        "moments in bf16" if plan.precision.exp_avg_dtype == plan.precision.exp_avg_sq_dtype == "bf16" else "",
        "the optimizer on the host" if plan.optimizer.offload.cpu_step else "",
    ]
    return ", ".join([" ".join(axes), *filter(None, more)])
