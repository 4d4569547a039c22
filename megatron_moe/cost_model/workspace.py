"""What is on the device for a moment, besides what is kept: gradients of activations, rows on their way, gathered
inputs.

A layer is differentiated from its end. While its feed-forward part is at work all that it keeps is there; while its
attention is, the feed-forward part has gone already. What a part computes again, or has back from the host, it has
while it is at work. Shapes are written as in `activations.py`; gradients have the activations' format.
"""

from dataclasses import dataclass

from megatron_moe.config.attention import AttentionConfig, MLAConfig
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import MLPConfig, MoEConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.cost_model.activations import (
    ActivationSizes,
    expert_rows,
    keeps_pairs,
)
from megatron_moe.cost_model.shards import share_of_layer

ATTENTION = ("input_norm", "attention")
"""Modules of the part of a layer that is differentiated last."""
_GRADS_OF_PAIRS = 2
"""Numbers per pair of query and key in the backward of dropout of attention, beside those that are kept."""
_PAIRS_OF_A_PART = 5
"""All of them, where attention is computed in parts: the probability, its mask, and three gradients."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Bytes at one moment of a backward."""

    dispatch: float = 0.0
    """Rows on their way to experts and back."""
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.dispatch + self.other

    def and_more(self, size: float) -> "Workspace":
        """The same moment with so many bytes more."""
        return Workspace(dispatch=self.dispatch, other=self.other + size)


def in_attention(layer: LayerConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Workspace:
    """The fullest moment of the backward of attention."""
    mixer = share_of_layer(layer, parallel).mixer
    size, tokens = sizes.activation, sizes.inner
    if isinstance(mixer, MLAConfig):
        queries, output = mixer.num_heads * mixer.q_head_dim, mixer.num_heads * mixer.v_head_dim
        latent = mixer.q_lora_rank or mixer.kv_lora_rank
    else:
        queries, output, latent = mixer.q_width, mixer.q_width, mixer.hidden_size
    gathered = _gathered(parallel, sizes)
    projection = gathered * mixer.hidden_size + tokens * output * size
    most = max(_in_core(mixer, queries, output, parallel, sizes), projection, 2 * gathered * latent)
    whole = layer.mixer
    if (
        isinstance(mixer, AttentionConfig)
        and isinstance(whole, AttentionConfig)
        and whole.num_query_groups < parallel.tp
    ):
        # the gradient of this rank's q, k and v, and that of all heads twice: as computed and as it is reduce-scattered
        most = max(most, tokens * size * (mixer.qkv_width + 2 * whole.qkv_width))
    return Workspace(other=most + _stream(mixer.hidden_size, sizes))


def _in_core(
    mixer: AttentionConfig | MLAConfig, queries: int, output: int, parallel: ParallelConfig, sizes: ActivationSizes
) -> float:
    """Gradients of softmax attention and its workspace. Where keys come from other ranks, every part adds to sums in
    the internal format: to those of its queries, and to those of keys and values."""
    if isinstance(mixer, MLAConfig):
        keys, by_head = queries + output, 0
    else:
        shared = mixer.num_query_groups < mixer.num_heads and not _own_kernel(mixer)
        keys, by_head = 2 * mixer.kv_width, 2 * queries if shared else 0
    # cuDNN's workspace: the gradient of q in the internal format, those of k and v by head where heads share them
    wide = 0 if _own_kernel(mixer) else queries * sizes.internal
    of_row, of_key = (output + queries) * sizes.activation + wide, (keys + by_head) * sizes.activation
    exchange, tokens = mixer.core.context_exchange, sizes.inner
    if keeps_pairs(mixer.core, parallel):
        pairs = _GRADS_OF_PAIRS * mixer.num_heads * sizes.length
        return float(tokens * (pairs + 2 * queries + output) * sizes.internal)
    if parallel.cp == 1 or exchange == "a2a":
        return float(tokens * (of_row + of_key))
    of_row, sum_of_keys = of_row + queries * sizes.internal, keys * sizes.internal
    # of dropout the pairs of one part, made again
    pairs = _PAIRS_OF_A_PART * mixer.num_heads * sizes.length * sizes.internal if mixer.core.dropout else 0
    if exchange == "allgather":  # chunk by chunk of the queries; one may see the keys of all ranks
        chunk = tokens // 2 if parallel.cp_split == "zigzag" else tokens
        return float(chunk * (of_row + pairs) + tokens * parallel.cp * (of_key + sum_of_keys))
    # in a ring three sums for keys: one to add to, one that comes and one that goes; and keys that come and go
    of_parts = of_row + of_key + 3 * sum_of_keys + 2 * keys * sizes.activation
    return float(tokens * (of_parts + pairs / parallel.cp))


def in_feed_forward(layer: LayerConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Workspace:
    """The fullest moment of the backward of a dense block, or of experts with those that are shared."""
    config, hidden = share_of_layer(layer, parallel).feed_forward, layer.mixer.hidden_size
    stream = _stream(hidden, sizes)
    if isinstance(config, MLPConfig):
        return Workspace(other=_in_mlp(config, parallel, sizes) + stream)
    moments = [_in_experts(config, parallel, sizes), _on_their_way(config, parallel, sizes)]
    if config.shared is not None:
        moments.append(Workspace(other=_in_mlp(config.shared.mlp, parallel, sizes)))
    return max(moments, key=lambda moment: moment.total).and_more(stream)


def in_loss(model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Workspace:
    """The gradient of the logits. Where the vocabulary is shared out the forward needs more: the logits, their distance
    from the largest and its exponential in the internal format. With a chunked loss also the logits themselves, of as
    many tokens as a chunk has."""
    vocab, chunk = model.vocab_size // parallel.tp, model.loss_chunk
    size = sizes.activation if parallel.tp == 1 else 3 * sizes.internal
    if chunk is None:
        return Workspace(other=float(sizes.inner * vocab * size))
    return Workspace(other=float(min(chunk, sizes.inner) * vocab * (size + sizes.activation)))


def _own_kernel(mixer: AttentionConfig | MLAConfig) -> bool:
    """Attention whose backward needs no workspace of the size of its inputs."""
    return mixer.core.window is not None


def _stream(hidden: int, sizes: ActivationSizes) -> float:
    """T H twice: the gradient of the residual stream, and that of what a part took of it."""
    return 2.0 * sizes.residual * hidden * sizes.activation


def _gathered(parallel: ParallelConfig, sizes: ActivationSizes) -> float:
    """Bytes per channel of a tensor of all positions, where a rank has its own ones between parts."""
    return float(sizes.inner * sizes.activation) if parallel.sequence_parallel and parallel.tp > 1 else 0.0


def _in_mlp(config: MLPConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
    """Gradients of the first product and of the activation; before, the gathered gradient of the result, and behind,
    the gathered input with its gradient."""
    ffn, gathered = sizes.inner * config.ffn_hidden_size * sizes.activation, _gathered(parallel, sizes)
    products = (1 + config.activation.fan) * ffn
    return max(
        products, gathered * config.hidden_size + ffn, 2 * gathered * config.hidden_size + config.activation.fan * ffn
    )


def _in_experts(config: MoEConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Workspace:
    """Gradients of the first product, and of the activation or of the rows."""
    experts = config.experts
    rows = expert_rows(config, parallel, sizes.residual, sizes.imbalance) * sizes.activation
    ffn = experts.ffn_hidden_size
    return Workspace(other=rows * (experts.activation.fan * ffn + max(ffn, experts.hidden_size)))


def _on_their_way(config: MoEConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Workspace:
    """Rows as they leave and as they arrive, and sorted for the experts."""
    if parallel.ep * parallel.etp == 1:
        return Workspace()
    width, tokens = config.experts.hidden_size, sizes.residual
    held = expert_rows(config, parallel, tokens, sizes.imbalance) * width * sizes.activation
    if config.dispatcher == "allgather":
        everyone = tokens * parallel.ep * parallel.etp
        return Workspace(dispatch=everyone * width * (sizes.activation + sizes.internal), other=held)
    sent = tokens * config.router.topk * width * sizes.activation
    return Workspace(dispatch=sent + held, other=held)
