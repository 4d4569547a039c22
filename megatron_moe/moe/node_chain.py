"""Node chains: the computation of a layer as a sequence of nodes, and the functions that run them.

A node maps one `LayerState` to the next. Plain execution (`run_nodes`), recompute (`recompute_nodes`), CUDA-graph
capture (`capture_nodes`), waiting for new weights (`acquire_nodes`) and a schedule that interleaves two microbatches
(`schedule_steps`) are functions over the same nodes, so they compose. `moe` is the lowest package that knows all types
in a `LayerState`.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor, nn

from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.memory.cuda_graphs.layer_graphs import CapturedModule
from megatron_moe.memory.saved_tensors import SavedTensorPolicy, Scope
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens, Routing
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.pipeline.overlap import SlotName, Step, stream_of

State = TypeVar("State")
_UNSET: Any = None
_NO_SCOPE: Scope = nullcontext()
CAPTURED_NODES = MappingProxyType(
    {
        "attn": ("attention", "attention"),
        "mlp": ("mlp", "residual"),
        "moe_router": ("router", "router"),
        "moe_preprocess": ("dispatch_start", "dispatch_finish"),
        "moe": ("router", "residual"),
    }
)
"""First and last node of each module of `--cuda-graph-modules`. moe_preprocess and moe need all experts on one rank,
because collectives are not captured."""


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """Activations between two nodes. A field is None before the node that sets it and after its last consumer, so that
    no tensor is kept alive longer than needed."""

    hidden_SBH: Tensor = _UNSET
    """Residual stream."""
    normed_SBH: Tensor = _UNSET
    """Input of the feed-forward module."""
    discard: Scope = _NO_SCOPE
    """Entered by consumers of `normed_SBH`: they save no copy of it if layernorm outputs are recomputed."""
    given_ids_TK: Tensor | None = None
    """Expert ids to replay; None: the router selects."""
    routing: Routing = _UNSET
    tokens_SBH: Tensor = _UNSET
    """Tokens to dispatch: `normed_SBH` or its latent projection."""
    pending: Any = None
    """The dispatcher's exchange between its start and its finish."""
    rows: DispatchedTokens = _UNSET
    handle: Any = None
    """Dispatcher state for the combine of `rows`."""
    shared: Any = None
    """Overlapped shared experts: activation [S, B, F] after the first matrix, output [S, B, H] after the second."""
    routed_TH: Tensor = _UNSET
    """Sum of every token's expert outputs."""
    out_SBH: Tensor = _UNSET
    """Output of the feed-forward module."""
    embedded_SBH: Tensor = _UNSET
    """Multi-token prediction: embeddings of the later tokens."""
    earlier: tuple[Tensor, ...] = ()
    """Multi-token prediction: hidden states of the model and of the depths before this one, each [S, B, H]."""

    def evolve(self, **changes: Any) -> "LayerState":
        """Copy with changed fields, at a tenth of the host time of `dataclasses.replace`."""
        copy = object.__new__(LayerState)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(changes)
        return copy


EMPTY_STATE = LayerState()
"""`EMPTY_STATE.evolve(...)` takes a third of the host time of `LayerState(...)`."""


class UnitStore(Protocol):
    """Owner of the weights; see `optim.param_store.ParamStore`."""

    def units_of(self, parameters: Iterable[nn.Parameter]) -> tuple[str, ...]: ...
    def acquire(self, unit: str) -> None: ...
    def acquire_all(self) -> None: ...
    def release(self, unit: str) -> None: ...


@dataclass(frozen=True)
class Node:
    """One part of a chain."""

    name: str
    slot: SlotName | None
    """Slot of a schedule that interleaves two microbatches; None: that of the node before."""
    run: Callable[[Any, MicrobatchContext], Any]
    """`run(state, mb) -> state`. The first and the last node of a pipeline stage receive and return other types."""
    parameters: tuple[nn.Parameter, ...] = ()
    """All parameters that `run` reads."""
    store: UnitStore | None = None
    """Store from which `units` are acquired for `run`; None: the weights are never pending."""
    units: tuple[str, ...] = ()


def parameters_of(*sources: nn.Module | nn.Parameter | None) -> tuple[nn.Parameter, ...]:
    """The parameters of modules, and parameters themselves, for `Node.parameters`."""
    found = (each.parameters() if isinstance(each, nn.Module) else (each,) for each in sources if each is not None)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


def run_nodes(nodes: Iterable[Node], state: State, mb: MicrobatchContext) -> State:
    """Runs the nodes in order."""
    for node in nodes:
        if node.store is None:
            state = node.run(state, mb)
            continue
        for unit in node.units:
            node.store.acquire(unit)
        state = node.run(state, mb)
        for unit in node.units:
            node.store.release(unit)
    return state


def acquire_nodes(nodes: Iterable[Node], store: UnitStore | None) -> tuple[Node, ...]:
    """Nodes that acquire the units of their parameters before they run; None: the nodes as they are."""
    if store is None:
        return tuple(nodes)
    return tuple(replace(node, store=store, units=store.units_of(node.parameters)) for node in nodes)


def module_node(module: nn.Module, inputs: Sequence[str] = ("hidden_SBH",)) -> Node:
    """One node for a whole layer: `hidden_SBH = module(*inputs, mb)`. The hooks of the module run."""

    def run(state: LayerState, mb: MicrobatchContext) -> LayerState:
        out_SBH = module(*(getattr(state, name) for name in inputs), mb)
        return state.evolve(**(dict.fromkeys(inputs) | {"hidden_SBH": out_SBH}))

    return Node("layer", "chunk", run, parameters_of(module))


def norm_node(norm: nn.Module) -> Node:
    """A norm of the hidden state after the last node of a layer."""

    def run(state: LayerState, mb: MicrobatchContext) -> LayerState:
        return state.evolve(hidden_SBH=norm(state.hidden_SBH))

    return Node("final_norm", None, run, parameters_of(norm))


class BoundNodes(NamedTuple):
    """Consecutive nodes on one microbatch."""

    nodes: Sequence[Node]
    mb: MicrobatchContext
    layer: int | None = None
    """Position of their layer in the chunk, see `Slot.layer`."""


def run_chain(chain: Iterable[BoundNodes], state: Any) -> Any:
    """Runs all nodes in order."""
    for bound in chain:
        state = run_nodes(bound.nodes, state, bound.mb)
    return state


def recompute_nodes(
    nodes: Sequence[Node],
    saved_tensors: SavedTensorPolicy,
    slot: SlotName,
    *,
    inputs: Sequence[str] = ("hidden_SBH",),
    output: str = "hidden_SBH",
) -> Node:
    """One node that saves only the fields `inputs` of the state and runs `nodes` again in backward.

    The nodes receive no other field and set the field `output`. Later nodes do not receive `inputs`.
    """

    def chain(*tensors_and_mb: Any) -> Any:
        *tensors, mb = tensors_and_mb
        return getattr(run_nodes(nodes, LayerState(**dict(zip(inputs, tensors, strict=True))), mb), output)

    def run(state: LayerState, mb: MicrobatchContext) -> LayerState:
        with state.discard:
            out = saved_tensors.checkpoint(chain, *(getattr(state, name) for name in inputs), mb=mb)
        return state.evolve(**(dict.fromkeys(inputs) | {output: out}))

    return Node("recomputed", slot, run, _all_parameters(nodes))


def capture_nodes(nodes: Sequence[Node], modules: Iterable[str], site: str) -> tuple[Node, ...]:
    """The chain of the layer `site` with one captured node per module of `modules` (keys of `CAPTURED_NODES`).

    For a microbatch with graph memory, a captured node replays its nodes as a CUDA graph, captured at the first use;
    otherwise it runs them. Modules that the layer does not have are skipped.
    """
    chain = list(nodes)
    for module in modules:
        names = [node.name for node in chain]
        first, last = CAPTURED_NODES[module]
        if first in names and last in names:
            span = slice(names.index(first), names.index(last) + 1)
            store = chain[span.start].store
            # The captured node acquires for all of them: a graph does not contain waits for other streams.
            group = tuple(replace(node, store=None) for node in chain[span])
            parameters = _all_parameters(group)
            part = CapturedModule(
                f"{module} of {site}", partial(run_nodes, group), cast(tuple[Parameter, ...], parameters)
            )
            captured = Node(module, group[0].slot, partial(_run_captured, part), parameters)
            chain[span] = acquire_nodes([captured], store)
    return tuple(chain)


def _run_captured(part: CapturedModule, state: LayerState, mb: MicrobatchContext) -> LayerState:
    # A graph outlives the microbatch that it was captured with, so it must not refer to that microbatch's scope.
    result: LayerState = part(state.evolve(discard=_NO_SCOPE), mb)
    return result if result.normed_SBH is None else result.evolve(discard=state.discard)


def schedule_steps(chain: Iterable[BoundNodes]) -> list[Step]:
    """The chain as steps of a schedule. Consecutive compute nodes of one slot form one step; the halves of an exchange
    are separate steps."""
    steps: list[Step] = []
    for nodes, mb, layer in chain:
        groups: list[tuple[SlotName, list[Node]]] = []
        for node in nodes:
            if node.slot is None or groups and groups[-1][0] == node.slot and stream_of(node.slot) == "compute":
                groups[-1][1].append(node)
            else:
                groups.append((node.slot, [node]))
        steps += [Step(slot, layer, partial(run_nodes, group, mb=mb)) for slot, group in groups]
    return steps


def _all_parameters(nodes: Iterable[Node]) -> tuple[nn.Parameter, ...]:
    return parameters_of(*(parameter for node in nodes for parameter in node.parameters))
