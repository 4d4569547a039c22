"""Updates beside the next forward: whoever reads a weight or writes a gradient waits for the update first."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_moe.config.optimizer import OptimizerConfig, OptimizerOffloadConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.kernels import reference
from megatron_moe.kernels.ops import Kernels
from megatron_moe.model.gpt import GPT
from megatron_moe.model.init import init_parameters
from megatron_moe.optim import param_store
from megatron_moe.optim.adamw import AdamW
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.optim.state import StepScalars, UpdateOperands
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters
from megatron_moe.parallel.streams import Streams
from tests.helpers.optim_parameters import FP64, make_buffers, make_parameters
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import microbatch
from tests.helpers.tolerances import EXACT
from tests.optim.test_gather_in_forward import MODELS, OVERLAPPED, ZERO, gather_when_waited_for, train

ALONE = DataParallelConfig(bucket_size=200)
Task = Callable[[], None]


class SlowStreams(Streams):
    """As slow as can be: a bucket is stepped when it is waited for. Until then its weights are wild."""

    def __init__(self) -> None:
        self.inside = False
        self.num_waited = 0
        self._tasks: list[Task] = []

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def put_off(self, rule: AdamW, scalars: StepScalars, operands: UpdateOperands, kernels: Kernels) -> None:
        """Replaces `AdamW.step`."""
        weights, old = operands.weights, operands.weights.clone()
        weights.fill_(torch.nan)

        def task() -> None:
            weights.copy_(old)
            step_now(rule, scalars, operands, kernels)

        self._tasks.append(task)

    def record(self) -> list[Task]:
        tasks, self._tasks = self._tasks, []
        return tasks

    def wait(self, event: list[Task]) -> None:
        self.num_waited += 1
        for task in event:
            task()


step_now = AdamW.step


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowStreams:
    side = SlowStreams()
    monkeypatch.setattr(AdamW, "step", lambda *how: side.put_off(*how) if side.inside else step_now(*how))
    monkeypatch.setattr("megatron_moe.optim.distributed_optimizer.make_streams", lambda device, *names: side)
    return side


@pytest.mark.parametrize("name", MODELS)
def test_updates_are_waited_for_before_their_weights_are_read_or_their_gradients_written(
    name: str, slow: SlowStreams
) -> None:
    expected = on_threads(ParallelConfig(), lambda context: train(MODELS[name], context, ALONE))
    found = on_threads(ParallelConfig(), lambda context: train(MODELS[name], context, ALONE, in_forward=True))
    assert slow.num_waited, "nothing was stepped on the side"
    EXACT.check_all(found[0], expected[0], name)


def test_weights_of_shards_travel_as_soon_as_they_are_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ParallelConfig(world_size=2, ep=2)
    expected = on_threads(ranks, lambda context: train(MODELS["mla-moe"], context, ZERO))
    monkeypatch.setattr(param_store, "start_all_gather_", gather_when_waited_for)
    found = on_threads(ranks, lambda context: train(MODELS["mla-moe"], context, OVERLAPPED, in_forward=True))
    for rank in range(2):
        EXACT.check_all(found[rank], expected[rank], f"rank {rank}")


def stepped_in_forward(lr: float = 0.0) -> tuple[GPT, Optimizer]:
    """A model whose update is under way."""
    context = ParallelContext.single(dtype=torch.float64)
    model = GPT(MODELS["dense"], context, reference.bundle())
    init_parameters(model, 7, MODELS["dense"].init)
    buffers = GradBuffers(named_parameters(model), FP64, context, reference.bundle(), data_parallel=ALONE)
    optimizer = Optimizer(buffers, FP64)
    optimizer.step_in_forward(model)
    one, yes = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.bool)
    optimizer.step(lr=lr, weight_decay=0.0, grad_scale=one, proceed=yes)
    return model, optimizer


def num_wild(model: GPT) -> int:
    return sum(int(parameter.isnan().any()) for parameter in model.parameters())


def test_layers_wait_for_their_own_updates_alone(slow: SlowStreams) -> None:
    model, optimizer = stepped_in_forward()
    counts = [num_wild(model)]
    for layer in model.decoder.layers.values():
        layer.register_forward_hook(lambda *_: counts.append(num_wild(model)))
    model(microbatch())
    counts.append(num_wild(model))
    optimizer.finish_gather()
    assert counts[0] > counts[1] > counts[2] >= counts[3] == num_wild(model) == 0, f"weights not stepped yet: {counts}"


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
    assert num_wild(model)
    read(model, optimizer)
    assert not num_wild(model), "weights were read before they were stepped"


def test_an_update_that_nobody_waited_for_is_over_before_the_next_one(slow: SlowStreams) -> None:
    model, optimizer = stepped_in_forward()
    one, yes = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.bool)
    optimizer.step(lr=0.0, weight_decay=0.0, grad_scale=one, proceed=yes)
    optimizer.finish_gather()
    assert not num_wild(model) and optimizer.step_count.item() == 2


def test_state_in_host_memory_is_refused() -> None:
    config = OptimizerConfig(offload=OptimizerOffloadConfig(fraction=1.0))
    optimizer = Optimizer(make_buffers(make_parameters(), optimizer=config), FP64)
    with pytest.raises(AssertionError, match="host memory"):
        optimizer.step_in_forward(torch.nn.Module())
