"""Node chains: the computation of a layer as a sequence of nodes, and the functions that run them.

A node maps one `LayerState` to the next. Plain execution (`run_nodes`), recompute (`recompute_nodes`), CUDA-graph
capture (`capture_nodes`), waiting for gathered weights (`acquire_nodes`) and a schedule that interleaves two
microbatches (`schedule_steps`) are functions over the same nodes, so they compose.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.logs.timers import Span, Timers
from megatron_moe.memory.cuda_graphs.layer_graphs import CapturedModule
from megatron_moe.memory.saved_tensors import DiscardScope, SavedTensorPolicy
from megatron_moe.optim.param_layout import Direction
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.pytree import map_state
from megatron_moe.pipeline.overlap import EXCHANGES, NodeName, Step
from megatron_moe.precision.linear_quantizer import LinearQuantizer

State = TypeVar("State")
_UNSET: Any = None
_NO_SCOPE = DiscardScope()
CAPTURED_NODES = MappingProxyType(
    {
        "attn": ("attention", "attention"),
        "mamba": ("mamba", "mamba"),
        "mlp": ("mlp", "residual"),
        "moe_router": ("router", "router"),
        "moe_preprocess": ("dispatch_start", "dispatch_finish"),
        "moe": ("router", "residual"),
    }
)
"""Maps each module of `--cuda-graph-modules` to the names of the first and the last node in its graph. The module "moe"
can be captured if `ExpertTransport.is_captured`, "moe_preprocess" only if every rank has all experts."""


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """Activations passed from node to node. A field is None before the node that sets it and after its last consumer,
    so that no tensor is kept alive longer than needed."""

    hidden_SBH: Tensor = _UNSET
    """Residual stream [S, B, H], or n streams [S, B, n H]; after the final norm, its result."""
    stream_weights: Any = None
    """Weights with which `out_SBH` is written to the residual stream, from `SublayerInput`."""
    normed_SBH: Tensor = _UNSET
    """Input of the feed-forward module."""
    discard: DiscardScope = _NO_SCOPE
    """Scope for operations that read `normed_SBH`: they do not save it if layernorm outputs are recomputed."""
    forced_ids_TK: Tensor | None = None
    """Expert ids to use instead of selecting; None means that the router selects experts."""
    routing: Any = None
    """`Routing` of the tokens."""
    tokens_SBH: Tensor = _UNSET
    """Tokens to dispatch: `normed_SBH` or its latent projection."""
    pending: Any = None
    """Dispatch or combine in progress: the result of `Dispatcher.start_dispatch` or `Dispatcher.start_combine`."""
    rows: Any = None
    """`DispatchedTokens`: the rows of the experts, and later their outputs."""
    dispatch_handle: Any = None
    """State that `Dispatcher.finish_dispatch` returns for `Dispatcher.start_combine`."""
    shared: Any = None
    """Overlapped shared experts: the activation [S, B, F] once fc1 has run, the output [S, B, H] once fc2 has run."""
    routed_TH: Tensor = _UNSET
    """Result of combine: the sum of each token's expert outputs, which the experts have already weighted."""
    out_SBH: Tensor = _UNSET
    """Output of the feed-forward module."""
    embedded_SBH: Tensor = _UNSET
    """Multi-token prediction: embeddings of the shifted tokens."""
    earlier: tuple[Tensor, ...] = ()
    """Multi-token prediction: hidden states of the main model and of all earlier depths, each [S, B, H]."""
    streams: Tensor = _UNSET
    """Multi-token prediction: residual streams [S, B, n H] before the final norm, which the next depth reads. None if
    there is only one stream; the next depth then reads it after the norm."""

    def evolve(self, **changes: Any) -> "LayerState":
        """Returns a copy with the given fields replaced, in a tenth of the host time of `dataclasses.replace`."""
        copy = object.__new__(LayerState)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(changes)
        return copy


EMPTY_STATE = LayerState()
"""State with no field set. `EMPTY_STATE.evolve(...)` takes a third of the host time of `LayerState(...)`."""


class UnitStore(Protocol):
    """Interface of `optim.param_store.ParamStore`, which provides weights in units, such as the experts of a layer."""

    frees_units: bool
    """True if weights and gradients of a unit may be absent between its uses, so that backward acquires it as well."""

    def units_of(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]: ...
    def acquire(self, unit: str, direction: Direction = "forward") -> None: ...
    def wait_for_pending(self) -> None: ...
    def release(self, unit: str, direction: Direction = "forward") -> None: ...


@dataclass(frozen=True)
class Node:
    """One step of a layer's computation in a node chain."""

    name: str
    kind: NodeName | None
    """Kind of the node in a schedule that interleaves two microbatches; None if it runs with the previous node."""
    run: Callable[[Any, MicrobatchContext], Any]
    """`run(state, mb)` returns the next state. States are `LayerState`s, except at both ends of a pipeline stage."""
    parameters: tuple[nn.Parameter, ...] = ()
    """All parameters that `run` reads."""
    store: UnitStore | None = None
    """Store from which `run_nodes` acquires `units` before it calls `run`; None if parameters are always available."""
    units: tuple[str, ...] = ()
    acquiring: Callable[[UnitStore | None], "Node"] | None = None
    """Function that returns a copy of this node whose inner nodes acquire their units; None if it has no inner
    nodes."""


def parameters_of(*sources: nn.Module | nn.Parameter | None) -> tuple[nn.Parameter, ...]:
    """Returns the parameters in `sources` (modules or single parameters) without duplicates."""
    found = (each.parameters() if isinstance(each, nn.Module) else (each,) for each in sources if each is not None)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


def run_nodes(nodes: Iterable[Node], state: State, mb: MicrobatchContext) -> State:
    """Runs the nodes in order and returns the final state."""
    if mb.timers is not None:
        return _run_timed(nodes, state, mb, mb.timers)
    for node in nodes:
        state = _run_node(node, state, mb)
    return state


def _run_node(node: Node, state: Any, mb: MicrobatchContext) -> Any:
    return node.run(state, mb) if node.store is None else _run_acquired(node, node.store, state, mb)


def _run_timed(nodes: Iterable[Node], state: Any, mb: MicrobatchContext, timers: Timers) -> Any:
    """Variant of `run_nodes` that measures the time of every node in forward and backward. The backward of a node lasts
    from the gradients of the tensors that it computed to the gradients of the tensors that the previous node computed.
    Tensors that a node only passes on do not count, because their gradients are complete later."""
    made: dict[int, Tensor] = {}
    for node in nodes:
        name, given = node.name.partition("_")[0], _differentiable(state)
        with timers.span(f"{name}-forward", level=2):
            state = _run_node(node, state, mb)
        found = _differentiable(state)
        inputs = {key: given[key] for key in made if key in given} or given
        outputs = {key: tensor for key, tensor in found.items() if key not in given}
        span = timers.backward_span(f"{name}-backward", level=2) if outputs else None
        if span is not None:
            _mark(span, inputs={key: inputs[key] for key in inputs if key not in found} or inputs, outputs=outputs)
        made = outputs or {key: made[key] for key in made if key in found}
        del given, found, inputs, outputs  # dropped here, because the next node may be the last to read them
    return state


def _mark(span: Span, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
    """Registers gradient hooks that begin a timer span at the gradients of `outputs` and end it at the gradients of
    `inputs`, or at the end of the backward if there are no inputs."""

    def begin_span(grad: Tensor) -> None:
        span.mark_begin()
        torch.autograd.Variable._execution_engine.queue_callback(span.mark_end)

    for tensor in outputs.values():
        tensor.register_hook(span.mark_begin if inputs else begin_span)  # type: ignore[no-untyped-call]
    for tensor in inputs.values():
        tensor.register_hook(span.mark_end)  # type: ignore[no-untyped-call]


def _differentiable(state: Any) -> dict[int, Tensor]:
    """Maps `id(tensor)` to each tensor of a state that receives a gradient."""
    found: dict[int, Tensor] = {}

    def collect_differentiable(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found[id(tensor)] = tensor
        return tensor

    map_state(state, collect_differentiable)
    return found


def _run_acquired(node: Node, store: UnitStore, state: Any, mb: MicrobatchContext) -> Any:
    """Runs a node while its units are acquired. If the store frees units, the backward of the node acquires them again:
    between the gradients of the node's outputs and those of its inputs."""
    in_backward = store.frees_units and bool(node.units) and torch.is_grad_enabled()
    discard, has_inputs = getattr(state, "discard", None), False
    if in_backward:
        state, has_inputs = _at_backward(state, partial(_release, store, node.units, "backward"))
    for unit in node.units:
        store.acquire(unit)
    state = node.run(state, mb)
    for unit in node.units:
        store.release(unit)
    if not in_backward:
        return state
    if isinstance(state, LayerState) and state.discard is not discard:
        # a norm with discarded output is recomputed in the backward of nodes with other units
        state = state.evolve(discard=state.discard.recomputing_inside(partial(_acquired, store, node.units)))
    return _at_backward(state, partial(_begin_backward, store, node.units, has_inputs))[0]


@contextmanager
def _acquired(store: UnitStore, units: Iterable[str]) -> Iterator[None]:
    for unit in units:
        store.acquire(unit)
    yield
    _release(store, units, "forward")


def _release(store: UnitStore, units: Iterable[str], direction: Direction) -> None:
    for unit in units:
        store.release(unit, direction)


def _begin_backward(store: UnitStore, units: Iterable[str], has_inputs: bool) -> None:
    for unit in units:
        store.acquire(unit, "backward")
    if not has_inputs:  # no gradient of an input marks the end of the node's backward
        release = partial(_release, store, units, "backward")
        torch.autograd.Variable._execution_engine.queue_callback(release)


def _at_backward(state: Any, call: Callable[[], None]) -> tuple[Any, bool]:
    """Returns the state, changed so that backward calls `call` once it has computed the gradients of all tensors of the
    state, and whether there are any such tensors."""
    found = _differentiable(state)
    if not found:
        return state, False
    outputs = _CallInBackward.apply(call, *found.values())
    changed = dict(zip(found, outputs, strict=True))
    return map_state(state, lambda tensor: changed.get(id(tensor), tensor)), True


class _CallInBackward(AutogradFunction):
    """Identity of several tensors. Its backward calls `call` when the gradients of all of them are known."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *grads


def acquire_nodes(nodes: Iterable[Node], store: UnitStore | None) -> tuple[Node, ...]:
    """Returns copies of the nodes that acquire their parameters from `store`; None means that they do not acquire
    them."""
    return tuple(_acquiring(node, store) for node in nodes)


def _acquiring(node: Node, store: UnitStore | None) -> Node:
    if node.acquiring is not None:
        return node.acquiring(store)
    return replace(node, store=store, units=() if store is None else store.units_of(node.parameters))


def module_node(module: nn.Module, inputs: Sequence[str] = ("hidden_SBH",)) -> Node:
    """Node that runs a whole layer and its hooks: `hidden_SBH = module(*inputs, mb)`. `inputs`: state field names."""

    def run_module(state: LayerState, mb: MicrobatchContext) -> LayerState:
        out_SBH = module(*(getattr(state, name) for name in inputs), mb)
        return state.evolve(**(dict.fromkeys(inputs) | {"hidden_SBH": out_SBH}))

    return Node("layer", "chunk", run_module, parameters_of(module))


def norm_node(norm: nn.Module, streams_head: nn.Module | None = None) -> Node:
    """Node that applies the final norm to `hidden_SBH`, of the kind of the node before it. `streams_head`: makes one
    residual stream of several before; None if there is only one."""

    def run_norm(state: LayerState, mb: MicrobatchContext) -> LayerState:
        if streams_head is None:
            return state.evolve(hidden_SBH=norm(state.hidden_SBH))
        return state.evolve(hidden_SBH=norm(streams_head(state.hidden_SBH)), streams=state.hidden_SBH)

    return Node("final_norm", None, run_norm, parameters_of(norm, streams_head))


class BoundNodes(NamedTuple):
    """Consecutive nodes of a chain and the microbatch context with which they run."""

    nodes: Sequence[Node]
    mb: MicrobatchContext
    layer: int | None = None
    """Index of the layer that contains the nodes, counted within the model chunk (as `OverlapNode.layer`); None outside
    layers."""


def run_chain(chain: Iterable[BoundNodes], state: Any) -> Any:
    """Runs all nodes of the chain in order and returns the final state."""
    for bound in chain:
        state = run_nodes(bound.nodes, state, bound.mb)
    return state


def recompute_nodes(
    nodes: Sequence[Node],
    saved_tensors: SavedTensorPolicy,
    kind: NodeName,
    *,
    inputs: Sequence[str] = ("hidden_SBH",),
    output: str = "hidden_SBH",
) -> Node:
    """Returns one node that runs `nodes`, saves only the state fields `inputs`, and runs `nodes` again in backward.

    `nodes` must read no other field, and must set the field `output`. The new node sets the fields `inputs` to None.
    """

    def forward_of_nodes(*tensors_and_mb: Any) -> Any:
        *tensors, mb = tensors_and_mb
        return getattr(run_nodes(nodes, LayerState(**dict(zip(inputs, tensors, strict=True))), mb), output)

    def run_recomputed(state: LayerState, mb: MicrobatchContext) -> LayerState:
        with state.discard:
            out = saved_tensors.checkpoint(forward_of_nodes, *(getattr(state, name) for name in inputs), mb=mb)
        return state.evolve(**(dict.fromkeys(inputs) | {output: out}))

    def with_acquired_nodes(store: UnitStore | None) -> Node:
        inside = acquire_nodes(nodes, store)
        return replace(recompute_nodes(inside, saved_tensors, kind, inputs=inputs, output=output), store=store)

    return Node("recomputed", kind, run_recomputed, _all_parameters(nodes), acquiring=with_acquired_nodes)


def capture_nodes(
    nodes: Sequence[Node],
    modules: Iterable[str],
    site: str,
    low_precision: Mapping[nn.Parameter, LinearQuantizer] = MappingProxyType({}),
    after_replay: Callable[[], None] = lambda: None,
) -> tuple[Node, ...]:
    """Merges the nodes of each module in `modules` (keys of `CAPTURED_NODES`) into one captured node.

    If the microbatch has a graph instance, a captured node replays one CUDA graph, which is captured at first use.
    Otherwise it runs the merged nodes eagerly. Modules that the layer lacks are skipped. `site`: path of the layer.
    `low_precision`: FP8 or FP4 state of the weights. The first microbatch of a step quantises them before the replay,
    because a graph would do so in every replay. `after_replay`: called after every replay.
    """
    chain = list(nodes)
    for module in modules:
        names = [node.name for node in chain]
        first, last = CAPTURED_NODES[module]
        if first in names and last in names:
            span = slice(names.index(first), names.index(last) + 1)
            store = chain[span.start].store
            # The captured node acquires the units of its nodes: a graph contains no waits for other streams and no
            # gathers, and reads the weights at the addresses that they had at its capture.
            group = acquire_nodes(chain[span], None)
            parameters = _all_parameters(group)
            quantized = [(low_precision[weight], weight) for weight in parameters if weight in low_precision]
            part = CapturedModule(
                f"{module} of {site}",
                partial(run_nodes, group),
                cast(tuple[Parameter, ...], parameters),
                partial(_quantize_weights, quantized),
            )
            name = f"{module.replace('_', '-')}-graph"  # timers cut off what follows an underscore
            captured = Node(name, group[0].kind, partial(_run_captured, part, after_replay), parameters)
            chain[span] = acquire_nodes([captured], store)
    return tuple(chain)


def _quantize_weights(quantized: Sequence[tuple[LinearQuantizer, nn.Parameter]]) -> None:
    for quantizer, weight in quantized:
        quantizer.quantize_weight(weight)


def _run_captured(
    part: CapturedModule, after_replay: Callable[[], None], state: LayerState, mb: MicrobatchContext
) -> LayerState:
    # A graph outlives the microbatch that it was captured with, so it must not refer to that microbatch's scope.
    result: LayerState = part(state.evolve(discard=_NO_SCOPE), mb)
    after_replay()
    return result if result.normed_SBH is None else result.evolve(discard=state.discard)


def schedule_steps(chain: Iterable[BoundNodes], *, exchange_steps: bool = True) -> list[Step]:
    """Converts the chain to the steps of a schedule that interleaves two microbatches. Consecutive compute nodes of one
    kind form one step. The start and the finish of a dispatch or combine are separate steps. Without `exchange_steps`,
    the start is the end of the previous step, and the finish the beginning of the next one, which saves host time. Then
    the end of a layer ("post") and the attention of the next one are one step, so that the finish of a combine and the
    start of the next dispatch are as far apart as possible."""
    steps: list[Step] = []
    for nodes, mb, layer in chain:
        groups: list[tuple[NodeName, list[Node]]] = []
        for node, following in itertools.zip_longest(nodes, nodes[1:]):
            kind = node.kind
            in_exchange = kind in EXCHANGES
            if in_exchange and not exchange_steps:
                # only the last node of the exchange, the finish, has a following node of another kind
                kind = None if following.kind == kind else following.kind
                in_exchange = False
            if kind is None or groups and groups[-1][0] == kind and not in_exchange:
                groups[-1][1].append(node)
            else:
                groups.append((kind, [node]))
        for kind, group in groups:
            run = partial(run_nodes, group, mb=mb)
            if kind == "attention" and steps and steps[-1].node == "post" and not exchange_steps:
                before = steps.pop()
                steps.append(Step("post", before.layer, partial(_run_both, before.run, run), (kind, layer)))
            else:
                steps.append(Step(kind, layer, run))
    return steps


def _run_both(first: Callable[[Any], Any], second: Callable[[Any], Any], state: Any) -> Any:
    return second(first(state))


def _all_parameters(nodes: Iterable[Node]) -> tuple[nn.Parameter, ...]:
    return parameters_of(*(parameter for node in nodes for parameter in node.parameters))
