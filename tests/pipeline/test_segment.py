"""Microbatches in graph segments: gradients, freed memory, and overlap of exchanges with computation."""

import gc
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import StageLayout
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.layers.node_chain import BoundNodes, LayerState, schedule_steps
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.init import init_parameters
from megatron_moe.model.rope import Rotations
from megatron_moe.model.transformer_layer import TransformerLayer
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.exchange import AllToAll
from megatron_moe.parallel.streams import Streams
from megatron_moe.pipeline.overlap import OverlapNode, Step, pair_nodes
from megatron_moe.pipeline.segment import SegmentedMicrobatch
from tests.helpers import tiny
from tests.helpers.ranks import on_processes
from tests.helpers.tiny_models import HIDDEN, UNIT_GAIN, layer_config, make_mb, randn
from tests.helpers.tolerances import EXACT


@dataclass(frozen=True)
class Two:
    first: Tensor
    second: Tensor


def two_steps() -> list[Step]:
    """Two steps x -> (2 x, x) -> 2 x * x + x; the first step returns its input as the second tensor."""
    return [
        Step("attention", 0, lambda x: Two(2 * x, x)),
        Step("post", 0, lambda two: two.first * two.second + two.second),
    ]


@pytest.mark.parametrize("node", ["experts", "dispatch"], ids=["one stream", "two streams"])
def test_tensor_passed_through_steps_sums_the_gradients_of_all_uses(node):
    x = randn(3)
    first, last = two_steps()
    between = Step(node, 0, lambda two: Two(two.first + two.second, two.second))
    chain = SegmentedMicrobatch([first, between, last], x, Streams())
    chain.forward()
    EXACT.check(chain.output(), 3 * x * x + x, "output")
    chain.begin_backward(torch.ones_like(x))
    chain.backward()
    EXACT.check(chain.input_gradient(), (3 * x + 1) + x + 2 * x, "gradient")


def test_a_step_of_two_nodes_runs_at_the_first_in_forward_and_at_the_second_in_backward():
    x = randn(3)
    first, last = two_steps()
    chain = SegmentedMicrobatch([first, replace(last, appended=("attention", 1))], x, Streams())
    chain.forward(OverlapNode("forward", "post", 0))
    chain.forward(OverlapNode("forward", "attention", 1))
    EXACT.check(chain.output(), 2 * x * x + x, "output")
    chain.begin_backward(torch.ones_like(x))
    chain.backward(OverlapNode("backward", "attention", 1))
    assert len(chain._boundaries) == 1, "the backward of the second step has run"
    chain.backward(OverlapNode("backward", "post", 0))
    assert len(chain._boundaries) == 1
    chain.backward()
    EXACT.check(chain.input_gradient(), (2 * x + 1) + 2 * x, "gradient")


def test_chunk_without_steps_passes_input_and_gradient_through():
    x = randn(3)
    chain = SegmentedMicrobatch([], x, Streams())
    chain.forward()
    assert chain.output().data_ptr() == x.data_ptr()
    chain.begin_backward(2 * x)
    chain.backward()
    EXACT.check(chain.input_gradient(), 2 * x, "gradient")


class Keeps(torch.autograd.Function):
    """Doubles its input and saves only the input for backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad + 0 * ctx.saved_tensors[0]


def test_only_saved_tensors_are_kept_and_each_backward_frees_those_of_its_step():
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
    chain.backward(OverlapNode("backward", "post", 0))
    assert [ref() is not None for ref in storages] == [True, False, False, False]
    chain.backward(OverlapNode("backward", "attention", 0))
    assert not any(ref() is not None for ref in storages)


def test_graph_is_not_cut_without_gradients():
    with torch.no_grad():
        chain = SegmentedMicrobatch(two_steps(), randn(3), Streams())
        chain.forward(OverlapNode("forward", "attention", 0))
        assert not chain._state.first.requires_grad


@pytest.mark.parametrize("bad", [OverlapNode("backward", "attention", 0), None])
def test_backward_of_a_step_runs_once(bad):
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
    """Identity that calls a function in backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


def marked(layer: TransformerLayer, mb: MicrobatchContext, name: str, events: list[str]) -> list[Step]:
    """Returns the steps of the layer; attention and expert steps record their forwards and backwards in `events`."""

    def recorded(step: Step) -> Step:
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
    *between, last = [recorded(step) if step.node in ("attention", "experts") else step for step in steps]
    return [Step("embedding", None, lambda x: LayerState(hidden_SBH=x)), *between, tensor_out(last)]


def tensor_out(step: Step) -> Step:
    return replace(step, run=lambda state: step.run(state).hidden_SBH)


def events_of_a_pair(context: ParallelContext) -> list[str]:
    """Returns the order of steps and exchanges of an overlapped forward F and backward B of one MoE layer.

    Runs in a separate process, because it replaces `AllToAll.launch`.
    """
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
        for entry in pair_nodes(StageLayout(layers=(0,)), StageLayout(layers=(0,)), split_backward=True):
            AllToAll.launch = listening(launch, f"{entry.direction[0].upper()} {entry.node}", events)
            if entry.direction == "weight":
                events.append(f"W {entry.node}")
            else:
                (ahead.forward if entry.direction == "forward" else behind.backward)(entry)
    finally:
        AllToAll.launch = launch
    return events


def listening(launch, name: str, events: list[str]):
    """Wraps `AllToAll.launch` to record when rows, but not probabilities, are sent and received."""

    def recording(exchange: AllToAll, rows: Tensor):
        land = launch(exchange, rows)
        if rows.ndim < 2:
            return land
        events.append(f"{name} sent")

        def recorded() -> Tensor:
            events.append(f"{name} received")
            return land()

        return recorded

    return recording


def test_exchanges_of_one_microbatch_overlap_with_computation_of_the_other():
    for events in on_processes(ParallelConfig(world_size=2, ep=2), events_of_a_pair):
        assert events == [
            "B combine sent", "F forward attention", "B combine received", "B backward experts",
            "F dispatch sent", "W experts", "B dispatch sent", "F dispatch received", "F forward experts",
            "F combine sent", "B dispatch received", "B backward attention", "F combine received", "W attention",
        ]  # fmt: skip
