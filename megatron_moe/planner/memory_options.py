"""Memory-saving options of a plan: how to enable or disable each, and the bytes it saves."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.memory import ActivationOffloadConfig, RecomputeConfig
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.memory import RankMemory

SELECTIVE = ("moe_act", "layernorm", "mla_up_proj", "shared_experts", "mlp", "moe")
"""Modules considered for selective recompute. core_attn is excluded: its recompute would free only the log-sum-exp."""
OFFLOADABLE = ("expert_fc1", "moe_act", "core_attn")
"""Modules whose inputs can be offloaded to host memory."""

_ZERO_2 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"
_ZERO_3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


@dataclass(frozen=True)
class MemoryOption:
    """A memory option: its flags, and a function `apply` that enables or disables the option in a copy of a plan."""

    flags: str
    """Command-line flags of the option."""
    apply: Callable[[RunPlan], RunPlan]


def recomputable_modules(model: ModelConfig) -> tuple[str, ...]:
    """Modules of `SELECTIVE` that the model has and can recompute."""
    present = {"layernorm"}
    for layer in dict.fromkeys(model.layers):
        present |= {*layer.mixer.recompute_modules, *layer.feed_forward.recompute_modules}
    return tuple(name for name in SELECTIVE if name in present)


def with_recompute(plan: RunPlan, modules: Iterable[str]) -> RunPlan:
    """Copy of the plan with selective recompute of these modules only."""
    config = RecomputeConfig(recompute_modules=tuple(modules))
    return replace(plan, memory=replace(plan.memory, recompute=config))


def with_offload(plan: RunPlan, modules: Iterable[str]) -> RunPlan:
    """Copy of the plan with activation offload of these modules only."""
    offload = replace(plan.memory.offload, offload_modules=tuple(modules))
    return replace(plan, memory=replace(plan.memory, offload=offload))


def with_full_recompute(plan: RunPlan) -> RunPlan:
    """Copy of the plan with full recompute of every layer, and without activation offload and paged stash."""
    offload = replace(plan.memory.offload, offload_modules=())
    return _with_memory(plan, RecomputeConfig(recompute_method="uniform"), offload)


def without_options(plan: RunPlan) -> RunPlan:
    """Copy of the plan without recompute, activation offload and paged stash; optimizer options are unchanged."""
    offload = ActivationOffloadConfig(optimizer_fraction=plan.memory.offload.optimizer_fraction)
    return _with_memory(plan, RecomputeConfig(), offload)


def with_sharding(plan: RunPlan, *, weights: bool) -> RunPlan:
    """Copy of the plan with sharded gradients and, if `weights`, sharded weights (`--use-megatron-fsdp`)."""
    config = FSDPConfig(
        shards_weights=weights,
        gathers_from_peers=plan.device != "cpu",
        reduces_through_peers=plan.device != "cpu",
        num_passes=2 if plan.pipeline.overlap else 1,
    )
    changed = replace(plan.data_parallel, use_distributed_optimizer=True, overlap_grad_reduce=True, fsdp=config)
    return replace(plan, data_parallel=changed)


def _with_memory(plan: RunPlan, recompute: RecomputeConfig, offload: ActivationOffloadConfig) -> RunPlan:
    return replace(plan, memory=replace(plan.memory, recompute=recompute, offload=offload, paged_stash=None))


def disabled_options(plan: RunPlan) -> list[MemoryOption]:
    """Every option that would reduce the plan's memory and is not enabled yet."""
    found = [*_activation_options(plan), *_state_options(plan)]
    if plan.memory.moe_expert_wgrad_interval > 1:
        immediate = replace(plan.memory, moe_expert_wgrad_interval=1)
        found.append(MemoryOption("--moe-expert-wgrad-interval 1", partial(replace, memory=immediate)))
    if (
        plan.batch.micro_batch_size > 1
        and plan.batch.global_batch_size % (plan.batch.micro_batch_size // 2 * plan.parallel.dp) == 0
    ):
        half = replace(plan.batch, micro_batch_size=plan.batch.micro_batch_size // 2)
        found.append(MemoryOption(f"--micro-batch-size {half.micro_batch_size}", partial(replace, batch=half)))
    return found


def _activation_options(plan: RunPlan) -> list[MemoryOption]:
    recompute, offload, overlap = plan.memory.recompute, plan.memory.offload, plan.pipeline.overlap
    if recompute.recompute_method is not None:
        return []
    on = recompute.recompute_modules
    found = []
    for module in recomputable_modules(plan.model):
        if module not in on and "moe" not in on and not (module == "moe" and overlap):
            names = (*on, module)
            flags = f"--recompute-granularity selective --recompute-modules {' '.join(names)}"
            found.append(MemoryOption(flags, partial(with_recompute, modules=names)))
    for module in OFFLOADABLE:
        if module not in offload.offload_modules and "moe" not in on:
            names = (*offload.offload_modules, module)
            flags = f"--fine-grained-activation-offloading --offload-modules {' '.join(names)}"
            found.append(MemoryOption(flags, partial(with_offload, modules=names)))
    if not overlap:
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        found.append(MemoryOption(flags, with_full_recompute))
    return found


def _state_options(plan: RunPlan) -> list[MemoryOption]:
    precision, parallel, found = plan.precision, plan.parallel, []
    if not plan.data_parallel.use_distributed_optimizer and parallel.dp * parallel.cp > 1:
        sharded = replace(plan.data_parallel, use_distributed_optimizer=True)
        found.append(MemoryOption("--use-distributed-optimizer", partial(replace, data_parallel=sharded)))
    elif plan.data_parallel.fsdp is None and parallel.dp * parallel.cp > 1:
        for flags, weights in ((_ZERO_2, False), (_ZERO_3, True)):
            found.append(MemoryOption(flags, partial(with_sharding, weights=weights)))
    if with_remainders(plan).precision != precision:
        found.append(MemoryOption("--use-precision-aware-optimizer", with_remainders))
    if precision.params == "bf16" and {precision.exp_avg_dtype, precision.exp_avg_sq_dtype} == {"fp32"}:
        flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
        found.append(MemoryOption(flags, with_bf16_moments))
    if plan.memory.offload.optimizer_fraction == 0:
        found.append(MemoryOption("--optimizer-cpu-offload --use-precision-aware-optimizer", with_host_optimizer))
    return found


def with_remainders(plan: RunPlan) -> RunPlan:
    """Copy of the plan that stores only the low 16 bits of master weights; unchanged if this is impossible."""
    precision = plan.precision
    if precision.params != "bf16" or precision.main_params_dtype != "fp32":
        return plan
    return replace(plan, precision=replace(precision, store_param_remainders=True))


def with_bf16_moments(plan: RunPlan) -> RunPlan:
    """Applies `with_remainders` and bf16 moments. A plan that lacks bf16 parameters or fp32 moments is unchanged."""
    precision = plan.precision
    if precision.params != "bf16" or {precision.exp_avg_dtype, precision.exp_avg_sq_dtype} != {"fp32"}:
        return plan
    return with_remainders(replace(plan, precision=replace(precision, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")))


def with_host_optimizer(plan: RunPlan) -> RunPlan:
    """Copy of the plan that keeps master weights and moments in host memory and updates them on the CPU."""
    return replace(
        with_remainders(plan),
        memory=replace(plan.memory, offload=replace(plan.memory.offload, optimizer_fraction=1.0)),
        optimizer=replace(
            plan.optimizer,
            offload=OptimizerOffloadConfig(fraction=1.0, cpu_step=True, overlap_cpu_optimizer_d2h_h2d=True),
        ),
    )


def bytes_saved(plan: RunPlan, option: MemoryOption, rank: int) -> float:
    """Bytes of peak device memory that an option saves on one pipeline rank."""
    return RankMemory(plan).of_rank(rank).total - RankMemory(option.apply(plan)).of_rank(rank).total


def enabled_options(plan: RunPlan) -> Iterator[MemoryOption]:
    """Yields the memory options that are enabled in the plan. The `apply` of a yielded option disables the option."""
    recompute, offload = plan.memory.recompute, plan.memory.offload
    if recompute.recompute_method is not None:
        flags = f"--recompute-granularity full --recompute-method {recompute.recompute_method}"
        flags += f" --recompute-num-layers {recompute.recompute_num_layers}"
        memory = replace(plan.memory, recompute=RecomputeConfig())
        yield MemoryOption(flags, partial(replace, memory=memory))
    for module in recompute.recompute_modules:
        rest = [name for name in recompute.recompute_modules if name != module]
        yield MemoryOption(f"--recompute-modules {module}", partial(with_recompute, modules=rest))
    for module in offload.offload_modules:
        rest = [name for name in offload.offload_modules if name != module]
        yield MemoryOption(f"--offload-modules {module}", partial(with_offload, modules=rest))
    interval = plan.memory.moe_expert_wgrad_interval
    if interval > 1:
        immediate = replace(plan.memory, moe_expert_wgrad_interval=1)
        yield MemoryOption(f"--moe-expert-wgrad-interval {interval}", partial(replace, memory=immediate))
    yield from _enabled_state_options(plan)


def _enabled_state_options(plan: RunPlan) -> Iterator[MemoryOption]:
    precision, parallel = plan.precision, plan.parallel
    if plan.data_parallel.fsdp is not None:
        sharded = replace(plan.data_parallel, fsdp=None)
        yield MemoryOption("--use-megatron-fsdp", partial(replace, data_parallel=sharded))
    elif plan.data_parallel.use_distributed_optimizer and parallel.dp * parallel.cp > 1:
        replicated = replace(plan.data_parallel, use_distributed_optimizer=False)
        yield MemoryOption("--use-distributed-optimizer", partial(replace, data_parallel=replicated))
    if {precision.exp_avg_dtype, precision.exp_avg_sq_dtype} != {"fp32"} and precision.main_params_dtype == "fp32":
        wide = replace(precision, exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32")
        flags = f"--exp-avg-dtype {precision.exp_avg_dtype} --exp-avg-sq-dtype {precision.exp_avg_sq_dtype}"
        yield MemoryOption(flags, partial(replace, precision=wide))
    if precision.grads == "bf16":
        fp32 = replace(precision, grads="fp32")
        yield MemoryOption("gradients in bf16", partial(replace, precision=fp32))
    if precision.store_param_remainders:
        masters = replace(precision, store_param_remainders=False)
        yield MemoryOption("16-bit remainders of master weights", partial(replace, precision=masters))
    if plan.memory.offload.optimizer_fraction:
        memory = replace(plan.memory, offload=replace(plan.memory.offload, optimizer_fraction=0.0))
        optimizer = replace(plan.optimizer, offload=OptimizerOffloadConfig())
        yield MemoryOption("the optimizer's state on the host", partial(replace, memory=memory, optimizer=optimizer))
