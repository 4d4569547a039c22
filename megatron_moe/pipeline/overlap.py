"""Launch order in which the forward of one microbatch is interleaved with the backward of another (overlapped pair).

Nodes are parts of a layer. Dispatch and combine of one direction overlap with computation of the other. The order does
not change numerics: each direction keeps its own order, and only the backward writes gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from megatron_moe.config.pipeline_layout import StageLayout

Direction = Literal["forward", "backward", "weight"]
NodeName = Literal["embedding", "attention", "dispatch", "experts", "combine", "post", "head", "chunk"]
"""Kinds of nodes of a model chunk. "attention" includes the router. In dense layers "experts" is the MLP, and there is
no "dispatch" or "combine". "post" is shared experts and residual addition, and the final norm in the last layer. "head"
includes the loss. "chunk" is a whole chunk that is not divided into nodes."""
Stream = Literal["compute", "communication"]


EXCHANGES: tuple[NodeName, ...] = ("dispatch", "combine")
"""Nodes that run on the communication stream; all others run on the compute stream."""


@dataclass(frozen=True)
class Step:
    """One step of a microbatch's forward through a chunk. Dispatch and combine have two steps: start and finish."""

    node: NodeName
    layer: int | None
    """Index of the layer in the chunk, MTP layers last; None for nodes outside the layers."""
    run: Callable[[Any], Any]
    """Maps the previous step's result (for the first step, the chunk's input) to the result of this step."""
    appended: tuple[NodeName, int | None] | None = None
    """Node and layer of a second node that runs at the end of the step; None if the step runs one node."""

    @property
    def stream(self) -> Stream:
        return "communication" if self.node in EXCHANGES else "compute"


@dataclass(frozen=True)
class OverlapNode:
    """Entry of the launch order: forward, backward or weight gradients of a node. Weight gradients have their own entry
    only if the backward is split."""

    direction: Direction
    node: NodeName
    layer: int | None = None
    """Index of the layer in the chunk, MTP layers last; None for nodes outside the layers."""

    def __str__(self) -> str:
        at = "" if self.layer is None else str(self.layer)
        return f"{'W' if self.direction == 'weight' else self.direction[0].upper()}{at}.{self.node}"


_PAIR_ORDER: tuple[tuple[Direction, NodeName], ...] = (
    ("backward", "post"),
    ("backward", "combine"),
    ("forward", "attention"),
    ("backward", "experts"),
    ("forward", "dispatch"),
    ("weight", "experts"),
    ("backward", "dispatch"),
    ("forward", "experts"),
    ("forward", "combine"),
    ("backward", "attention"),
    ("forward", "post"),
    ("weight", "attention"),
)
"""Launch order of the nodes of one forward layer and one backward layer: Megatron's order."""


def pair_nodes(
    forward: StageLayout | None,
    backward: StageLayout | None,
    *,
    split_backward: bool = False,
    exchange_steps: bool = True,
    early_attention_backward: bool = False,
) -> tuple[OverlapNode, ...]:
    """Nodes of an overlapped pair in launch order. If one chunk is None, returns the nodes of the other chunk only.

    The forward of the first layer is paired with the backward of the last, and so on; layers without partner follow.
    `split_backward`: weight gradients have their own nodes.
    `exchange_steps`: False leaves out dispatch and combine, whose halves then run with the computation before and after
    them (`schedule_steps`), because they neither block the host nor have a stream to prepare rows on.
    `early_attention_backward` moves the backward of attention before the forward of the experts, which frees the
    activations of attention earlier but hides less communication (`--ep-overlap-early-attn-memory-release`).
    """
    order = [each for each in _PAIR_ORDER if exchange_steps or each[1] not in EXCHANGES]
    if early_attention_backward:
        order.remove(("backward", "attention"))
        order.insert(order.index(("forward", "experts")), ("backward", "attention"))
    nodes: list[OverlapNode] = []
    if forward and forward.embedding:
        nodes.append(OverlapNode("forward", "embedding"))
    if backward and backward.loss:
        nodes += [OverlapNode("backward", "head"), OverlapNode("weight", "head")]
    for ahead, behind in zip_longest(range(_num_layers(forward)), reversed(range(_num_layers(backward)))):
        layers = {"forward": ahead, "backward": behind, "weight": behind}
        nodes += [OverlapNode(kind, node, layers[kind]) for kind, node in order if layers[kind] is not None]
    if forward and forward.loss:
        nodes.append(OverlapNode("forward", "head"))
    if backward and backward.embedding:
        nodes.append(OverlapNode("backward", "embedding"))
    return tuple(entry for entry in nodes if split_backward or entry.direction != "weight")


def _num_layers(stage: StageLayout | None) -> int:
    return len(stage.layers) + stage.num_mtp if stage else 0
