"""Temporary memory of the backward: activation gradients, dispatch buffers and gathered inputs.

The backward of a layer's feed-forward part runs first, while all saved tensors of the layer are still allocated. Saved
tensors of the feed-forward part are freed before the backward of attention. Tensors that are recomputed or reloaded for
one part exist only during the backward of that part. Activation gradients have the number format of the activations.
`config/component.py` defines the dimension letters.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from megatron_moe.config.context_ring import RingBuffers
from megatron_moe.config.costs import ActivationSizes, QuantizedCopyBytes, bytes_per_element
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import LowPrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.tp_overlap import SLOT_ALIGN, overlapped_gemms, symmetric_bytes
from megatron_moe.config.transport import SentCopies, TokenExchange
from megatron_moe.cost_model.expert_load import token_copies

ATTENTION = ("input_norm", "attention")
"""Modules of the attention part of a layer."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Temporary memory at one point of a backward, in bytes."""

    dispatch: float = 0.0
    """Buffers of the token dispatcher."""
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.dispatch + self.other

    def plus_bytes(self, size: float) -> "Workspace":
        """Returns a copy in which the field `other` is larger by `size` bytes."""
        return Workspace(dispatch=self.dispatch, other=self.other + size)


def mixer_workspace(
    layer: LayerConfig, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None = None
) -> Workspace:
    """Peak workspace in the backward of a layer's mixer. `low`: FP8 or FP4 recipe of the layer."""
    mixer = layer.mixer.backward_workspace(parallel, sizes, low) + residual_gradient_bytes(layer, sizes)
    return Workspace(other=max(mixer, layer.residual.backward_workspace(layer.hidden_size, sizes)))


def feed_forward_workspace(
    layer: LayerConfig, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None = None
) -> Workspace:
    """Peak workspace in the backward of a layer's feed-forward module. `low`: FP8 or FP4 recipe of the layer."""
    candidates = [Workspace(other=layer.feed_forward.backward_workspace(parallel, sizes, low))]
    exchange = layer.feed_forward.exchange(parallel, sizes, low)
    if exchange is not None:
        candidates.append(_in_dispatch(exchange, parallel, sizes))
    peak = max(candidates, key=lambda space: space.total).plus_bytes(residual_gradient_bytes(layer, sizes))
    connection = Workspace(other=layer.residual.backward_workspace(layer.hidden_size, sizes))
    return max(peak, connection, key=lambda space: space.total)


def loss_workspace(
    model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None = None
) -> Workspace:
    """Peak workspace of the loss: the gradient of the hidden state. The gradient of the logits overwrites the logits. A
    chunked loss also holds the logits of one chunk. `low`: FP8 or FP4 recipe; if it includes the output layer, a
    quantised copy of the gradient of the logits is added."""
    hidden, vocab = sizes.inner * model.hidden_size * sizes.activation_itemsize, model.vocab_size // parallel.tp
    chunk = 0 if model.loss_chunk is None else min(model.loss_chunk, sizes.inner)
    copies = QuantizedCopyBytes.of(low if low is not None and low.output_layer else None)
    return Workspace(other=float(hidden + vocab * (chunk * sizes.activation_itemsize + sizes.inner * copies.grad)))


def residual_gradient_bytes(layer: LayerConfig, sizes: ActivationSizes) -> float:
    """Bytes of the gradients [T, H] of all residual streams and of the input of the mixer or feed-forward module."""
    return (1.0 + layer.residual.num_streams) * sizes.residual * layer.hidden_size * sizes.activation_itemsize


def _in_dispatch(exchange: TokenExchange, parallel: ParallelConfig, sizes: ActivationSizes) -> Workspace:
    """Workspace of the token dispatcher: buffers for sent rows, for received rows and for rows sorted by expert."""
    width, tokens, copies = exchange.width, sizes.residual, exchange.transport.copies
    held = exchange.rows * width * sizes.activation_itemsize
    if copies is SentCopies.ALL_RANKS:
        if not exchange.transport.delivers_tokens and sizes.internal_itemsize > sizes.activation_itemsize:
            held += exchange.rows * width * sizes.internal_itemsize  # the rows are summed in a wider format
        return Workspace(dispatch=tokens * parallel.ep * parallel.etp * width * sizes.internal_itemsize, other=held)
    if copies is SentCopies.PER_RANK:
        # sums of this rank's tokens and, if the transport sums before it sends, of all tokens
        summed = tokens * (1 + parallel.ep * parallel.etp if exchange.sums_before_sending else 1)
        return Workspace(dispatch=summed * width * sizes.activation_itemsize, other=held)
    if copies is SentCopies.PER_HOST:
        # forwarded: sums of the rows of each received token, and as many partial sums that this rank receives as a
        # forwarding rank; per_token: totals of these per host. Expert ids were sent in the forward pass and need no
        # buffer here.
        of_token = token_copies(exchange, parallel)
        sums = tokens * (2 * of_token.forwarded + of_token.per_token)
        return Workspace(dispatch=sums * width * sizes.activation_itemsize, other=held)
    sent = tokens * exchange.topk * width * sizes.activation_itemsize
    return Workspace(dispatch=sent + held, other=held)


def receive_buffer_bytes(
    layers: Iterable[tuple[LayerConfig, LowPrecisionConfig | None]], plan: RunPlan, sizes: ActivationSizes
) -> float:
    """Bytes of the flex dispatcher's receive buffers. `layers`: layers of a rank and their FP8 recipes. A channel has
    slots for the tokens of all ranks, and for the expert id (int32) and one value of each choice. There is one channel
    for sums and one for tokens per width and format; in a schedule that overlaps two microbatches, each pass has its
    own. HybridEP is counted as symmetric memory."""
    parallel, ranks = plan.parallel, plan.parallel.ep * plan.parallel.etp
    channels: dict[Hashable, float] = {}
    buffer = 0.0
    for layer, low in layers:
        exchange = layer.feed_forward.exchange(parallel, sizes, low)
        if exchange is None:
            continue
        buffer = max(buffer, exchange.buffer_bytes)
        if not exchange.transport.has_channels:
            continue
        width, topk, (tokens, grads) = exchange.width, exchange.topk, exchange.formats
        for content, in_backward, fmt in (
            ("tokens", False, tokens), ("tokens", True, grads), ("sums", False, None), ("sums", True, None)
        ):  # fmt: skip
            row = width * sizes.activation_itemsize if fmt is None else fmt.row_bytes(width)
            key = content, in_backward and plan.pipeline.overlap, width, topk, fmt
            channels[key] = row + topk * (4 + sizes.internal_itemsize)
    return buffer + ranks * sizes.residual * sum(channels.values())


def largest_shard_bytes(plan: RunPlan) -> int:
    """Bytes of the largest shard of a sequence that `--tp-comm-overlap` sends; 0 if no GEMM overlaps."""
    parallel = plan.parallel
    channels = [
        spec.shape[1 - (spec.meta.tp_dim or 0)]
        for layer in _distinct_layers(plan)
        for spec in layer.parameters(parallel)
        if overlapped_gemms(spec, parallel)
    ]
    return _slot_bytes(
        max(channels, default=0) * bytes_per_element(plan.precision.params), parallel.cp * parallel.tp, plan
    )


def sequence_buffer_bytes(plan: RunPlan) -> int:
    """Bytes of symmetric memory of `--tp-comm-overlap`: a send buffer, one slot per other rank, and flags."""
    shard = largest_shard_bytes(plan)
    return symmetric_bytes(shard, plan.parallel.tp) if shard else 0


def ring_buffers(plan: RunPlan) -> RingBuffers | None:
    """Buffers of the ring of context-parallel ranks; None if they do not copy from each other's memory."""
    parallel = plan.parallel
    channels = max(layer.mixer.ring_channels(parallel) for layer in _distinct_layers(plan))
    if not channels or not parallel.shares_keys_values:
        return None
    size = bytes_per_element(plan.precision.params)
    # a ring of two ranks sends one gradient, which is not summed
    sums = size if parallel.cp == 2 else max(size, bytes_per_element("fp32"))
    return RingBuffers(*(_slot_bytes(channels * each, parallel.cp, plan) for each in (size, sums)))


def gathered_shard_bytes(plan: RunPlan) -> int:
    """Bytes of the largest shard that context-parallel ranks copy from each other's memory; 0 if they copy none."""
    parallel = plan.parallel
    if not parallel.shares_keys_values:
        return 0
    channels = max(layer.mixer.gathered_context_channels(parallel) for layer in _distinct_layers(plan))
    return _slot_bytes(channels * bytes_per_element(plan.precision.params), parallel.cp, plan)


def context_buffer_bytes(plan: RunPlan) -> int:
    """Bytes of symmetric memory of the context-parallel ranks: of their ring, and of the shards that they gather."""
    buffers, shard, cp = ring_buffers(plan), gathered_shard_bytes(plan), plan.parallel.cp
    return (0 if buffers is None else buffers.total(cp)) + (symmetric_bytes(shard, cp) if shard else 0)


def _distinct_layers(plan: RunPlan) -> Iterable[LayerConfig]:
    return dict.fromkeys((*plan.model.layers, *([plan.model.mtp_layer] if plan.model.num_mtp else [])))


def _slot_bytes(token_bytes: int, num_ranks: int, plan: RunPlan) -> int:
    """Bytes of the tokens of one of `num_ranks` ranks in the largest microbatch, aligned."""
    batch = max(plan.batch.micro_batch_size, plan.batch.evaluation.micro_batch_size)
    return -(-plan.data.seq_length // num_ranks * batch * token_bytes // SLOT_ALIGN) * SLOT_ALIGN
