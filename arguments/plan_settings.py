"""Converts settings to plans for the planner, and plans with their layout and memory options back to settings."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from arguments.checks.run import FORCED_ROUTING, RULES, Rule, broken_rules, unknown_layers
from arguments.errors import Problem
from arguments.flags import Registry
from arguments.parser import Setting, Settings, split
from arguments.resolve import run_plan
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
PLANNER_FLAGS = (
    *("recipe", "config", "from_hf_config", "gpu", "world_size", "nodes", "gpus_per_node", "gpu_memory", "gpu_tflops"),
    *("gpu_bandwidth", "link_bandwidth", "tokens", "gpu_hour_price"),
)
"""Start flags of pretrain_moe.py that tools/plan.py takes, too."""
QUICKSTART_VOCABULARY = 4096
"""Vocabulary size of the tokenizer that scripts/quickstart.sh trains; used if `vocab-size` is not set."""


def plan_of(settings: Settings, launch: ProcessInfo) -> RunPlan:
    """Plan of valid settings; it may include features that are not available yet."""
    flags = settings.flags
    plan = run_plan(flags, launch, flags.vocab_size or QUICKSTART_VOCABULARY)
    return replace(plan, unknown_layers=unknown_layers(settings))


def plan_as_given(settings: Settings, gpu: GPU, num_gpus: int) -> RunPlan:
    """Plan of a run on `num_gpus` GPUs, with the layout that the flags set."""
    if settings.setting("tokenizer_type").value is None:  # the tokenizer does not affect the layout
        settings = _with(settings, {"tokenizer_type": "NullTokenizer"})
    return plan_of(settings, ProcessInfo(world_size=num_gpus, local_world_size=min(gpu.per_node, num_gpus)))


def settings_for(settings: Settings, plan: RunPlan, *, layout: bool = True) -> Settings:
    """Copy of the settings with the memory options and microbatch size of `plan` and, if `layout`, with its parallel
    layout; the router is not forced."""
    settings = _with(settings, {name: settings.registry.flags[name].default for name in FORCED_ROUTING})
    if layout:
        settings = _with(on_one_rank(settings), dict(_axes(plan)))
    return _with(settings, dict(_switches(plan)))


def on_one_rank(settings: Settings) -> Settings:
    """Returns the settings with the default of every layout flag, so that all parallel sizes are 1, and a microbatch
    size of 1."""
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
    yield "overlap_moe_expert_parallel_comm", plan.pipeline.overlap
    yield "delay_wgrad_compute", plan.pipeline.delay_wgrad_compute
    if parallel.pp > 1:
        yield "pipeline_model_parallel_layout", str(plan.layout)


def _switches(plan: RunPlan) -> Iterator[tuple[str, object]]:
    recompute, offload, precision = plan.memory.recompute, plan.memory.offload, plan.precision
    method, modules = recompute.recompute_method, recompute.recompute_modules
    yield "recompute_granularity", "full" if method else "selective" if modules else None
    yield "recompute_modules", modules or None
    yield "recompute_method", method
    yield "recompute_num_layers", recompute.recompute_num_layers if method else None
    yield "fine_grained_activation_offloading", bool(offload.offload_modules)
    yield "offload_modules", offload.offload_modules
    if plan.optimizer.offload.cpu_step:
        yield from (("optimizer_cpu_offload", True), ("overlap_cpu_optimizer_d2h_h2d", True))
        yield "use_precision_aware_optimizer", True
    if precision.store_param_remainders:
        yield "use_precision_aware_optimizer", True
    if plan.data_parallel.fsdp is not None:
        yield "use_megatron_fsdp", True
        strategy = "optim_grads_params" if plan.data_parallel.fsdp.shards_weights else "optim_grads"
        yield "data_parallel_sharding_strategy", strategy
    yield "micro_batch_size", plan.batch.micro_batch_size
    if precision.exp_avg_dtype == precision.exp_avg_sq_dtype == "bf16":
        yield "use_precision_aware_optimizer", True
        yield from (("exp_avg_dtype", "bf16"), ("exp_avg_sq_dtype", "bf16"))


def planner_of(settings: Settings, gpu: GPU, imbalance: float = 1.0) -> Planner:
    """Planner for the settings; it considers activation offload only if the settings do not use CUDA graphs."""
    return Planner(gpu, imbalance, offload=settings.setting("cuda_graph_impl").value == "none")


def breaks_no_rule(settings: Settings, plan: RunPlan, *, layout: bool = True) -> bool:
    """Whether the settings pass all flag checks with the memory options and microbatch size of `plan` and, if `layout`,
    its parallel layout; see `settings_for`. Checks for features that are not available yet are ignored."""
    world_size = plan.parallel.world_size
    launch = ProcessInfo(world_size=world_size, local_world_size=plan.parallel.ranks_per_host or world_size)
    return not violations(settings_for(settings, plan, layout=layout), launch, RULES)


def suggested_fits(plan: RunPlan, planner: Planner, settings: Settings) -> dict[str, Any]:
    """Suggests plans that fit into memory instead of one that does not: memory options, more GPUs, and the command that
    writes them."""
    accepts = partial(breaks_no_rule, settings, layout=False)
    now = planner.estimator(plan).step().total

    def outcome(found: PlannedLayout) -> dict[str, Any]:
        sizes = {"gpus": found.plan.parallel.world_size, "total_gib": found.memory.total / GIB}
        times = {"step_ms": found.step.total * 1e3, "slower": found.step.total / now - 1}
        return {"changes": changes_text(plan, found.plan), **sizes, **times}

    found, enough = planner.ways_to_fit(plan, accepts), planner.add_gpus_until_fit(plan, accepts)
    return {
        "ways_out": [outcome(each) for each in found],
        "enough_gpus": enough and outcome(enough),
        "command": _command(plan, planner.gpu, settings.registry, layout=not found),
    }


def changes_text(before: RunPlan, after: RunPlan) -> str:
    """Formats the memory options that `after` has and `before` does not, as a phrase."""
    old, new = _options(before), _options(after)
    size = after.batch.micro_batch_size
    words = [f"--micro-batch-size {size}"] if size != before.batch.micro_batch_size else []
    words += [text for text in new if text not in old]
    words += [f"without {text}" for text in old if text not in new and text.partition(" ")[0] not in " ".join(words)]
    return ", ".join(words) or "no other change"


def _command(plan: RunPlan, gpu: GPU, registry: Registry, *, layout: bool) -> str:
    """Command line of tools/plan.py that writes plans that fit into memory, with the layout of `plan` unless `layout`
    allows others."""
    words, options = [], []
    for given in split(shlex.split(plan.command_line))[0]:
        found = registry.find(given.option)
        if found is None or found[0].group != "start" or found[0].name in PLANNER_FLAGS:
            options += [found[0].name] if found else []
            words += [given.option, *(given.words or ())]
    words += [] if "gpu" in options else ["--gpu", gpu.kind]
    words += [] if {"world_size", "nodes"} & set(options) else ["--gpus", str(plan.parallel.world_size)]
    return f"python tools/plan.py {'' if layout else '--fit '}--write plans {shlex.join(words)}"


def violations(settings: Settings, launch: ProcessInfo, rules: Sequence[Rule]) -> list[Problem]:
    """Problems from broken rules, except rules about features that are not available yet."""
    return [problem for problem in broken_rules(settings, launch, rules) if not problem.waits]


def switches_text(plan: RunPlan) -> str:
    """Names of the recomputed and offloaded modules of a plan, as a phrase; empty if there are none."""
    return " and ".join(text for text in _options(plan) if text.startswith(("recompute", "offload")))


def _options(plan: RunPlan) -> list[str]:
    """Memory options of a plan, one phrase each."""
    recompute, offload, precision = plan.memory.recompute, plan.memory.offload, plan.precision
    fsdp = plan.data_parallel.fsdp
    options = {
        "recompute of whole layers": recompute.recompute_method is not None,
        f"recompute of {' '.join(recompute.recompute_modules)}": recompute.recompute_modules,
        f"offload of {' '.join(offload.offload_modules)}": offload.offload_modules,
        "moments in bf16": precision.exp_avg_dtype == precision.exp_avg_sq_dtype == "bf16",
        "16-bit remainders of master weights": precision.store_param_remainders,
        "the optimizer on the host": plan.optimizer.offload.cpu_step,
        "sharded gradients": fsdp is not None and not fsdp.shards_weights,
        "sharded weights": fsdp is not None and fsdp.shards_weights,
    }
    return [text for text, is_on in options.items() if is_on]


def layout_text(found: PlannedLayout) -> str:
    """Summarises parallel sizes, microbatch size and memory options in one line."""
    plan, parallel = found.plan, found.plan.parallel
    axes: list[Any] = [f"TP{parallel.tp}", f"CP{parallel.cp}", f"PP{parallel.pp}x{plan.layout.vpp}"]
    axes += [f"EP{parallel.ep}", f"ETP{parallel.etp}", f"MBS{plan.batch.micro_batch_size}"]
    schedule = {
        "overlap": plan.pipeline.overlap,
        "delayed weight gradients": plan.pipeline.delays_weight_grads(parallel.pp),
    }
    return ", ".join([" ".join(axes), *(text for text, is_on in schedule.items() if is_on), *_options(plan)])
