"""Optimizer step overlapped with the next forward: uses of weights and writes of gradients wait for the update."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_moe.config.optimizer import OptimizerConfig, OptimizerOffloadConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.model.gpt import GPT
from megatron_moe.optim import param_store
from megatron_moe.optim.adamw import AdamW
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.state import StepScalars, UpdateOperands
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.streams import Streams
from tests.helpers.optim_parameters import FP64, make_buffers, make_parameters
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import microbatch
from tests.helpers.tolerances import EXACT
from tests.optim.test_gather_in_forward import (
    MODELS,
    OVERLAPPED,
    ZERO,
    gather_when_waited_for,
    make_optimizer,
    null_step,
    train,
)  # fmt: skip

ALONE = DataParallelConfig(ddp_bucket_size=200)
Task = Callable[[], None]


class SlowStreams(Streams):
    """Streams that run the step of a bucket only when its event is waited for. Until then its weights are NaN."""

    def __init__(self) -> None:
        self.inside = False
        self.num_waited = 0
        self._tasks: list[Task] = []

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def delay(self, rule: AdamW, scalars: StepScalars, operands: UpdateOperands, kernels: Kernels) -> None:
        """Replacement of `AdamW.step` that sets the weights to NaN and queues the update."""
        weights, old = operands.weights, operands.weights.clone()
        weights.fill_(torch.nan)

        def task() -> None:
            weights.copy_(old)
            step_immediately(rule, scalars, operands, kernels)

        self._tasks.append(task)

    def record(self) -> list[Task]:
        tasks, self._tasks = self._tasks, []
        return tasks

    def wait(self, event: list[Task]) -> None:
        self.num_waited += 1
        for task in event:
            task()


step_immediately = AdamW.step


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowStreams:
    side = SlowStreams()
    monkeypatch.setattr(AdamW, "step", lambda *how: side.delay(*how) if side.inside else step_immediately(*how))
    monkeypatch.setattr("megatron_moe.optim.distributed_optimizer.make_streams", lambda device, *names: side)
    return side


@pytest.mark.parametrize("name", MODELS)
def test_readers_of_weights_and_writers_of_gradients_wait_for_updates(name: str, slow: SlowStreams) -> None:
    expected = on_threads(ParallelConfig(), lambda context: train(MODELS[name], context, ALONE))
    found = on_threads(ParallelConfig(), lambda context: train(MODELS[name], context, ALONE, in_forward=True))
    assert slow.num_waited, "nothing was stepped on the side stream"
    EXACT.check_all(found[0], expected[0], name)


def test_sharded_weights_are_gathered_after_their_overlapped_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ParallelConfig(world_size=2, ep=2)
    expected = on_threads(ranks, lambda context: train(MODELS["mla-moe"], context, ZERO))
    monkeypatch.setattr(param_store, "start_all_gather_", gather_when_waited_for)
    found = on_threads(ranks, lambda context: train(MODELS["mla-moe"], context, OVERLAPPED, in_forward=True))
    for rank in range(2):
        EXACT.check_all(found[rank], expected[rank], f"rank {rank}")


def stepped_in_forward() -> tuple[GPT, Optimizer]:
    """Returns a model and its optimizer, which has a pending update."""
    context = ParallelContext.single(dtype=torch.float64)
    model, optimizer = make_optimizer(MODELS["dense"], context, ALONE, in_forward=True)
    null_step(optimizer)
    return model, optimizer


def num_pending(model: GPT) -> int:
    return sum(int(parameter.isnan().any()) for parameter in model.parameters())


def test_a_layer_waits_only_for_its_own_updates(slow: SlowStreams) -> None:
    model, optimizer = stepped_in_forward()
    counts = [num_pending(model)]
    for layer in model.decoder.layers.values():
        layer.register_forward_hook(lambda *_: counts.append(num_pending(model)))
    model(microbatch())
    counts.append(num_pending(model))
    optimizer.finish_gather()
    assert counts[0] > counts[1] > counts[2] >= counts[3] == num_pending(model) == 0, (
        f"weights not stepped yet: {counts}"
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: optimizer.params_norm(),
        lambda model, optimizer: list(optimizer.named_state()),
        lambda model, optimizer: optimizer.weights_from_masters(),
        lambda model, optimizer: optimizer.masters_from_weights(),
    ],
    ids=["state dict", "norm", "state", "from masters", "from weights"],
)
def test_other_readers_wait_for_all_updates(read: Callable[[GPT, Optimizer], object], slow: SlowStreams) -> None:
    model, optimizer = stepped_in_forward()
    assert num_pending(model)
    read(model, optimizer)
    assert not num_pending(model), "weights were read before they were stepped"


def test_a_pending_update_finishes_before_the_next_one(slow: SlowStreams) -> None:
    model, optimizer = stepped_in_forward()
    null_step(optimizer)
    optimizer.finish_gather()
    assert not num_pending(model) and optimizer.step_count.item() == 2


def test_state_in_host_memory_cannot_be_stepped_in_the_forward() -> None:
    config = OptimizerConfig(offload=OptimizerOffloadConfig(fraction=1.0))
    optimizer = Optimizer(make_buffers(make_parameters(), optimizer=config), FP64)
    with pytest.raises(AssertionError, match="host memory"):
        optimizer.step_in_forward(torch.nn.Module())
