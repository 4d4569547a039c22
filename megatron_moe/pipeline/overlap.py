"""The nodes of a pair, in order: the forward of one microbatch interleaved with the backward of another.

While tokens of one direction travel between expert-parallel ranks, the other direction computes. The order within a
pair of layers is Megatron's. Order changes no number: nodes of one direction keep their own order, and the directions
meet in weight gradients alone, which only the backward writes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron_moe.pipeline.layout import StageLayout

Direction = Literal["forward", "backward", "weight"]
Node = Literal["embedding", "attention", "dispatch", "experts", "combine", "post", "head", "chunk"]
"""Of a layer: attention with router; tokens to experts; experts; rows back; shared experts and the residual sum. The
experts of a dense layer are its MLP, and nothing travels. A final norm belongs to the layer before it, the loss to the
head. A chunk is everything at once."""
Stream = Literal["compute", "communication"]


@dataclass(frozen=True)
class Step:
    """A piece of the forward of one microbatch through one chunk. An exchange is two: one sends, one receives."""

    node: Node
    layer: int | None
    """As in `Slot`."""
    run: Callable[[Any], Any]
    """From what the step before left to what this one leaves. The first takes what the chunk receives, the last leaves
    what the chunk gives."""

    @property
    def stream(self) -> Stream:
        return stream_of(self.node)


@dataclass(frozen=True)
class Slot:
    """One node of one direction. weight: the gradients of its weights, when the backward is split."""

    direction: Direction
    node: Node
    layer: int | None = None
    """Position in the chunk, layers of multi-token prediction last; None for embedding and head."""

    @property
    def stream(self) -> Stream:
        return stream_of(self.node)

    def __str__(self) -> str:
        at = "" if self.layer is None else str(self.layer)
        return f"{'W' if self.direction == 'weight' else self.direction[0].upper()}{at}.{self.node}"


def stream_of(node: Node) -> Stream:
    """Dispatch and combine are communication."""
    return "communication" if node in ("dispatch", "combine") else "compute"


_TOGETHER: tuple[tuple[Direction, Node], ...] = (
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
"""A forward layer beside a backward layer."""


def pair_slots(
    forward: StageLayout | None,
    backward: StageLayout | None,
    *,
    split_backward: bool = False,
    early_attention_backward: bool = False,
) -> tuple[Slot, ...]:
    """The nodes of a pair, or of one direction alone, in the order in which they are launched.

    The first layer forward stands beside the last one backward, and so on; what one direction has more of comes
    afterwards, backward first. With `early_attention_backward` the backward of attention comes before the forward of
    the experts: its activations are free earlier, less is hidden (`--ep-overlap-early-attn-memory-release`).
    """
    slots = list(_pair_slots(forward, backward, _order(early_attention_backward)))
    return tuple(slot for slot in slots if split_backward or slot.direction != "weight")


def _pair_slots(
    forward: StageLayout | None, backward: StageLayout | None, order: tuple[tuple[Direction, Node], ...]
) -> Iterator[Slot]:
    if forward and forward.embedding:
        yield Slot("forward", "embedding")
    if backward and backward.loss:
        yield Slot("backward", "head")
        yield Slot("weight", "head")
    ahead, behind = list(range(_num_layers(forward))), list(reversed(range(_num_layers(backward))))
    together = min(len(ahead), len(behind))
    for up, down in zip(ahead, behind, strict=False):
        yield from (Slot(direction, node, up if direction == "forward" else down) for direction, node in order)
    for down in behind[together:]:
        yield from (Slot(direction, node, down) for direction, node in order if direction != "forward")
    for up in ahead[together:]:
        yield from (Slot(direction, node, up) for direction, node in order if direction == "forward")
    if forward and forward.loss:
        yield Slot("forward", "head")
    if backward and backward.embedding:
        yield Slot("backward", "embedding")


def _num_layers(stage: StageLayout | None) -> int:
    return len(stage.layers) + stage.num_mtp if stage else 0


def _order(early_attention_backward: bool) -> tuple[tuple[Direction, Node], ...]:
    if not early_attention_backward:
        return _TOGETHER
    moved: tuple[Direction, Node] = ("backward", "attention")
    rest = tuple(entry for entry in _TOGETHER if entry != moved)
    at = rest.index(("forward", "experts"))
    return (*rest[:at], moved, *rest[at:])
