"""Memory-saving options that the planner and the dry run may enable, with what each one saves."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from megatron_moe.config.attention import MLAConfig
from megatron_moe.config.memory import ActivationOffloadConfig, RecomputeConfig
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.cost_model.memory import RankMemory
from megatron_moe.cost_model.placement import Placement
from megatron_moe.planner.estimator import Estimator

SELECTIVE = ("moe_act", "layernorm", "mla_up_proj", "shared_experts", "mlp", "moe")
"""Modules that can be computed again one by one. core_attn is not among them: it frees the log-sum-exp and nothing
else."""
MOVABLE = ("expert_fc1", "moe_act", "core_attn")
"""Modules whose inputs can wait in host memory."""


@dataclass(frozen=True)
class MemoryOption:
    """One way to need less memory."""

    flags: str
    """As on a command line."""
    apply: Callable[[RunPlan], RunPlan]


def modules_of(model: ModelConfig) -> tuple[str, ...]:
    """Those of `SELECTIVE` that the model has."""
    moe = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MoEConfig)]
    absent = {
        "moe_act": not moe,
        "moe": not moe,
        "mla_up_proj": not any(isinstance(layer.mixer, MLAConfig) for layer in model.layers),
        "shared_experts": not any(config.shared and not config.shared_overlap for config in moe),
        "mlp": len(moe) == len(model.layers),
    }
    return tuple(name for name in SELECTIVE if not absent.get(name, False))


def recomputing(plan: RunPlan, modules: Iterable[str]) -> RunPlan:
    """The plan with these modules computed again, and no others."""
    wanted = tuple(modules)
    config = RecomputeConfig(granularity="selective", modules=wanted) if wanted else RecomputeConfig()
    return replace(plan, memory=replace(plan.memory, recompute=config))


def moving(plan: RunPlan, modules: Iterable[str]) -> RunPlan:
    """The plan with the inputs of these modules in host memory, and of no others."""
    offload = replace(plan.memory.offload, modules=tuple(modules))
    return replace(plan, memory=replace(plan.memory, offload=offload))


def whole_layers(plan: RunPlan) -> RunPlan:
    """The plan with every layer computed again. Modules need nothing then, and their inputs do not move."""
    config = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
    return _trading(plan, config, replace(plan.memory.offload, modules=()))


def without_switches(plan: RunPlan) -> RunPlan:
    """The plan with all activations kept on the device; the optimizer stays as it is, and when experts get their weight
    gradients."""
    offload = ActivationOffloadConfig(optimizer_fraction=plan.memory.offload.optimizer_fraction)
    return _trading(plan, RecomputeConfig(), offload)


def _trading(plan: RunPlan, recompute: RecomputeConfig, offload: ActivationOffloadConfig) -> RunPlan:
    """The plan with these, without pages, and with weight gradients of experts when they were."""
    return replace(plan, memory=replace(plan.memory, recompute=recompute, offload=offload, stash=None))


def more_switches(plan: RunPlan) -> list[MemoryOption]:
    """Every single switch that the plan has not turned already."""
    found = [*_of_activations(plan), *_of_state(plan)]
    if plan.memory.expert_wgrad_interval > 1:
        at_once = replace(plan.memory, expert_wgrad_interval=1)
        found.append(MemoryOption("--moe-expert-wgrad-interval 1", lambda given: replace(given, memory=at_once)))
    if plan.batch.micro > 1 and plan.batch.global_size % (plan.batch.micro // 2 * plan.parallel.dp) == 0:
        half = replace(plan.batch, micro=plan.batch.micro // 2)
        found.append(MemoryOption(f"--micro-batch-size {half.micro}", lambda given: replace(given, batch=half)))
    return found


def _of_activations(plan: RunPlan) -> list[MemoryOption]:
    recompute, offload, overlap = plan.memory.recompute, plan.memory.offload, plan.pipeline.overlap
    if recompute.granularity == "full":
        return []
    on = recompute.modules if recompute.granularity == "selective" else ()
    found = []
    for module in modules_of(plan.model):
        if module not in on and "moe" not in on and not (module == "moe" and overlap):
            names = (*on, module)
            flags = f"--recompute-granularity selective --recompute-modules {' '.join(names)}"
            found.append(MemoryOption(flags, lambda given, names=names: recomputing(given, names)))  # type: ignore[misc]
    for module in MOVABLE:
        if module not in offload.modules and "moe" not in on:
            names = (*offload.modules, module)
            flags = f"--fine-grained-activation-offloading --offload-modules {' '.join(names)}"
            found.append(MemoryOption(flags, lambda given, names=names: moving(given, names)))  # type: ignore[misc]
    if not overlap:
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        found.append(MemoryOption(flags, whole_layers))
    return found


def _of_state(plan: RunPlan) -> list[MemoryOption]:
    precision, parallel, found = plan.precision, plan.parallel, []
    if not plan.data_parallel.sharded_optimizer and parallel.dp * parallel.cp > 1:
        sharded = replace(plan.data_parallel, sharded_optimizer=True)
        found.append(MemoryOption("--use-distributed-optimizer", lambda given: replace(given, data_parallel=sharded)))
    if precision_aware(plan).precision != precision:
        found.append(MemoryOption("--use-precision-aware-optimizer", precision_aware))
    if precision.params == "bf16" and {precision.exp_avg, precision.exp_avg_sq} == {"fp32"}:
        flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
        found.append(MemoryOption(flags, moments_in_bf16))
    if plan.memory.offload.optimizer_fraction == 0:
        found.append(MemoryOption("--optimizer-cpu-offload --use-precision-aware-optimizer", optimizer_on_host))
    return found


def precision_aware(plan: RunPlan) -> RunPlan:
    """The plan with the 16 bits alone of master weights that bf16 weights lack, where that is possible."""
    precision = plan.precision
    if precision.params != "bf16" or precision.master != "fp32" or precision.low_params:
        return plan
    return replace(plan, precision=replace(precision, remainders=True))


def moments_in_bf16(plan: RunPlan) -> RunPlan:
    """The plan with both moments in bf16, unless they are narrow already, and what comes with their flags."""
    precision = plan.precision
    if precision.params != "bf16" or {precision.exp_avg, precision.exp_avg_sq} != {"fp32"}:
        return plan
    return precision_aware(replace(plan, precision=replace(precision, exp_avg="bf16", exp_avg_sq="bf16")))


def optimizer_on_host(plan: RunPlan) -> RunPlan:
    """The plan with master weights and moments in host memory, and stepped there."""
    return replace(
        precision_aware(plan),
        memory=replace(plan.memory, offload=replace(plan.memory.offload, optimizer_fraction=1.0)),
        optimizer=replace(plan.optimizer, offload=OptimizerOffloadConfig(fraction=1.0, host_steps=True, overlap=True)),
    )


def saved(plan: RunPlan, switch: MemoryOption, rank: int, num_microbatches: int) -> float:
    """Bytes of one pipeline rank that a switch saves."""
    changed = switch.apply(plan)
    more = num_microbatches * plan.batch.micro // changed.batch.micro
    before = RankMemory(plan).of_rank(rank, num_microbatches)
    return before.total - RankMemory(changed).of_rank(rank, more).total


@dataclass(frozen=True, kw_only=True)
class EnabledOption:
    """One switch of a plan."""

    flags: str
    """As on a command line."""
    saves: float
    """Bytes of a pipeline rank: what it would need more if this switch alone were turned back."""
    slower: float
    """Share by which a step takes longer than with this switch turned back, by the model of docs/planning.md."""


def enabled(
    plan: RunPlan, memory: RankMemory, rank: int, num_microbatches: int, gpu: GPU, placements: dict[str, Placement]
) -> list[EnabledOption]:
    """Every memory switch of the plan, with its effect on one pipeline rank. Effects do not add up: a module that is
    computed again inside of another one that is frees nothing more."""
    before = memory.of_rank(rank, num_microbatches).total
    seconds = Estimator(plan, gpu, placements).step().total
    found = []
    for switch in ways_back(plan):
        back = switch.apply(plan)
        more = memory.on_another_plan(back).of_rank(rank, num_microbatches).total - before
        quicker = Estimator(back, gpu, placements).step().total
        found.append(EnabledOption(flags=switch.flags, saves=more, slower=seconds / quicker - 1))
    return found


def ways_back(plan: RunPlan) -> Iterator[MemoryOption]:
    """Every memory switch of the plan, with what turns it back."""
    recompute, offload = plan.memory.recompute, plan.memory.offload
    if recompute.granularity == "full":
        flags = f"--recompute-granularity full --recompute-method {recompute.method}"
        flags += f" --recompute-num-layers {recompute.num_layers}"
        memory = replace(plan.memory, recompute=RecomputeConfig())
        yield MemoryOption(flags, lambda given: replace(given, memory=memory))
    elif recompute.granularity == "selective":
        for module in recompute.modules:
            rest = [name for name in recompute.modules if name != module]
            yield MemoryOption(f"--recompute-modules {module}", lambda given, rest=rest: recomputing(given, rest))  # type: ignore[misc]
    for module in offload.modules:
        rest = [name for name in offload.modules if name != module]
        yield MemoryOption(f"--offload-modules {module}", lambda given, rest=rest: moving(given, rest))  # type: ignore[misc]
    interval = plan.memory.expert_wgrad_interval
    if interval > 1:
        at_once = replace(plan.memory, expert_wgrad_interval=1)
        yield MemoryOption(f"--moe-expert-wgrad-interval {interval}", lambda given: replace(given, memory=at_once))
    yield from _enabled_of_state(plan)


def _enabled_of_state(plan: RunPlan) -> Iterator[MemoryOption]:
    precision, parallel = plan.precision, plan.parallel
    if plan.data_parallel.sharded_optimizer and parallel.dp * parallel.cp > 1:
        whole = replace(plan.data_parallel, sharded_optimizer=False)
        yield MemoryOption("--use-distributed-optimizer", lambda given: replace(given, data_parallel=whole))
    if {precision.exp_avg, precision.exp_avg_sq} != {"fp32"} and precision.master == "fp32":
        wide = replace(precision, exp_avg="fp32", exp_avg_sq="fp32")
        flags = f"--exp-avg-dtype {precision.exp_avg} --exp-avg-sq-dtype {precision.exp_avg_sq}"
        yield MemoryOption(flags, lambda given: replace(given, precision=wide))
    if precision.grads == "bf16":
        fp32 = replace(precision, grads="fp32")
        yield MemoryOption("gradients in bf16", lambda given: replace(given, precision=fp32))
    if precision.remainders:
        masters = replace(precision, remainders=False)
        yield MemoryOption("16-bit remainders of master weights", lambda given: replace(given, precision=masters))
    if plan.memory.offload.optimizer_fraction:
        stays = replace(plan.memory, offload=replace(plan.memory.offload, optimizer_fraction=0.0))
        optimizer = replace(plan.optimizer, offload=OptimizerOffloadConfig())
        back = partial(replace, memory=stays, optimizer=optimizer)
        yield MemoryOption("the optimizer's state on the host", back)
