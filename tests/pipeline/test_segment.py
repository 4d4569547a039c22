"""A microbatch in steps: what runs while rows travel, and what is freed when."""

import gc
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels import reference
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.init import init_parameters
from megatron_moe.model.rope import Rotations
from megatron_moe.model.transformer_layer import TransformerLayer
from megatron_moe.moe.moe_layer import ModelResources
from megatron_moe.moe.node_chain import BoundNodes, LayerState, schedule_steps
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.exchange import AllToAll
from megatron_moe.parallel.streams import Streams
from megatron_moe.pipeline.layout import StageLayout
from megatron_moe.pipeline.overlap import Slot, Step, pair_slots
from megatron_moe.pipeline.segment import CutTensor, SegmentedMicrobatch
from tests.helpers import tiny
from tests.helpers.ranks import on_processes
from tests.helpers.tiny_models import HIDDEN, UNIT_GAIN, layer_config, make_mb, randn
from tests.helpers.tolerances import EXACT


@dataclass(frozen=True)
class Two:
    first: Tensor
    second: Tensor


def two_steps() -> list[Step]:
    """x -> (2 x, x) -> 2 x * x + x: the second tensor passes through the first step untouched."""
    return [
        Step("attention", 0, lambda x: Two(2 * x, x)),
        Step("post", 0, lambda two: two.first * two.second + two.second),
    ]


def test_what_passes_through_a_step_gets_its_gradient_from_all_that_use_it():
    x = randn(3)
    chain = SegmentedMicrobatch(two_steps(), x, Streams())
    chain.forward()
    EXACT.check(chain.output(), 2 * x * x + x, "output")
    chain.begin_backward(torch.ones_like(x))
    chain.backward()
    EXACT.check(chain.input_gradient(), (2 * x + 1) + 2 * x, "gradient")


def test_a_chunk_without_steps_hands_both_on():
    x = randn(3)
    chain = SegmentedMicrobatch([], x, Streams())
    chain.forward()
    assert chain.output() is x
    chain.begin_backward(2 * x)
    chain.backward()
    EXACT.check(chain.input_gradient(), 2 * x, "gradient")


class Keeps(torch.autograd.Function):
    """Doubles, and saves its input and nothing else."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad + 0 * ctx.saved_tensors[0]


def test_what_a_step_keeps_is_freed_when_its_backward_has_run_and_nothing_else_is_kept():
    storages: list[weakref.ref] = []

    def watch(tensor: Tensor) -> Tensor:
        storages.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    steps = [
        Step("attention", 0, lambda x: watch(Keeps.apply(watch(x + 1)))),
        Step("experts", 0, lambda x: watch(x + 1)),
        Step("post", 0, lambda x: Keeps.apply(watch(x * 1.0))),
    ]
    chain = SegmentedMicrobatch(steps, randn(3), Streams())
    chain.forward()
    chain.output()
    gc.collect()
    assert [ref() is not None for ref in storages] == [True, False, False, True], "only what is saved stays"
    chain.begin_backward(torch.ones(3, dtype=torch.float64))
    chain.backward(Slot("backward", "post", 0))
    assert [ref() is not None for ref in storages] == [True, False, False, False]
    chain.backward(Slot("backward", "attention", 0))
    assert not any(ref() is not None for ref in storages)


def test_a_boundary_without_gradients_is_left_as_it_is():
    with torch.no_grad():
        chain = SegmentedMicrobatch(two_steps(), randn(3), Streams())
        chain.forward(Slot("forward", "attention", 0))
        assert not isinstance(chain._state.first, CutTensor)


@pytest.mark.parametrize("bad", [Slot("backward", "attention", 0), None])
def test_a_step_goes_back_once(bad):
    chain = SegmentedMicrobatch(two_steps(), randn(3), Streams())
    chain.forward()
    chain.output()
    chain.begin_backward(torch.ones(3, dtype=torch.float64))
    chain.backward()
    gradient = chain.input_gradient()
    chain.backward(bad)
    with pytest.raises(AssertionError, match="has no gradient"):
        chain.input_gradient()
    assert gradient.shape == (3,)


class Mark(torch.autograd.Function):
    """Tells when the backward passes."""

    @staticmethod
    def forward(ctx, x, tell):
        ctx.tell = tell
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.tell()
        return grad, None


def marked(layer: TransformerLayer, mb: MicrobatchContext, name: str, events: list[str]) -> list[Step]:
    """The layer's steps. Those of attention and experts tell when they run, forward and backward."""

    def told(step: Step) -> Step:
        def mark(tensor: Tensor) -> Tensor:
            return Mark.apply(tensor, lambda: events.append(f"{name} backward {step.node}"))

        def run(state):
            events.append(f"{name} forward {step.node}")
            out = step.run(state)
            if step.node == "attention":
                return replace(out, tokens_SBH=mark(out.tokens_SBH))
            return replace(out, rows=replace(out.rows, data=mark(out.rows.data)))

        return replace(step, run=run)

    steps = schedule_steps([BoundNodes(layer.nodes, mb, 0)])
    *between, last = [told(step) if step.node in ("attention", "experts") else step for step in steps]
    return [Step("embedding", None, lambda x: LayerState(hidden_SBH=x)), *between, tensor_out(last)]


def tensor_out(step: Step) -> Step:
    return replace(step, run=lambda state: step.run(state).hidden_SBH)


def events_of_a_pair(context: ParallelContext) -> list[str]:
    """What a forward F and a backward B through one MoE layer do, and when rows leave and land. In a process of its
    own, because it listens at the exchange itself."""
    events: list[str] = []
    config = layer_config(feed_forward=tiny.moe(dispatcher="alltoall"))
    layer = TransformerLayer(
        config, 0, "decoder.layers.0", ModelResources(context, reference.bundle(), SavedTensorPolicy())
    )
    init_parameters(layer, 5, UNIT_GAIN)
    mb = Rotations([config.mixer], context).attach(make_mb(2, 5))
    behind = SegmentedMicrobatch(marked(layer, mb, "B", events), randn(5, 2, HIDDEN), Streams())
    ahead = SegmentedMicrobatch(marked(layer, mb, "F", events), randn(5, 2, HIDDEN), Streams())
    behind.forward()
    behind.begin_backward(torch.ones_like(behind.output()))
    events.clear()
    launch = AllToAll.launch
    try:
        for slot in pair_slots(StageLayout(layers=(0,)), StageLayout(layers=(0,)), split_backward=True):
            AllToAll.launch = listening(launch, f"{slot.direction[0].upper()} {slot.node}", events)
            if slot.direction == "weight":
                events.append(f"W {slot.node}")
            else:
                (ahead.forward if slot.direction == "forward" else behind.backward)(slot)
    finally:
        AllToAll.launch = launch
    return events


def listening(launch, name: str, events: list[str]):
    """An exchange that tells when its rows leave and when they land. Probabilities travel beside them, unheard."""

    def heard(exchange: AllToAll, rows: Tensor):
        land = launch(exchange, rows)
        if rows.ndim < 2:
            return land
        events.append(f"{name} leaves")

        def told() -> Tensor:
            events.append(f"{name} lands")
            return land()

        return told

    return heard


def test_rows_of_one_microbatch_travel_while_the_other_computes():
    for events in on_processes(ParallelConfig(world_size=2, ep=2), events_of_a_pair):
        assert events == [
            "B combine leaves", "F forward attention", "B combine lands", "B backward experts",
            "F dispatch leaves", "W experts", "B dispatch leaves", "F dispatch lands", "F forward experts",
            "F combine leaves", "B dispatch lands", "B backward attention", "F combine lands", "W attention",
        ]  # fmt: skip
