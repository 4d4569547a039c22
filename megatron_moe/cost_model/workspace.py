"""Temporary memory of the backward: activation gradients, dispatch buffers and gathered inputs.

The backward of a layer's feed-forward part runs first, while all saved tensors of the layer are still allocated. Saved
tensors of the feed-forward part are freed before the backward of attention. Tensors that are recomputed or reloaded for
one part exist only during the backward of that part. Activation gradients have the number format of the activations.
The docstring of `activations.py` defines the dimension letters.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import MLPConfig
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import DEEPEP_SMS, MoEConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import LowPrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.transport import DEEPEP, SentCopies
from megatron_moe.cost_model.activations import (
    ActivationSizes,
    bytes_per_fp8_element,
    expert_rows,
    may_fuse,
    saves_pairs,
)
from megatron_moe.cost_model.expert_load import token_copies

ATTENTION = ("input_norm", "attention")
"""Modules of the attention part of a layer."""
_DEEPEP_SLOTS, _DEEPEP_SLOT_BYTES = 256, 8 + 128 * (8 + 4 + 4)
"""Tokens that a channel of DeepEP 1.2 receives from one rank at a time, and the bytes of each in addition to its row:
its source, and up to 128 expert ids, weights and scales (`Config::get_nvl_buffer_size_hint`)."""
_PAIR_GRADS = 2
"""Values per query-key pair that the backward of attention with dropout needs in addition to the saved values."""
_PAIRS_OF_A_BLOCK = 5
"""Values per query-key pair if attention with dropout runs backward in blocks: probability, mask, 3 gradients."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Temporary memory at one moment of a backward, in bytes."""

    dispatch: float = 0.0
    """Buffers of the token dispatcher."""
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.dispatch + self.other

    def and_more(self, size: float) -> "Workspace":
        """Returns a copy in which the field `other` is larger by `size` bytes."""
        return Workspace(dispatch=self.dispatch, other=self.other + size)


def in_attention(
    layer: LayerConfig, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None = None
) -> Workspace:
    """Peak workspace in the backward of a layer's attention part. `low`: FP8 or FP4 recipe of the layer."""
    mixer, size, tokens = layer.mixer.shard(parallel.tp), sizes.activation, sizes.inner
    latent = mixer.q_lora_rank or mixer.kv_lora_rank if isinstance(mixer, MLAConfig) else mixer.hidden_size
    gathered, copies = _gathered(parallel, sizes), _Copies.of(low)
    projection = (gathered + tokens * copies.grad) * mixer.hidden_size + tokens * mixer.out_width * size
    inputs = (gathered + (tokens * copies.column if gathered else 0)) * latent
    peak = max(_in_core(mixer, parallel, sizes), projection, inputs)
    if isinstance(layer.mixer, AttentionConfig) and layer.mixer.num_query_groups < parallel.tp:
        # gradients of the local q, k and v, and of q, k and v of all heads before and after the reduce-scatter
        local = layer.mixer.shard(parallel.tp).qkv_width
        peak = max(peak, tokens * size * (local + 2 * layer.mixer.qkv_width))
    return Workspace(other=peak + _stream(mixer.hidden_size, sizes))


def _in_core(mixer: AttentionConfig | MLAConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
    """Peak bytes of gradients and kernel workspace in the backward of softmax attention. With context
    parallelism, attention may be split into blocks of keys; gradients are then summed over blocks in fp32 or wider."""
    q_width, kv_copies, wide = mixer.q_width, 0, 0
    if mixer.core.window is None:
        # cuDNN's workspace: the gradient of q in the internal format, and the gradients of k and v expanded to all
        # heads if heads share them. Our sliding-window kernel needs no workspace of this size.
        wide = q_width * sizes.internal
        if isinstance(mixer, AttentionConfig) and mixer.num_query_groups < mixer.num_heads:
            kv_copies = 2 * q_width
    per_query = (mixer.out_width + q_width) * sizes.activation + wide
    per_key = (mixer.keys_values_width + kv_copies) * sizes.activation
    exchange, tokens = mixer.core.context_exchange, sizes.inner
    if saves_pairs(mixer.core, parallel):
        pairs = _PAIR_GRADS * mixer.num_heads * sizes.length
        return float(tokens * (pairs + 2 * q_width + mixer.out_width) * sizes.internal)
    if parallel.cp == 1 or exchange == "a2a":
        return float(tokens * (per_query + per_key))
    per_query, key_sums = per_query + q_width * sizes.internal, mixer.keys_values_width * sizes.internal
    # with dropout, the recomputed pairs of one block
    pairs = _PAIRS_OF_A_BLOCK * mixer.num_heads * sizes.length * sizes.internal if mixer.core.dropout else 0
    if exchange == "allgather":  # per chunk of queries, which may attend to the keys of all ranks
        chunk = tokens // 2 if parallel.cp_split == "zigzag" else tokens
        return float(chunk * (per_query + pairs) + tokens * parallel.cp * (per_key + key_sums))
    # ring: key gradients being accumulated, received and sent; keys being received and sent
    per_token = per_query + per_key + 3 * key_sums + 2 * mixer.keys_values_width * sizes.activation
    return float(tokens * (per_token + pairs / parallel.cp))


def in_feed_forward(
    layer: LayerConfig, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None = None
) -> Workspace:
    """Peak workspace in the backward of a layer's feed-forward part: a dense MLP, or routed and shared experts. `low`:
    FP8 or FP4 recipe of the layer."""
    config, hidden = layer.feed_forward.shard(parallel), layer.mixer.hidden_size
    stream = _stream(hidden, sizes)
    if isinstance(config, MLPConfig):
        return Workspace(other=_in_mlp(config, parallel, sizes, low) + stream)
    moments = [_in_experts(config, parallel, sizes, low), _in_dispatch(config, parallel, sizes)]
    if config.shared is not None:
        moments.append(Workspace(other=_in_mlp(config.shared.mlp, parallel, sizes, low)))
    return max(moments, key=lambda moment: moment.total).and_more(stream)


def in_loss(model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Workspace:
    """Peak workspace of the loss: the gradient of the hidden state, because that of the logits overwrites them. A
    chunked loss also stores the logits of one chunk."""
    hidden = sizes.inner * model.hidden_size * sizes.activation
    chunk = 0 if model.loss_chunk is None else min(model.loss_chunk, sizes.inner)
    return Workspace(other=float(hidden + chunk * (model.vocab_size // parallel.tp) * sizes.activation))


def _stream(hidden: int, sizes: ActivationSizes) -> float:
    """Bytes of two gradients [T, H]: of the residual stream, and of the input of attention or MLP."""
    return 2.0 * sizes.residual * hidden * sizes.activation


def _gathered(parallel: ParallelConfig, sizes: ActivationSizes) -> float:
    """Bytes per channel of an activation that is all-gathered over tp; 0 without sequence parallelism."""
    return float(sizes.inner * sizes.activation) if parallel.sequence_parallel and parallel.tp > 1 else 0.0


class _Copies(NamedTuple):
    """Bytes per element of the quantised copies of a tensor; 0 without FP8 or FP4."""

    row: float
    """Rowwise copy."""
    column: float
    """Columnwise copy, for weight gradients; 0 if these are not computed in FP8 or FP4."""

    @classmethod
    def of(cls, low: LowPrecisionConfig | None) -> "_Copies":
        if low is None:
            return cls(0.0, 0.0)
        return cls(bytes_per_fp8_element(low), bytes_per_fp8_element(low) if low.weight_grad else 0.0)

    @property
    def grad(self) -> float:
        """Both copies, which one kernel makes of an output gradient."""
        return self.row + self.column


def _in_mlp(
    config: MLPConfig, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
) -> float:
    """Peak bytes in the backward of an MLP, where these tensors exist one after the other: (gathered output gradient,
    its copies, gradient of fc2's input), (gradients of fc2's input and of fc1's output), (gathered input, its copy,
    gradient of fc1's output and its copies). With fused casts, the first two exist at the same time, with the
    activation and its columnwise copy, and the activation input if it was saved in FP8."""
    tokens, gathered, copies = sizes.inner, _gathered(parallel, sizes), _Copies.of(low)
    hidden, ffn, fan = config.hidden_size, config.ffn_hidden_size, config.activation.fan
    products: float = tokens * (1 + fan) * ffn * sizes.activation
    outer = (gathered + tokens * copies.grad) * hidden + tokens * ffn * sizes.activation
    inner = (gathered + (tokens * copies.column if gathered else 0)) * hidden
    if low is not None and low.fused_block is not None and not config.bias:
        products += outer + tokens * ffn * (copies.column + fan * copies.row)
        if low.activation_inputs:
            products += tokens * fan * ffn * sizes.activation
    return max(products, outer, inner + tokens * fan * ffn * (sizes.activation + copies.grad))


def _in_experts(
    config: MoEConfig, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
) -> Workspace:
    """Peak workspace of experts: gradient of fc1's output plus the larger of the gradients of fc2's and fc1's input.
    With fused casts: the activation, gradients of the outputs of fc2, the activation and fc1, and their FP8 copies.
    With FP8 weight gradients, most of them exist in FP8 only, on one rank also the gradient of fc2's output. Fused
    casts also restore an activation input that was saved in FP8."""
    experts, size = config.experts, sizes.activation
    rows = expert_rows(config, parallel, sizes.residual, sizes.imbalance)
    ffn, fan, hidden = experts.ffn_hidden_size, experts.activation.fan, experts.hidden_size
    if low is None or low.fused_block is None or not may_fuse(experts):
        return Workspace(other=rows * size * (fan * ffn + max(ffn, hidden)))
    copied, wide = hidden + fan * ffn, hidden + (2 + fan) * ffn
    if low.weight_grad:
        copied, wide = 2 * copied + ffn, ffn + (0 if parallel.ep * parallel.etp == 1 else hidden)
    if low.activation_inputs:
        wide += fan * ffn
    return Workspace(other=rows * (size * wide + bytes_per_fp8_element(low) * copied))


def _in_dispatch(config: MoEConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Workspace:
    """Workspace of the token dispatcher: buffers for sent rows, for received rows and for rows sorted by expert."""
    ranks = parallel.ep * parallel.etp
    if ranks == 1:
        return Workspace()
    width, tokens = config.experts.hidden_size, sizes.residual
    held = expert_rows(config, parallel, tokens, sizes.imbalance) * width * sizes.activation
    transport = config.transport(parallel)
    if transport.copies is SentCopies.ALL_RANKS:
        gathered = tokens * parallel.ep * parallel.etp
        return Workspace(dispatch=gathered * width * (sizes.activation + sizes.internal), other=held)
    if transport.copies is SentCopies.PER_RANK:
        # sums, of this rank's tokens and, if they are computed before the push, of all tokens, as DeepEP receives them
        sums_first = transport.sums_before_sending or config.flex_dispatcher_num_sms is not None
        summed = tokens * (1 + parallel.ep * parallel.etp if sums_first else 1)
        return Workspace(dispatch=summed * width * sizes.activation, other=held)
    if transport.copies is SentCopies.PER_HOST:
        # sums of rows, sums that the forwarding rank receives, and its sums; the choices are sent in the forward
        copies = token_copies(config.router, parallel)
        sums = tokens * (2 * copies.forwarded + copies.per_token)
        return Workspace(dispatch=sums * width * sizes.activation, other=held)
    sent = tokens * config.router.topk * width * sizes.activation
    return Workspace(dispatch=sent + held, other=held)


def receive_slots(
    layers: Iterable[tuple[LayerConfig, LowPrecisionConfig | None]], plan: RunPlan, sizes: ActivationSizes
) -> float:
    """Bytes of the flex dispatcher's receive buffers. `layers`: layers of a rank and their FP8 recipes. A channel has
    slots for the tokens of all ranks, and for the expert id (int32) and one value of each choice. There is one channel
    for sums and one for tokens per width and format; in a schedule that overlaps two microbatches, each pass has its
    own. DeepEP has one buffer with slots for a few tokens. HybridEP is counted as symmetric memory."""
    parallel, ranks = plan.parallel, plan.parallel.ep * plan.parallel.etp
    channels: dict[Hashable, float] = {}
    deepep = 0.0
    for layer, low in layers:
        config = layer.feed_forward
        if not isinstance(config, MoEConfig) or not config.transport(parallel).has_receive_slots:
            continue
        width, topk = config.experts.hidden_size, config.router.topk
        if config.transport(parallel) is DEEPEP:
            num_slots = (config.flex_dispatcher_num_sms or DEEPEP_SMS) // 2 * ranks * _DEEPEP_SLOTS
            deepep = max(deepep, num_slots * (width * max(sizes.activation, 2.0) + _DEEPEP_SLOT_BYTES))
            continue
        tokens, grads = config.exchange_formats(low)
        for content, in_backward, form in (
            ("tokens", False, tokens), ("tokens", True, grads), ("sums", False, None), ("sums", True, None)
        ):  # fmt: skip
            row = width * sizes.activation if form is None else form.row_bytes(width)
            key = content, in_backward and plan.pipeline.overlap, width, topk, form
            channels[key] = row + topk * (4 + sizes.internal)
    return deepep + ranks * sizes.residual * sum(channels.values())
