"""What one rank keeps of a microbatch between forward and backward: every saved tensor, by name.

The list is that of our own modules, with kernels that keep what their backward needs and nothing else: a norm keeps its
input, an activation its input, attention q, k, v, its output and one number per query; rotation, permutation and sums
keep nothing. Sizes are those of one rank. Shapes are written with these letters, the alphabet of docs/shapes.md:

  T tokens of the residual stream on this rank: S / (cp * tp) * B under sequence parallelism, else S / cp * B
  U tokens that heads and dense channels see: S / cp * B
  R rows that this rank's experts take       N, G heads and query groups on this rank, D, E their widths
  H hidden, F ffn channels on this rank      V rows of the vocabulary on this rank

Dropout of attention is the exception: its kernel is plain torch, which keeps a number per pair of query and key.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from megatron_moe.config.attention import (
    AttentionConfig,
    CoreAttentionConfig,
    MLAConfig,
    NormConfig,
)
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import (
    MLPConfig,
    MoEConfig,
    SharedExpertsConfig,
)
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import FloatName, PrecisionConfig
from megatron_moe.cost_model.shards import share_of_layer
from megatron_moe.pipeline.layout import StageLayout

_BYTES = (("fp64", 8), ("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 1))
WHOLE_LAYER = "whole layer"
"""What frees a tensor of a layer that looks ahead where all whole layers are computed again."""
_INDEX = 8
"""Bytes of an id."""


def num_bytes(name: str) -> int:
    """Bytes of one number of a format."""
    return dict(_BYTES)[name]


@dataclass(frozen=True, kw_only=True)
class KeptTensor:
    """One saved tensor."""

    module: str
    """input_norm, attention, mlp_norm, mlp, router, experts, shared, head, mtp, embedding, positions."""
    name: str
    shape: str
    bytes: int
    elements: int
    low: bool = False
    """The input of a matrix and of nothing else: with FP8 products it is kept in FP8."""
    forgotten: tuple[str, ...] = ()
    """Modules of selective recompute that free it."""
    moves: str = ""
    """Module of activation offloading that moves it."""
    fair_bytes: int = 0
    """Of rows that can wait in pages: with the fair share of rows in place of those that it has."""


@dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """How much a rank sees of a microbatch, and in what formats."""

    residual: int
    """T."""
    inner: int
    """U."""
    activation: int
    """Bytes of an activation."""
    internal: int
    """Bytes of promote(fp32, activation)."""
    length: int
    """S: tokens of a sequence, over all ranks."""
    sequences: int = 1
    """Of a microbatch."""
    imbalance: float = 1.0
    """Rows of the fullest rank's experts, as a multiple of the mean."""

    @classmethod
    def of(
        cls,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
        *,
        micro: int,
        seq_length: int,
        imbalance: float = 1.0,
    ) -> "ActivationSizes":
        """Of one microbatch of `micro` sequences."""
        inner = seq_length // parallel.cp * micro
        wide: FloatName = "fp64" if precision.params == "fp64" else "fp32"
        return cls(
            residual=inner // parallel.tp if parallel.sequence_parallel else inner,
            inner=inner,
            activation=num_bytes(precision.params),
            internal=num_bytes(wide),
            length=seq_length,
            sequences=micro,
            imbalance=imbalance,
        )


def expert_rows(config: MoEConfig, parallel: ParallelConfig, num_tokens: int, imbalance: float = 1.0) -> float:
    """R: rows that a rank's experts take of a microbatch with `num_tokens` tokens on every rank.

    `imbalance`: as a multiple of the fair share; one rank takes all rows whatever the routing is. Experts with a padded
    capacity take neither more nor less, and the all-gather dispatcher sizes its buffers by the bound that no routing
    exceeds.
    """
    ranks, router = parallel.ep * parallel.etp, config.router
    local = router.num_experts // parallel.ep
    if config.capacity is not None and config.capacity.pad:
        fair = num_tokens * router.topk / router.num_experts * config.capacity.factor
        return ranks * local * min(num_tokens, ceil(fair))
    if ranks > 1 and config.dispatcher == "allgather":
        return ranks * num_tokens * min(router.topk, local)
    return parallel.etp * num_tokens * router.topk * (imbalance if parallel.ep > 1 else 1.0)


def layer_tensors(layer: LayerConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> list[KeptTensor]:
    """What one layer keeps of a microbatch."""
    share = share_of_layer(layer, parallel)
    hidden = share.mixer.hidden_size
    feed_forward = share.feed_forward
    moe = isinstance(feed_forward, MoEConfig)
    kept = list(_norm("input_norm", layer.norm, hidden, sizes, low=True, input_moves="attn_norm", moves="qkv_linear"))
    mixer = share.mixer
    kept += _mla(mixer, sizes) if isinstance(mixer, MLAConfig) else _attention(mixer, layer, sizes)
    if keeps_pairs(mixer.core, parallel):
        kept += _pairs(mixer, sizes)
    # the router reads the same tensor in the activations' format, so that FP8 products free nothing of it
    kept += _norm("mlp_norm", layer.norm, hidden, sizes, low=not moe, input_moves="mlp_norm", moves="")
    if isinstance(feed_forward, MoEConfig):
        kept += _moe(feed_forward, parallel, sizes)
    else:
        kept += _mlp("mlp", feed_forward, sizes, "mlp")
    if layer.hidden_dropout:
        at = ("attention", "mlp")
        kept += [_tensor(module, "dropout mask", "T H", sizes.residual * hidden, sizes.activation) for module in at]
    return kept


def stage_tensors(
    model: ModelConfig, stage: StageLayout, parallel: ParallelConfig, sizes: ActivationSizes
) -> list[KeptTensor]:
    """What a stage keeps besides its layers: ids, the final norm, logits, and multi-token prediction."""
    kept: list[KeptTensor] = list(_rotations(model, stage, sizes))
    if stage.embedding:
        kept.append(_tensor("embedding", "tokens", "U", sizes.inner, _INDEX))
    if stage.final_norm:
        kept += _norm("final_norm", model.norm, model.hidden_size, sizes)
    if stage.loss:
        kept += _head(model, parallel, sizes)
    depths = model.mtp.num_layers if model.mtp else 0
    if stage.num_mtp:
        for _ in range(depths):
            kept += _look_ahead(model, parallel, sizes)
    if stage.loss:
        kept += [replace(each, module="mtp") for _ in range(depths) for each in _head(model, parallel, sizes)]
    return kept


def _rotations(model: ModelConfig, stage: StageLayout, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    """cos and sin, made once per microbatch for all layers of a stage that rotate alike."""
    layers = [model.layers[index] for index in stage.layers] + [model.layers[-1]] * bool(stage.num_mtp)
    for rope in dict.fromkeys(layer.mixer.rope for layer in layers):
        if rope is not None:
            yield _tensor("positions", "cos and sin", "2 U D", 2 * sizes.inner * rope.dim, sizes.internal)


def _tensor(module: str, name: str, shape: str, elements: float, size: int, **marks: object) -> KeptTensor:
    count = int(elements)
    return KeptTensor(module=module, name=name, shape=shape, bytes=count * size, elements=count, **marks)  # type: ignore[arg-type]


def _norm(
    module: str,
    config: NormConfig,
    width: int,
    sizes: ActivationSizes,
    *,
    low: bool = False,
    input_moves: str = "",
    moves: str = "",
) -> Iterator[KeptTensor]:
    """A norm of the residual stream: its input, and its output, which is the input of what follows."""
    tokens = sizes.residual
    numbers = 2 if config.kind == "LayerNorm" else 1
    yield _tensor(module, "input", "T H", tokens * width, sizes.activation, moves=input_moves)
    yield _tensor(module, "statistics", "T", tokens * numbers, sizes.internal)
    forgotten = ("layernorm",) if module in ("input_norm", "mlp_norm") else ()
    yield _tensor(module, "output", "T H", tokens * width, sizes.activation, low=low, forgotten=forgotten, moves=moves)


def _attention(config: AttentionConfig, layer: LayerConfig, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    """v is a view of the qkv product, which therefore stays whole, and so is k where nothing changes it. q is gathered
    from the query groups, so it is one only if there is a single group."""
    tokens, size = sizes.inner, sizes.activation
    moved = {"moves": "core_attn"}
    gathered = config.num_query_groups > 1
    # one kernel norms, rotates and splits the product, and reads it again in its backward
    in_one = config.qk_norm == "per_head" and config.norm.kind == "RMSNorm" and config.rope is not None
    in_one = in_one and not config.output_gate
    yield _tensor("attention", "qkv", "U (N+2G) D", tokens * config.qkv_width, size, **moved)
    if config.qk_norm == "full":
        whole = (layer.mixer.num_heads + _groups(layer)) * config.head_dim
        yield _tensor("attention", "q and k before their norm", "U (N+G) D", tokens * whole, size)
    elif config.qk_norm in ("per_head", "l2") and gathered and not in_one:
        yield _tensor("attention", "q before its norm", "U N D", tokens * config.q_width, size)
    if config.qk_norm != "none" and not in_one:
        rows = 2 if config.qk_norm == "full" else config.num_heads + config.num_query_groups
        yield _tensor("attention", "statistics of q and k", "U (N+G)", tokens * rows, sizes.internal)
    changed = config.qk_norm != "none" or config.rope is not None
    if changed or gathered:
        yield _tensor("attention", "q", "U N D", tokens * config.q_width, size, **moved)
    if changed:
        yield _tensor("attention", "k", "U G D", tokens * config.kv_width, size, **moved)
    yield from _core(config.num_heads, config.q_width, sizes)
    if config.output_gate:
        # both factors in the internal format, of which the output is one already where the formats are the same
        factors = 1 if sizes.activation == sizes.internal else 2
        yield _tensor("attention", "gate and output", "U N D", factors * tokens * config.q_width, sizes.internal)
        yield _tensor("attention", "gated output", "U N D", tokens * config.q_width, size, low=True)


def _groups(layer: LayerConfig) -> int:
    assert isinstance(layer.mixer, AttentionConfig), f"{layer.mixer} has no query groups"
    return layer.mixer.num_query_groups


def _core(num_heads: int, width: int, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    """The output, which is the last matrix's input too, and one log-sum-exp per query."""
    yield _tensor("attention", "output", "U N E", sizes.inner * width, sizes.activation, moves="attn_proj")
    yield _tensor("attention", "log-sum-exp", "U N", sizes.inner * num_heads, sizes.internal, forgotten=("core_attn",))


def keeps_pairs(core: CoreAttentionConfig, parallel: ParallelConfig) -> bool:
    """Is there a number per pair of query and key between forward and backward? Attention in parts, to keys of other
    ranks, makes them again."""
    return core.dropout > 0.0 and (parallel.cp == 1 or core.context_exchange == "a2a")


def _pairs(mixer: AttentionConfig | MLAConfig, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    """Softmax, the mask and their product; and what was multiplied, by head and in the internal format."""
    marks = {"forgotten": ("core_attn",), "moves": "core_attn"}
    rows, query, value = sizes.inner * mixer.num_heads, *_widths(mixer)
    yield _tensor(
        "attention", "probabilities with dropout", "3 U N S", 3 * rows * sizes.length, sizes.internal, **marks
    )
    copied = (1 if sizes.activation == sizes.internal else 2) * query + value
    yield _tensor("attention", "q, k and v by head", "U N (2D+E)", rows * copied, sizes.internal, **marks)


def _widths(mixer: AttentionConfig | MLAConfig) -> tuple[int, int]:
    """Of a query's and of a value's head."""
    if isinstance(mixer, MLAConfig):
        return mixer.q_head_dim, mixer.v_head_dim
    return mixer.head_dim, mixer.head_dim


def _mla(config: MLAConfig, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    """Latents are made of a rank's own positions and gathered for the way up, which keeps the rank's own ones."""
    tokens, own, size = sizes.inner, sizes.residual, sizes.activation
    width = config.num_heads * config.q_head_dim
    up = {"forgotten": ("mla_up_proj",), "moves": "core_attn"}
    if config.q_lora_rank is not None:
        yield _tensor("attention", "q latent", "T Q", own * config.q_lora_rank, size)
        if config.qk_norm:
            yield _tensor("attention", "q latent, normed", "T Q", own * config.q_lora_rank, size, low=True)
    yield _tensor("attention", "kv latent", "T (L+P)", own * (config.kv_lora_rank + config.qk_rope_dim), size)
    if config.qk_norm:
        yield _tensor("attention", "kv latent, normed", "T L", own * config.kv_lora_rank, size, low=True)
        statistics = 2 if config.q_lora_rank is not None else 1
        yield _tensor("attention", "statistics of latents", "T", own * statistics, sizes.internal)
    yield _tensor("attention", "q", "U N D", tokens * width, size, **up)
    yield _tensor("attention", "k", "U N D", tokens * width, size, **up)
    kv = config.num_heads * (config.qk_head_dim + config.v_head_dim)
    yield _tensor("attention", "kv, of which v is a view", "U N (D-P+E)", tokens * kv, size, **up)
    yield from _core(config.num_heads, config.num_heads * config.v_head_dim, sizes)


def _mlp(module: str, config: MLPConfig, sizes: ActivationSizes, forgotten: str) -> Iterator[KeptTensor]:
    tokens, ffn = sizes.inner, config.ffn_hidden_size
    fan, mark = config.activation.fan, {"forgotten": (forgotten,)}
    yield _tensor(module, "first product", "U 2F" if fan == 2 else "U F", tokens * fan * ffn, sizes.activation, **mark)
    yield _tensor(module, "activation", "U F", tokens * ffn, sizes.activation, low=True, **mark)


def _moe(config: MoEConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    for each in (*_router(config, sizes), *_experts(config, parallel, sizes), *_shared(config.shared, sizes)):
        yield replace(each, forgotten=(*each.forgotten, "moe"))


def _router(config: MoEConfig, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    """Its input is the norm's output. Logits, or the scores made of them, once for the choice and once for losses."""
    router, tokens = config.router, sizes.residual
    losses = any(router.aux_loss_coeffs) and any(kind.endswith("aux_loss") for kind in router.balancing)
    number = sizes.activation if router.dtype is None else num_bytes(router.dtype)
    scores = tokens * router.num_experts
    yield _tensor("router", "scores", "T E", scores, sizes.internal)
    if losses:
        yield _tensor("router", "scores of the balancing loss", "T E", scores, sizes.internal)
    yield _tensor("router", "choices", "T K", tokens * router.topk, _INDEX + number)


def _experts(config: MoEConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    """The first matrix's rows are copies of tokens; the result of the second is kept only where it is weighed."""
    experts, size = config.experts, sizes.activation
    rows = expert_rows(config, parallel, sizes.residual, sizes.imbalance)
    fan, ffn = experts.activation.fan, experts.ffn_hidden_size
    number = size if config.router.dtype is None else num_bytes(config.router.dtype)
    yield _tensor("experts", "row index", "R", rows * 2, _INDEX)
    yield _tensor("experts", "probabilities", "R", rows, number)
    fair = parallel.etp * sizes.residual * config.router.topk * size
    moved = {"moves": "expert_fc1", "fair_bytes": fair * experts.hidden_size}
    yield _tensor("experts", "rows", "R H", rows * experts.hidden_size, size, low=True, **moved)
    product, moved = rows * fan * ffn, {"moves": "moe_act", "fair_bytes": fair * fan * ffn}
    yield _tensor("experts", "first product", "R 2F" if fan == 2 else "R F", product, size, **moved)
    forgotten = {"forgotten": ("moe_act",), "fair_bytes": fair * ffn}
    yield _tensor("experts", "activation", "R F", rows * ffn, size, low=True, **forgotten)
    if experts.probs_on_output:
        yield _tensor("experts", "results before their probability", "R H", rows * experts.hidden_size, size)
    elif experts.bias:
        # the second bias is multiplied by the probability of each row
        yield _tensor("experts", "bias of rows", "R H", rows * experts.hidden_size, sizes.internal)
    if experts.probs_on_input:
        yield _tensor("experts", "rows before their probability", "R H", rows * experts.hidden_size, sizes.internal)
    if config.latent_size:
        yield _tensor("experts", "latent sum", "T L", sizes.residual * config.latent_size, size, low=True)


def _shared(config: SharedExpertsConfig | None, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    if config is None:
        return
    yield from _mlp("shared", config.mlp, sizes, "shared_experts")
    if config.gate:
        hidden = config.mlp.hidden_size
        mark = {"forgotten": ("shared_experts",)}
        yield _tensor("shared", "output", "T H", sizes.residual * hidden, sizes.activation, **mark)
        yield _tensor("shared", "gate", "T", sizes.residual * 2, sizes.internal, **mark)


def _head(model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    """The head's input is the final norm's output. With a chunked loss no logits wait for the backward."""
    if model.loss_chunk is None:
        yield _tensor("head", "logits", "U V", sizes.inner * (model.vocab_size // parallel.tp), sizes.activation)
    yield _tensor("head", "labels and normaliser", "U", sizes.inner, _INDEX + sizes.internal)


def _look_ahead(model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[KeptTensor]:
    """One depth of multi-token prediction. The state it starts from is kept already, by the final norm's reader."""
    hidden, tokens = model.hidden_size, sizes.residual
    yield _tensor("mtp", "embedding", "T H", tokens * hidden, sizes.activation)
    yield _tensor("mtp", "statistics", "T", 2 * tokens, sizes.internal)
    yield _tensor("mtp", "joined", "T 2H", 2 * tokens * hidden, sizes.activation, low=True)
    for each in layer_tensors(model.layers[-1], parallel, sizes):
        its_input = (each.module, each.name) == ("input_norm", "input")
        forgotten = each.forgotten if its_input else (*each.forgotten, WHOLE_LAYER)
        yield replace(each, module="mtp", forgotten=forgotten)
    yield from _norm("mtp", model.norm, hidden, sizes)
