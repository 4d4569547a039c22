"""Device memory of weights, gradients and optimizer state, and size of a checkpoint, in closed form."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_moe.config.costs import CostSum, bytes_per_element
from megatron_moe.config.fsdp import MOST_RECEIVE_BYTES
from megatron_moe.config.run import RunPlan
from megatron_moe.config.update_rules import is_elementwise, state_bytes_per_element
from megatron_moe.cost_model.parameters import count_parameters
from megatron_moe.cost_model.shards import GatheredElements, LocalElements, RuleState, state_values, stored_bytes
from megatron_moe.parallel.grid import shards_span_hosts


@dataclass(frozen=True, kw_only=True)
class StateBytes(CostSum[float]):
    """Bytes of weights, gradients and optimizer state."""

    weights: float
    gradients: float
    master: float
    """Master weights on the device; like the moments, sharded with a distributed optimizer."""
    moments: float


def state_bytes(
    plan: RunPlan,
    held: LocalElements,
    low: LocalElements,
    rules: RuleState | None = None,
    gathered: GatheredElements | None = None,
) -> StateBytes:
    """Bytes of weights, gradients and optimizer state of a rank with `held` parameters, `low` of them in FP8 or FP4
    GEMMs, for which the weights include their quantised copies.

    `rules`: share of the parameters that the rank updates; None means an equal share, with a rule that updates all
    parameters elementwise. `gathered`: see `gathered_elements`; None unless gradients or weights are sharded.

    Example: 6 + 12 / d bytes per parameter with ZeRO-1 over d ranks, bf16 weights, fp32 gradients and fp32 state.
    """
    precision, fsdp = plan.precision, plan.data_parallel.fsdp
    owners = plan.data_parallel.num_owners(plan.parallel)
    if rules is None:
        owned = held.attention / owners["attention"] + held.expert / owners["expert"]
        rules = RuleState(owned, owned * state_bytes_per_element(plan.optimizer, precision))
    on_device = 1 - plan.memory.offload.optimizer_fraction
    weight, main = bytes_per_element(precision.params), bytes_per_element(precision.main_params_dtype)
    weights, of_weight = float(held.total * weight), 0 if precision.params == precision.main_params_dtype else main
    if precision.store_param_remainders:
        of_weight = 2
    masters = rules.elements * of_weight
    if precision.low_precision_params:
        weights += low.total * (stored_bytes(precision).total - weight)
        masters += (low.attention / owners["attention"] + low.expert / owners["expert"]) * (main - of_weight)
    copies = 0.0
    if precision.low_precision is not None and not precision.low_precision_params:  # a rowwise and a columnwise copy
        copies = low.total * 2 * precision.low_precision.weights.bytes_per_element
    gradients = float(held.total * bytes_per_element(precision.grads))
    if fsdp is not None and gathered is not None:
        of_weight_bytes = weights / held.total if held.total else 0.0
        comm = bytes_per_element(precision.grads if fsdp.grad_comm is None else fsdp.grad_comm)
        parts = _sharded_parts(plan, held, gathered)
        if fsdp.outer_dp_sharding_strategy == "no_shard" and not is_elementwise(plan.optimizer):
            # the owner of the most state has larger shards than others
            parts = parts._replace(shards=rules.elements - parts.whole)
        gradients = parts.shards * bytes_per_element(precision.grads) + parts.grads * comm
        gradients += parts.whole * bytes_per_element(precision.grads)
        if fsdp.reduces_through_peers:
            gradients += _receive_bytes(plan, gathered, comm)
        if fsdp.shards_weights:
            weights = of_weight_bytes * (parts.shards + parts.whole + parts.weights)
    return StateBytes(
        weights=weights + copies, gradients=gradients, master=masters * on_device, moments=rules.moments * on_device
    )


class _ShardedParts(NamedTuple):
    """Numbers of elements of shards, of gathered weights, of gradients before their reduction, and of parameters
    without replicas, which are not sharded."""

    shards: float
    weights: int
    grads: int
    whole: int


def _sharded_parts(plan: RunPlan, held: LocalElements, gathered: GatheredElements) -> _ShardedParts:
    parallel = plan.parallel
    shards, weights, grads, whole = 0.0, 0, 0, 0
    dense = parallel.dp * parallel.cp, held.attention, gathered.weights.attention, gathered.grads.attention
    grids = dense, (parallel.edp, held.expert, gathered.weights.expert, gathered.grads.expert)
    for replicas, elements, of_weights, of_grads in grids:
        if replicas == 1:
            whole += elements
        else:
            shards += elements * parallel.num_distributed_optimizer_instances / replicas
            weights += of_weights
            grads += of_grads
    return _ShardedParts(shards, weights, grads, whole)


def _receive_bytes(plan: RunPlan, gathered: GatheredElements, comm: float) -> float:
    """Bytes of the receive buffers for gradients of `comm` bytes per element."""
    parallel, total = plan.parallel, 0.0
    instances = parallel.num_distributed_optimizer_instances
    dense = False, parallel.dp * parallel.cp, gathered.largest.attention
    for experts, replicas, elements in (dense, (True, parallel.edp, gathered.largest.expert)):
        num_shards = max(replicas // instances, 1)
        if not shards_span_hosts(parallel, experts=experts):
            total += min(elements * comm * (num_shards - 1) / num_shards, MOST_RECEIVE_BYTES)
    return total


def checkpoint_bytes(plan: RunPlan) -> int:
    """Bytes of one checkpoint: weights and, if saved, optimizer state, which is fp32 or wider in checkpoints. Router
    buffers, a few elements per expert, are excluded."""
    precision = plan.precision
    total = count_parameters(plan.model).total
    size = total * bytes_per_element(precision.params)
    if not plan.checkpoint.save_optim:
        return size
    wide = max(bytes_per_element("fp32"), bytes_per_element(precision.main_params_dtype))
    masters = 0 if precision.main_params_dtype == precision.params else total
    return size + wide * (masters + state_values(plan))
