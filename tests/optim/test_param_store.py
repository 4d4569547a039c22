"""ParamStore and update rules: units, pending buckets, and a registered rule other than AdamW."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_moe.config.optimizer import OptimizerConfig, OptimizerOffloadConfig
from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.registry import UPDATE_RULES
from megatron_moe.config.update_rules import OwnerAlignment, StateSpec, UpdateRuleSpec
from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.param_store import ParamStore
from megatron_moe.optim.state import StepScalars, UpdateOperands
from megatron_moe.parallel.streams import Streams
from tests.helpers.optim_parameters import BF16, FP64, make_buffers, make_gradients, make_parameters, set_grads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT

EXPERTS, HEAD = "decoder.layers.0.mlp.experts.linear_fc1.weight", "output_layer.weight"


class Momentum:
    """Gradient descent with momentum 0.5, as an `UpdateRule` with one kind of state."""

    def __init__(self, config: OptimizerConfig, precision: PrecisionConfig) -> None:
        pass

    def step(self, scalars: StepScalars, operands: UpdateOperands, kernels: Kernels) -> None:
        velocity, master = operands.stored.states["velocity"].data, operands.stored.master
        velocity.mul_(0.5).add_(operands.grads.to(velocity.dtype) * scalars.grad_scale)
        weights = operands.weights if master is None else master.data
        weights.sub_(scalars.lr * velocity)
        operands.weights.copy_(weights)


def momentum(alignment: OwnerAlignment) -> UpdateRuleSpec:
    return UpdateRuleSpec(rule=Momentum, states=lambda *_: (StateSpec("velocity"),), alignment=alignment)


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    with UPDATE_RULES.restored():
        UPDATE_RULES.register("momentum", momentum("matrix"))
        UPDATE_RULES.register("elementwise momentum", momentum("element"))
        yield


def stepped(
    rule: str, precision: PrecisionConfig = FP64, num_steps: int = 3, optimizer: OptimizerConfig | None = None
) -> Optimizer:
    dtype = torch.bfloat16 if precision is BF16 else torch.float64
    config = replace(optimizer or OptimizerConfig(), optimizer=rule)
    optimizer = Optimizer(make_buffers(make_parameters(dtype), precision, optimizer=config), precision)
    one, yes = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.bool)
    for step in range(num_steps):
        set_grads(optimizer.buffers, make_gradients(step))
        optimizer.step(lr=0.1, weight_decay=0.0, grad_scale=one, apply_update=yes)
    return optimizer


def test_another_update_rule_steps_every_parameter_and_names_its_state() -> None:
    optimizer = stepped("momentum")
    weights, velocity = make_parameters(), {name: torch.zeros_like(p) for name, p in make_parameters().items()}
    for step in range(3):
        for name, grad in make_gradients(step).items():
            velocity[name] = 0.5 * velocity[name] + grad
            weights[name].data.sub_(0.1 * velocity[name])
    found = {each.name: each.parameter.detach() for each in optimizer.buffers.main_grads}
    FP64_LAYOUT.check_all(found, {name: p.detach() for name, p in weights.items()}, "weights")
    FP64_LAYOUT.check_all({each.name: each.whole for each in optimizer.named_state()}, velocity, "velocity")
    assert {each.kind for each in optimizer.named_state()} == {"velocity"}


@pytest.mark.parametrize("host_steps", [False, True])
def test_an_elementwise_update_rule_works_with_state_in_host_memory(host_steps: bool) -> None:
    offload = OptimizerOffloadConfig(fraction=1.0, cpu_step=host_steps)
    rule = "elementwise momentum"
    found = stepped(rule, BF16, optimizer=OptimizerConfig(offload=offload))
    assert {state.placement for state in found.states} == {"host" if host_steps else "streamed"}
    expected = {(each.kind, each.name): each.whole.clone() for each in stepped(rule, BF16).named_state()}
    assert {kind for kind, _ in expected} == {"master", "velocity"}
    EXACT.check_all({(each.kind, each.name): each.whole for each in found.named_state()}, expected, "state")


def test_state_of_whole_matrices_stays_on_the_device() -> None:
    with pytest.raises(AssertionError, match="chunks of elements"):
        stepped("momentum", optimizer=OptimizerConfig(offload=OptimizerOffloadConfig(fraction=0.5)))


class RecordingStreams(Streams):
    """Streams that record the updates that were waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self._num_events = 0

    def record(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def wait(self, event: int) -> None:
        self.waited.append(event)


def test_a_unit_is_acquired_with_all_of_its_buckets_and_once() -> None:
    parameters = make_parameters()
    parameters[HEAD].requires_grad_(False)
    buffers = make_buffers(parameters, data_parallel=DataParallelConfig(ddp_bucket_size=1))
    store, streams = ParamStore(buffers), RecordingStreams()
    buckets = buffers.layout.buckets_of_units()
    assert store.units_of([parameters[EXPERTS], parameters[HEAD]]) == ("layers.0.experts",)
    store.acquire("embedding")  # no effect, because no update is pending
    for bucket in range(sum(len(buffer.buckets) for buffer in buffers.layout.buffers)):
        store.publish(bucket, streams)
    with pytest.raises(AssertionError, match="new weights of bucket 0 were not acquired"):
        store.publish(0, streams)
    with pytest.raises(AssertionError, match="layers.0.experts was read while its buckets"):
        store.release("layers.0.experts")
    for _ in range(2):
        store.acquire("layers.0.experts")
    store.release("layers.0.experts")
    assert streams.waited == list(buckets["layers.0.experts"])
    store.wait_for_pending()
    assert sorted(streams.waited) == list(range(max(map(max, buckets.values())) + 1))
