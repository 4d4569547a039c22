"""The memory switches that a plan has turned, one by one: what each saves, and what it costs by the cost model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from megatron_moe.specs.costs.bytes import RankMemory
from megatron_moe.specs.costs.hardware import Gpu
from megatron_moe.specs.costs.placement import Placement
from megatron_moe.specs.memory import RecomputeSpec
from megatron_moe.specs.planning.estimate import Estimator
from megatron_moe.specs.planning.switches import Switch, moving, recomputing
from megatron_moe.specs.run import RunPlan
from megatron_moe.specs.train import StateOffloadSpec


@dataclass(frozen=True, kw_only=True)
class Turned:
    """One switch of a plan."""

    flags: str
    """As on a command line."""
    saves: float
    """Bytes of a pipeline rank: what it would need more if this switch alone were turned back."""
    slower: float
    """Share by which a step takes longer than with this switch turned back, by the model of docs/planning.md."""


def turned(
    plan: RunPlan, memory: RankMemory, rank: int, num_microbatches: int, gpu: Gpu, placements: dict[str, Placement]
) -> list[Turned]:
    """Every memory switch of the plan, with its effect on one pipeline rank. Effects do not add up: a module that is
    computed again inside of another one that is frees nothing more."""
    before = memory.of_rank(rank, num_microbatches).total
    seconds = Estimator(plan, gpu, placements).step().total
    found = []
    for switch in ways_back(plan):
        back = switch.apply(plan)
        more = memory.on_another_plan(back).of_rank(rank, num_microbatches).total - before
        quicker = Estimator(back, gpu, placements).step().total
        found.append(Turned(flags=switch.flags, saves=more, slower=seconds / quicker - 1))
    return found


def ways_back(plan: RunPlan) -> Iterator[Switch]:
    """Every memory switch of the plan, with what turns it back."""
    recompute, offload = plan.memory.recompute, plan.memory.offload
    if recompute.granularity == "full":
        flags = f"--recompute-granularity full --recompute-method {recompute.method}"
        flags += f" --recompute-num-layers {recompute.num_layers}"
        memory = replace(plan.memory, recompute=RecomputeSpec())
        yield Switch(flags, lambda given: replace(given, memory=memory))
    elif recompute.granularity == "selective":
        for module in recompute.modules:
            rest = [name for name in recompute.modules if name != module]
            yield Switch(f"--recompute-modules {module}", lambda given, rest=rest: recomputing(given, rest))  # type: ignore[misc]
    for module in offload.modules:
        rest = [name for name in offload.modules if name != module]
        yield Switch(f"--offload-modules {module}", lambda given, rest=rest: moving(given, rest))  # type: ignore[misc]
    interval = plan.memory.expert_wgrad_interval
    if interval > 1:
        at_once = replace(plan.memory, expert_wgrad_interval=1)
        yield Switch(f"--moe-expert-wgrad-interval {interval}", lambda given: replace(given, memory=at_once))
    yield from _of_state(plan)


def _of_state(plan: RunPlan) -> Iterator[Switch]:
    precision, parallel = plan.precision, plan.parallel
    if plan.data_parallel.sharded_optimizer and parallel.dp * parallel.cp > 1:
        whole = replace(plan.data_parallel, sharded_optimizer=False)
        yield Switch("--use-distributed-optimizer", lambda given: replace(given, data_parallel=whole))
    if {precision.exp_avg, precision.exp_avg_sq} != {"fp32"} and precision.master == "fp32":
        wide = replace(precision, exp_avg="fp32", exp_avg_sq="fp32")
        flags = f"--exp-avg-dtype {precision.exp_avg} --exp-avg-sq-dtype {precision.exp_avg_sq}"
        yield Switch(flags, lambda given: replace(given, precision=wide))
    if precision.grads == "bf16":
        fp32 = replace(precision, grads="fp32")
        yield Switch("gradients in bf16", lambda given: replace(given, precision=fp32))
    if precision.remainders:
        masters = replace(precision, remainders=False)
        yield Switch("16-bit remainders of master weights", lambda given: replace(given, precision=masters))
    if plan.memory.offload.optimizer_fraction:
        stays = replace(plan.memory, offload=replace(plan.memory.offload, optimizer_fraction=0.0))
        optimizer = replace(plan.optimizer, offload=StateOffloadSpec())
        back = partial(replace, memory=stays, optimizer=optimizer)
        yield Switch("the optimizer's state on the host", back)
