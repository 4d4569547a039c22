"""One transformer layer, as a chain of nodes that a schedule may run apart.

A dense layer is attention | feed-forward; an MoE layer is attention + router | dispatch | experts | combine | post, and
dispatch and combine have two halves each. What travels between two nodes stands in one object per boundary; a schedule
that overlaps layers detaches its tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_moe.data.batch import TokenMeta
from megatron_moe.kernels.ops import Kernels
from megatron_moe.memory.keeping import Keeping, Scope
from megatron_moe.model.attention import Attention
from megatron_moe.model.mla import MLA
from megatron_moe.model.mlp import MLP
from megatron_moe.model.norm import Norm
from megatron_moe.moe.dispatch.contract import Routing, Rows
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel import rng
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tensor import sequence_part
from megatron_moe.specs.attention import AttentionSpec, MLASpec
from megatron_moe.specs.model import LayerSpec
from megatron_moe.specs.moe import MoESpec
from megatron_moe.specs.pipeline.slots import Node as NodeName
from megatron_moe.specs.pipeline.slots import Step


@dataclass(frozen=True)
class Attended:
    """What the attention node leaves."""

    hidden_SBH: Tensor
    """The residual stream."""
    normed_SBH: Tensor
    """Its norm, the input of the feed-forward block."""
    forget: Scope
    """Of those who take the norm."""


@dataclass(frozen=True)
class Routed(Attended):
    """Tokens that know their experts."""

    tokens_SBH: Tensor
    """What travels: the norm, or its latent projection."""
    routing: Routing


@dataclass(frozen=True)
class OnTheirWay(Attended):
    """Rows between the halves of dispatch or combine."""

    pending: Any
    """The dispatcher's."""


@dataclass(frozen=True)
class Dispatched(Attended):
    """Rows before or after the experts."""

    rows: Rows
    ticket: Any
    """The dispatcher's; takes the rows back to their tokens."""


@dataclass(frozen=True)
class Combined(Attended):
    """Tokens that have their experts' sum."""

    routed_TH: Tensor


Node = tuple[NodeName, Callable[..., Any]]
"""Its name, and what it does: `run(state, meta)`, from what the node before left (the first takes the hidden state) to
what it leaves (the last, the hidden state). Two nodes of one name are the halves of an exchange."""


class Block(nn.Module):
    """hidden + mixer(norm(hidden)), then the same with the feed-forward block of the subclass.

    `site` is the module's path in the model; it names the dropout of both residual connections.
    """

    def __init__(self, spec: LayerSpec, site: str, ctx: ParallelContext, kernels: Kernels, keeping: Keeping) -> None:
        super().__init__()
        self.spec = spec
        self.site = site
        self.keeping = keeping
        self.positions = sequence_part(ctx)
        self.input_layernorm = Norm(spec.norm, spec.mixer.hidden_size, ctx, kernels)
        self.self_attention = _make_mixer(spec.mixer, f"{site}.self_attention", ctx, kernels, keeping)
        self.pre_mlp_layernorm = Norm(spec.norm, spec.mixer.hidden_size, ctx, kernels)

    @property
    def nodes(self) -> tuple[Node, ...]:
        raise NotImplementedError

    def steps(self, position: int, meta: TokenMeta) -> list[Step]:
        """The nodes on one microbatch, as a schedule takes them; `position` of the layer in its chunk."""
        return [Step(name, position, partial(run, meta=meta)) for name, run in self.nodes]

    def forward(self, hidden_SBH: Tensor, meta: TokenMeta) -> Tensor:
        """[S, B, H] -> [S, B, H]: the nodes in order."""
        state: Any = hidden_SBH
        for _, run in self.nodes:
            state = run(state, meta)
        return state

    def attend(self, hidden_SBH: Tensor, meta: TokenMeta) -> Attended:
        """Attention and its residual connection, and the norm of what follows."""
        with self.keeping.region("attn_norm"):
            normed_SBH = self.input_layernorm(hidden_SBH)
            forget = self._forget(self.input_layernorm, hidden_SBH, normed_SBH)
        with forget:
            out_SBH = self._dropped(self.self_attention(normed_SBH, meta), "attention", meta)
        with self.keeping.region("mlp_norm"):
            hidden_SBH, normed_SBH = self.pre_mlp_layernorm(out_SBH, self._residual(hidden_SBH, normed_SBH))
            forget = self._forget(self.pre_mlp_layernorm, hidden_SBH, normed_SBH)
        return Attended(self._residual(hidden_SBH, normed_SBH), normed_SBH, forget)

    def _forget(self, norm: Norm, hidden_SBH: Tensor, normed_SBH: Tensor) -> Scope:
        """The scope of those who take the norm."""
        return self.keeping.forget("layernorm", norm, (hidden_SBH,), normed_SBH)

    def _residual(self, hidden_SBH: Tensor, normed_SBH: Tensor) -> Tensor:
        """What the next output is added to."""
        return normed_SBH if self.spec.residual_from_norm else hidden_SBH

    def add(self, hidden_SBH: Tensor, out_SBH: Tensor, part: str, meta: TokenMeta) -> Tensor:
        """The residual connection, with dropout on what is added."""
        return hidden_SBH + self._dropped(out_SBH, part, meta)

    def _dropped(self, out_SBH: Tensor, part: str, meta: TokenMeta) -> Tensor:
        key = meta.key(f"{self.site}.{part}_residual")
        return rng.dropout(out_SBH, self.spec.hidden_dropout, key, part=self.positions)


class DenseBlock(Block):
    """A layer whose feed-forward block is one MLP."""

    def __init__(self, spec: LayerSpec, site: str, ctx: ParallelContext, kernels: Kernels, keeping: Keeping) -> None:
        super().__init__(spec, site, ctx, kernels, keeping)
        assert not isinstance(spec.feed_forward, MoESpec), f"{site} is an MoE layer"
        self.mlp = MLP(spec.feed_forward, ctx, kernels)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return ("attention", self.attend), ("experts", self.feed_forward)

    def feed_forward(self, state: Attended, meta: TokenMeta) -> Tensor:
        with state.forget:
            out_SBH = self.keeping.run("mlp", self.mlp, state.normed_SBH)
        return self.add(state.hidden_SBH, out_SBH, "mlp", meta)


class MoEBlock(Block):
    """A layer whose feed-forward block is a mixture of experts. `layer` is the index under which it reports metrics."""

    def __init__(
        self, spec: LayerSpec, layer: int, site: str, ctx: ParallelContext, kernels: Kernels, keeping: Keeping
    ) -> None:
        super().__init__(spec, site, ctx, kernels, keeping)
        assert isinstance(spec.feed_forward, MoESpec), f"{site} is a dense layer"
        self.mlp = MoELayer(spec.feed_forward, layer, ctx, kernels, keeping)

    @property
    def nodes(self) -> tuple[Node, ...]:
        if self.keeping.twice("moe"):
            return ("attention", self.attend), ("experts", self.feed_forward)
        return (
            ("attention", self.attend_and_route),
            ("dispatch", self.start_dispatch),
            ("dispatch", self.finish_dispatch),
            ("experts", self.experts),
            ("combine", self.start_combine),
            ("combine", self.finish_combine),
            ("post", self.post),
        )

    def feed_forward(self, state: Attended, meta: TokenMeta) -> Tensor:
        """All that follows attention, in one go."""
        with state.forget:
            out_SBH = self.keeping.run_with_meta("moe", self.mlp, state.normed_SBH, meta=meta)
        return self.add(state.hidden_SBH, out_SBH, "mlp", meta)

    def attend_and_route(self, hidden_SBH: Tensor, meta: TokenMeta) -> Routed:
        state = self.attend(hidden_SBH, meta)
        with state.forget:
            routing = self.mlp.route(state.normed_SBH, meta)
            tokens_SBH = self.mlp.tokens(state.normed_SBH)
        return Routed(state.hidden_SBH, state.normed_SBH, state.forget, tokens_SBH, routing)

    def start_dispatch(self, state: Routed, meta: TokenMeta) -> OnTheirWay:
        with state.forget:
            pending = self.mlp.start_dispatch(state.normed_SBH, state.tokens_SBH, state.routing)
        return OnTheirWay(state.hidden_SBH, state.normed_SBH, state.forget, pending)

    def finish_dispatch(self, state: OnTheirWay, meta: TokenMeta) -> Dispatched:
        rows, ticket = self.mlp.finish_dispatch(state.pending)
        return Dispatched(state.hidden_SBH, state.normed_SBH, state.forget, rows, ticket)

    def experts(self, state: Dispatched, meta: TokenMeta) -> Dispatched:
        return replace(state, rows=self.mlp.compute(state.rows))

    def start_combine(self, state: Dispatched, meta: TokenMeta) -> OnTheirWay:
        with state.forget:
            pending = self.mlp.start_combine(state.rows, state.ticket)
        return OnTheirWay(state.hidden_SBH, state.normed_SBH, state.forget, pending)

    def finish_combine(self, state: OnTheirWay, meta: TokenMeta) -> Combined:
        routed_TH = self.mlp.finish_combine(state.pending)
        return Combined(state.hidden_SBH, state.normed_SBH, state.forget, routed_TH)

    def post(self, state: Combined, meta: TokenMeta) -> Tensor:
        with state.forget:
            out_SBH = self.mlp.post(state.normed_SBH, state.routed_TH)
        return self.add(state.hidden_SBH, out_SBH, "mlp", meta)


def make_block(
    spec: LayerSpec, layer: int, site: str, ctx: ParallelContext, kernels: Kernels, keeping: Keeping | None = None
) -> Block:
    """The layer of the spec. `layer` is its global index, `site` its path in the model; `keeping` None: everything."""
    keeping = keeping or Keeping()
    if spec.is_moe:
        return MoEBlock(spec, layer, site, ctx, kernels, keeping)
    return DenseBlock(spec, site, ctx, kernels, keeping)


def _make_mixer(
    spec: AttentionSpec | MLASpec, site: str, ctx: ParallelContext, kernels: Kernels, keeping: Keeping
) -> nn.Module:
    if isinstance(spec, MLASpec):
        return MLA(spec, site, ctx, kernels, keeping)
    return Attention(spec, site, ctx, kernels, keeping)
