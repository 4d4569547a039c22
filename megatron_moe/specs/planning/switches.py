"""The switches that save memory, one by one: what they are called, what they change in a plan, and what they save."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatron_moe.specs.attention import MLASpec
from megatron_moe.specs.costs.bytes import RankMemory
from megatron_moe.specs.memory import OffloadSpec, RecomputeSpec
from megatron_moe.specs.model import ModelSpec
from megatron_moe.specs.moe import MoESpec
from megatron_moe.specs.run import RunPlan
from megatron_moe.specs.train import StateOffloadSpec

SELECTIVE = ("moe_act", "layernorm", "mla_up_proj", "shared_experts", "mlp", "moe")
"""Modules that can be computed again one by one. core_attn is not among them: it frees the log-sum-exp and nothing
else."""
MOVABLE = ("expert_fc1", "moe_act", "core_attn")
"""Modules whose inputs can wait in host memory."""


@dataclass(frozen=True)
class Switch:
    """One way to need less memory."""

    flags: str
    """As on a command line."""
    apply: Callable[[RunPlan], RunPlan]


def modules_of(model: ModelSpec) -> tuple[str, ...]:
    """Those of `SELECTIVE` that the model has."""
    moe = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MoESpec)]
    absent = {
        "moe_act": not moe,
        "moe": not moe,
        "mla_up_proj": not any(isinstance(layer.mixer, MLASpec) for layer in model.layers),
        "shared_experts": not any(spec.shared and not spec.shared_overlap for spec in moe),
        "mlp": len(moe) == len(model.layers),
    }
    return tuple(name for name in SELECTIVE if not absent.get(name, False))


def recomputing(plan: RunPlan, modules: Iterable[str]) -> RunPlan:
    """The plan with these modules computed again, and no others."""
    wanted = tuple(modules)
    spec = RecomputeSpec(granularity="selective", modules=wanted) if wanted else RecomputeSpec()
    return replace(plan, memory=replace(plan.memory, recompute=spec))


def moving(plan: RunPlan, modules: Iterable[str]) -> RunPlan:
    """The plan with the inputs of these modules in host memory, and of no others."""
    offload = replace(plan.memory.offload, modules=tuple(modules))
    return replace(plan, memory=replace(plan.memory, offload=offload))


def whole_layers(plan: RunPlan) -> RunPlan:
    """The plan with every layer computed again. Modules need nothing then, and their inputs do not move."""
    spec = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    return _trading(plan, spec, replace(plan.memory.offload, modules=()))


def without_switches(plan: RunPlan) -> RunPlan:
    """The plan with all activations kept on the device; the optimizer stays as it is, and when experts get their weight
    gradients."""
    offload = OffloadSpec(optimizer_fraction=plan.memory.offload.optimizer_fraction)
    return _trading(plan, RecomputeSpec(), offload)


def _trading(plan: RunPlan, recompute: RecomputeSpec, offload: OffloadSpec) -> RunPlan:
    """The plan with these, without pages, and with weight gradients of experts when they were."""
    return replace(plan, memory=replace(plan.memory, recompute=recompute, offload=offload, stash=None))


def more_switches(plan: RunPlan) -> list[Switch]:
    """Every single switch that the plan has not turned already."""
    found = [*_of_activations(plan), *_of_state(plan)]
    if plan.memory.expert_wgrad_interval > 1:
        at_once = replace(plan.memory, expert_wgrad_interval=1)
        found.append(Switch("--moe-expert-wgrad-interval 1", lambda given: replace(given, memory=at_once)))
    if plan.batch.micro > 1 and plan.batch.global_size % (plan.batch.micro // 2 * plan.parallel.dp) == 0:
        half = replace(plan.batch, micro=plan.batch.micro // 2)
        found.append(Switch(f"--micro-batch-size {half.micro}", lambda given: replace(given, batch=half)))
    return found


def _of_activations(plan: RunPlan) -> list[Switch]:
    recompute, offload, overlap = plan.memory.recompute, plan.memory.offload, plan.pipeline.overlap
    if recompute.granularity == "full":
        return []
    on = recompute.modules if recompute.granularity == "selective" else ()
    found = []
    for module in modules_of(plan.model):
        if module not in on and "moe" not in on and not (module == "moe" and overlap):
            names = (*on, module)
            flags = f"--recompute-granularity selective --recompute-modules {' '.join(names)}"
            found.append(Switch(flags, lambda given, names=names: recomputing(given, names)))  # type: ignore[misc]
    for module in MOVABLE:
        if module not in offload.modules and "moe" not in on:
            names = (*offload.modules, module)
            flags = f"--fine-grained-activation-offloading --offload-modules {' '.join(names)}"
            found.append(Switch(flags, lambda given, names=names: moving(given, names)))  # type: ignore[misc]
    if not overlap:
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        found.append(Switch(flags, whole_layers))
    return found


def _of_state(plan: RunPlan) -> list[Switch]:
    precision, parallel, found = plan.precision, plan.parallel, []
    if not plan.data_parallel.sharded_optimizer and parallel.dp * parallel.cp > 1:
        sharded = replace(plan.data_parallel, sharded_optimizer=True)
        found.append(Switch("--use-distributed-optimizer", lambda given: replace(given, data_parallel=sharded)))
    if precision_aware(plan).precision != precision:
        found.append(Switch("--use-precision-aware-optimizer", precision_aware))
    if precision.params == "bf16" and {precision.exp_avg, precision.exp_avg_sq} == {"fp32"}:
        flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
        found.append(Switch(flags, moments_in_bf16))
    if plan.memory.offload.optimizer_fraction == 0:
        found.append(Switch("--optimizer-cpu-offload --use-precision-aware-optimizer", optimizer_on_host))
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
        optimizer=replace(plan.optimizer, offload=StateOffloadSpec(fraction=1.0, host_steps=True, overlap=True)),
    )


def saved(plan: RunPlan, switch: Switch, rank: int, num_microbatches: int) -> float:
    """Bytes of one pipeline rank that a switch saves."""
    changed = switch.apply(plan)
    more = num_microbatches * plan.batch.micro // changed.batch.micro
    before = RankMemory(plan).of_rank(rank, num_microbatches)
    return before.total - RankMemory(changed).of_rank(rank, more).total
