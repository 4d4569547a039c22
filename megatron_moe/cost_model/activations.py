"""Tensors that one rank saves for the backward of one microbatch, by layer and by pipeline stage.

Norms and activation functions save their input; attention saves q, k, v, its output and the log-sum-exp; RoPE,
permutation and sums save nothing. Attention with dropout runs in unfused torch ops, which save tensors with one element
per query-key pair. Sizes are per rank. Letters in shapes, as in docs/shapes.md:

  T tokens of the residual stream: S / (cp * tp) * B with sequence parallelism, else S / cp * B
  U tokens inside attention and MLP: S / cp * B
  R rows of the local experts     N, G local heads and query groups     D, E q and v head dims
  H hidden size                   F local ffn channels                  V local vocabulary
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from types import MappingProxyType

from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, NormConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import MLPConfig
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.moe import ExpertsConfig, MoEConfig, SharedExpertsConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import StageLayout
from megatron_moe.config.precision import LowPrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.transport import RowBound

_BYTES = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1})
_LOW_BYTES = MappingProxyType({"blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16})
"""FP8 or FP4 recipe -> bytes per element of a quantised activation, including scales; 1 for recipes not listed."""
WHOLE_LAYER = "whole layer"
"""Entry in `SavedActivation.recomputed_by`: the tensor is in an MTP layer and is freed by uniform full recompute."""
_INDEX = 8
"""Bytes per index (int64)."""


def num_bytes(name: str) -> int:
    """Bytes per element of a number format."""
    return _BYTES[name]


def bytes_per_fp8_element(config: LowPrecisionConfig) -> float:
    """Bytes per element of an activation or gradient that is quantised by an FP8 or FP4 recipe."""
    return _LOW_BYTES.get(config.recipe, 1.0)


@dataclass(frozen=True, kw_only=True)
class SavedActivation:
    """One tensor saved for backward."""

    module: str
    """input_norm, attention, mlp_norm, mlp, router, experts, shared, final_norm, head, mtp, embedding or positions."""
    name: str
    shape: str
    bytes: int
    elements: int
    rows_of_experts: tuple[int, int] | None = None
    """Numbers of rows and of experts, for rows of experts, whose low-precision copies are padded per expert."""
    low: str = ""
    """Value of `--low-precision-activation-modules` with which the tensor is saved in the format of an FP8 or FP4
    recipe, because only GEMMs read it; empty: it is never saved in that format."""
    shared: bool = False
    """True if two layers save the tensor, which have a common copy in formats with `LowPrecisionConfig.fused_block`."""
    read_unless: str = ""
    """Value of `--recompute-modules` without which another op than a GEMM also reads the tensor in backward."""
    is_activation_input: bool = False
    """Whether `LowPrecisionConfig.activation_inputs` applies to the tensor."""
    fused_bytes: int | None = None
    """Bytes if the casts to FP8 are fused into other ops (`LowPrecisionConfig.fused_block`); None: as without
    fusion."""
    recomputed_by: tuple[str, ...] = ()
    """Values of `--recompute-modules` that free this tensor after forward, and possibly `WHOLE_LAYER`."""
    offloaded_by: str = ""
    """Value of `--offload-modules` that moves this tensor to host memory; empty: the tensor is never offloaded."""
    even_bytes: int = 0
    """Bytes of the tensor if the expert load is even, for sizing the paged stash. 0: the tensor is never stashed."""


@dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """Token counts of one microbatch on one rank, and bytes per element."""

    residual: int
    """Number of tokens in this rank's shard of the residual stream (dimension T)."""
    inner: int
    """Number of tokens inside attention and MLP, after the all-gather of sequence parallelism (dimension U)."""
    activation: int
    """Bytes per activation element."""
    internal: int
    """Bytes per element of values that are computed in fp32, or in fp64 if activations are fp64."""
    length: int
    """Full sequence length S, before context parallelism splits it."""
    imbalance: float = 1.0
    """Number of expert rows of the most loaded expert-parallel rank, divided by the mean over ranks."""

    @classmethod
    def of(cls, plan: RunPlan, imbalance: float = 1.0) -> "ActivationSizes":
        """Sizes for one microbatch of a run."""
        parallel, activation = plan.parallel, num_bytes(plan.precision.params)
        inner = plan.data.seq_length // parallel.cp * plan.batch.micro_batch_size
        return cls(
            residual=inner // parallel.tp if parallel.sequence_parallel else inner,
            inner=inner,
            activation=activation,
            internal=max(activation, num_bytes("fp32")),
            length=plan.data.seq_length,
            imbalance=imbalance,
        )


def expert_rows(config: MoEConfig, parallel: ParallelConfig, num_tokens: int, imbalance: float = 1.0) -> float:
    """Number of rows R (pairs of token and selected expert) that the experts of the most loaded rank process for one
    microbatch with `num_tokens` tokens per rank. With expert parallelism, R is `imbalance` times the even load, with
    three exceptions: padding to the expert capacity makes R constant, the all-gather dispatcher allocates buffers for
    the largest possible R, and the flex dispatcher for the R of `--moe-expert-rank-capacity-factor`.
    """
    ranks, router = parallel.ep * parallel.etp, config.router
    local = router.num_experts // parallel.ep
    if config.capacity is not None and config.capacity.pad:
        even = num_tokens * router.topk / router.num_experts * config.capacity.factor
        return ranks * local * min(num_tokens, ceil(even))
    most = ranks * num_tokens * min(router.topk, local)
    bound = config.transport(parallel).rows
    if bound is RowBound.ANY_ROUTING:
        return most
    if bound is RowBound.BOUNDED:
        factor = config.expert_rank_capacity_factor
        return most if factor is None else min(most, int(factor * parallel.etp * num_tokens * router.topk))
    return parallel.etp * num_tokens * router.topk * (imbalance if parallel.ep > 1 else 1.0)


def layer_tensors(layer: LayerConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> list[SavedActivation]:
    """Tensors that one layer saves for backward."""
    shard = layer.shard(parallel)
    mixer, feed_forward, hidden = shard.mixer, shard.feed_forward, shard.mixer.hidden_size
    # with sequence parallelism, the input of a column-parallel matrix is saved as a shard, before quantisation; the
    # two down projections of MLA save their common input once
    whole, is_mla = not parallel.sequence_parallel, isinstance(mixer, MLAConfig)
    low = (whole and parallel.tp == 1) or mixer.q_lora_rank is not None if isinstance(mixer, MLAConfig) else whole
    marks = {"low": "qkv_linear" if low else "", "shared": is_mla}
    saved = list(_norm("input_norm", layer.norm, hidden, sizes, "attn_norm", output_by="qkv_linear", **marks))
    saved += _mla(mixer, sizes, low=whole) if isinstance(mixer, MLAConfig) else _attention(mixer, layer, sizes)
    if saves_pairs(mixer.core, parallel):
        saved += _pairs(mixer, sizes)
    # the router reads the norm's output in the activation format, so an MoE layer does not save it in FP8
    low_output = "mlp" if whole and not layer.is_moe else ""
    saved += _norm("mlp_norm", layer.norm, hidden, sizes, "mlp_norm", low=low_output)
    if isinstance(feed_forward, MoEConfig):
        saved += _moe(feed_forward, parallel, sizes)
    else:
        saved += _mlp("mlp", feed_forward, sizes, "mlp")
    if layer.hidden_dropout:
        count = sizes.residual * hidden
        saved += [_tensor(name, "dropout mask", "T H", count, sizes.activation) for name in ("attention", "mlp")]
    return saved


def stage_tensors(
    model: ModelConfig, stage: StageLayout, parallel: ParallelConfig, sizes: ActivationSizes
) -> list[SavedActivation]:
    """Saved tensors of a stage outside its decoder layers: token ids, RoPE tables, final norm, head and MTP."""
    saved: list[SavedActivation] = list(_rotations(model, stage, sizes))
    if stage.embedding:
        saved.append(_tensor("embedding", "tokens", "U", sizes.inner, _INDEX))
    if stage.final_norm:
        saved += _norm("final_norm", model.norm, model.hidden_size, sizes)
    if stage.num_mtp:
        for _ in range(model.num_mtp):
            saved += _mtp_layer(model, parallel, sizes)
    if stage.loss:
        saved += head_tensors(model, parallel, sizes)
    return saved


def head_tensors(model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> list[SavedActivation]:
    """Saved tensors of the output layer and the loss, for the model and for every depth of multi-token prediction."""
    head = list(_head(model, parallel, sizes))
    return head + [replace(each, module="mtp") for _ in range(model.num_mtp) for each in head]


def _rotations(model: ModelConfig, stage: StageLayout, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Cos and sin tables that a stage saves: one pair per distinct RoPE config of its layers."""
    layers = [model.layers[index] for index in stage.layers] + [model.layers[-1]] * bool(stage.num_mtp)
    for rope in dict.fromkeys(layer.mixer.rope for layer in layers):
        if rope is not None:
            yield _tensor("positions", "cos and sin", "2 U D", 2 * sizes.inner * rope.dim, sizes.internal)


def _tensor(module: str, name: str, shape: str, elements: float, size: int, **marks: object) -> SavedActivation:
    count = int(elements)
    return SavedActivation(module=module, name=name, shape=shape, bytes=count * size, elements=count, **marks)  # type: ignore[arg-type]


def _norm(
    module: str,
    config: NormConfig,
    width: int,
    sizes: ActivationSizes,
    input_by: str = "",
    *,
    output_by: str = "",
    **marks: object,
) -> Iterator[SavedActivation]:
    """Tensors saved for a norm of the residual stream: input, statistics, and output (the next module's input), which
    has the fields `marks`."""
    count, size = sizes.residual * width, sizes.activation
    numbers = 2 if config.kind == "LayerNorm" else 1
    yield _tensor(module, "input", "T H", count, size, offloaded_by=input_by)
    yield _tensor(module, "statistics", "T", sizes.residual * numbers, sizes.internal)
    recomputed = ("layernorm",) if module in ("input_norm", "mlp_norm") else ()
    yield _tensor(module, "output", "T H", count, size, recomputed_by=recomputed, offloaded_by=output_by, **marks)


def _attention(config: AttentionConfig, layer: LayerConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Tensors that attention saves. The output of the QKV projection is saved because v is a view of this output. If
    q and k have neither norm nor rotation, k is also a view of this output; with one query group, q is too."""
    tokens, size, marks = sizes.inner, sizes.activation, {"offloaded_by": "core_attn"}
    several_groups = config.num_query_groups > 1
    # a fused kernel normalises, rotates and splits the projection's output, and reads that output again in backward
    fused = config.qk_norm == "per_head" and config.norm.kind == "RMSNorm" and config.rope is not None
    fused = fused and not config.output_gate
    yield _tensor("attention", "qkv", "U (N+2G) D", tokens * config.qkv_width, size, **marks)
    if config.qk_norm == "full":
        assert isinstance(layer.mixer, AttentionConfig), f"{layer.mixer} has no query groups"
        all_heads = layer.mixer.q_width + layer.mixer.kv_width
        yield _tensor("attention", "q and k before their norm", "U (N+G) D", tokens * all_heads, size)
    elif config.qk_norm in ("per_head", "l2") and several_groups and not fused:
        yield _tensor("attention", "q before its norm", "U N D", tokens * config.q_width, size)
    if config.qk_norm != "none" and not fused:
        rows = 2 if config.qk_norm == "full" else config.num_heads + config.num_query_groups
        yield _tensor("attention", "statistics of q and k", "U (N+G)", tokens * rows, sizes.internal)
    changed = config.qk_norm != "none" or config.rope is not None
    if changed or several_groups:
        yield _tensor("attention", "q", "U N D", tokens * config.q_width, size, **marks)
    if changed:
        yield _tensor("attention", "k", "U G D", tokens * config.kv_width, size, **marks)
    yield from _core(config, sizes)
    if config.output_gate:
        # both factors in the internal format; the attention output is one of them if the formats are equal
        factors = 1 if sizes.activation == sizes.internal else 2
        yield _tensor("attention", "gate and output", "U N D", factors * tokens * config.q_width, sizes.internal)
        yield _tensor("attention", "gated output", "U N D", tokens * config.q_width, size, low="attn_proj")


def _core(config: AttentionConfig | MLAConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Tensors that fused attention saves in addition to q, k and v: its output and the log-sum-exp."""
    rows = sizes.inner * config.num_heads
    count = sizes.inner * config.out_width
    marks: dict[str, object] = {"offloaded_by": "attn_proj"}
    if isinstance(config, MLAConfig) or not config.output_gate:
        marks |= {"low": "attn_proj", "read_unless": "core_attn"}
    yield _tensor("attention", "output", "U N E", count, sizes.activation, **marks)
    yield _tensor("attention", "log-sum-exp", "U N", rows, sizes.internal, recomputed_by=("core_attn",))


def saves_pairs(core: CoreAttentionConfig, parallel: ParallelConfig) -> bool:
    """Whether attention saves tensors with one element per query-key pair. Only attention with dropout
    does, unless a context-parallel exchange other than "a2a" recomputes attention blocks in backward."""
    return core.dropout > 0.0 and (parallel.cp == 1 or core.context_exchange == "a2a")


def _pairs(mixer: AttentionConfig | MLAConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Tensors that unfused attention saves: q, k, v, and three [U, N, S]: softmax, dropout mask and their product."""
    marks = {"recomputed_by": ("core_attn",), "offloaded_by": "core_attn"}
    rows, size = sizes.inner * mixer.num_heads, sizes.internal
    yield _tensor("attention", "probabilities with dropout", "3 U N S", 3 * rows * sizes.length, size, **marks)
    width = (1 if sizes.activation == size else 2) * mixer.q_head_dim + mixer.v_head_dim
    yield _tensor("attention", "q, k and v by head", "U N (2D+E)", rows * width, size, **marks)


def _mla(config: MLAConfig, sizes: ActivationSizes, *, low: bool) -> Iterator[SavedActivation]:
    """Tensors that MLA saves. Latents are saved for this rank's T tokens; backward gathers them for all U tokens.
    `low`: whether FP8 and FP4 recipes save the normed latents in low precision."""
    tokens, local, size = sizes.inner, sizes.residual, sizes.activation
    marks = {"recomputed_by": ("mla_up_proj",), "offloaded_by": "core_attn"}
    normed = "qkv_linear" if low else ""
    if config.q_lora_rank is not None:
        yield _tensor("attention", "q latent", "T Q", local * config.q_lora_rank, size)
        if config.qk_norm:
            yield _tensor("attention", "q latent, normed", "T Q", local * config.q_lora_rank, size, low=normed)
    yield _tensor("attention", "kv latent", "T (L+P)", local * (config.kv_lora_rank + config.qk_rope_dim), size)
    if config.qk_norm:
        yield _tensor("attention", "kv latent, normed", "T L", local * config.kv_lora_rank, size, low=normed)
        statistics = 2 if config.q_lora_rank is not None else 1
        yield _tensor("attention", "statistics of latents", "T", local * statistics, sizes.internal)
    yield _tensor("attention", "q", "U N D", tokens * config.q_width, size, **marks)
    yield _tensor("attention", "k", "U N D", tokens * config.q_width, size, **marks)
    yield _tensor("attention", "kv, of which v is a view", "U N (D-P+E)", tokens * config.kv_up_width, size, **marks)
    yield from _core(config, sizes)


def _mlp(module: str, config: MLPConfig, sizes: ActivationSizes, recomputed_by: str) -> Iterator[SavedActivation]:
    tokens, ffn = sizes.inner, config.ffn_hidden_size
    fan, mark = config.activation.fan, {"recomputed_by": (recomputed_by,)}
    fused: dict[str, object] = {} if config.bias else {"fused_bytes": 0}
    shape, marks = "U 2F" if fan == 2 else "U F", {**mark, "is_activation_input": not config.bias}
    yield _tensor(module, "first product", shape, tokens * fan * ffn, sizes.activation, **marks)
    yield _tensor(module, "activation", "U F", tokens * ffn, sizes.activation, low=recomputed_by, **mark, **fused)


def _moe(config: MoEConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    for each in (*_router(config, sizes), *_experts(config, parallel, sizes), *_shared(config.shared, sizes)):
        yield replace(each, recomputed_by=(*each.recomputed_by, "moe"))


def _router(config: MoEConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Tensors that the router saves, except its input, which is counted as the output of the norm."""
    router, tokens = config.router, sizes.residual
    number = sizes.activation if router.dtype is None else num_bytes(router.dtype)
    scores = tokens * router.num_experts
    yield _tensor("router", "scores", "T E", scores, sizes.internal)
    if router.balancing_losses:
        yield _tensor("router", "scores of the balancing loss", "T E", scores, sizes.internal)
    yield _tensor("router", "choices", "T K", tokens * router.topk, _INDEX + number)


def may_fuse(experts: ExpertsConfig) -> bool:
    """See `Experts.has_fused_casts`. Assumes an ffn size that is a multiple of the block length."""
    return experts.grouped and not experts.bias and not experts.probs_on_output


def _experts(config: MoEConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Tensors that routed experts save. The output of fc2 is saved only with `probs_on_output`."""
    experts, size = config.experts, sizes.activation
    rows = expert_rows(config, parallel, sizes.residual, sizes.imbalance)
    fan, ffn = experts.activation.fan, experts.ffn_hidden_size
    number = size if config.router.dtype is None else num_bytes(config.router.dtype)
    yield _tensor("experts", "row index", "R", rows * 2, _INDEX)
    yield _tensor("experts", "probabilities", "R", rows, number)
    even = parallel.etp * sizes.residual * config.router.topk * size
    padded = (int(rows), config.router.num_experts // parallel.ep)
    marks: dict[str, object] = {"offloaded_by": "expert_fc1", "even_bytes": even * experts.hidden_size}
    if may_fuse(experts) and parallel.ep * parallel.etp == 1:  # fc1 gathers tokens that the router saves anyway
        marks["fused_bytes"] = 0
    yield _tensor(
        "experts", "rows", "R H", rows * experts.hidden_size, size, low="experts", rows_of_experts=padded, **marks
    )
    marks = {"offloaded_by": "moe_act", "even_bytes": even * fan * ffn, "is_activation_input": may_fuse(experts)}
    yield _tensor("experts", "first product", "R 2F" if fan == 2 else "R F", rows * fan * ffn, size, **marks)
    marks = {"recomputed_by": ("moe_act",), "even_bytes": even * ffn}
    if may_fuse(experts):
        marks["fused_bytes"] = 0
    yield _tensor("experts", "activation", "R F", rows * ffn, size, low="experts", rows_of_experts=padded, **marks)
    if experts.probs_on_output:
        yield _tensor("experts", "results before their probability", "R H", rows * experts.hidden_size, size)
    elif experts.bias:
        # fc2's bias, expanded to rows, is multiplied by each row's probability
        yield _tensor("experts", "bias of rows", "R H", rows * experts.hidden_size, sizes.internal)
    if experts.probs_on_input:
        yield _tensor("experts", "rows before their probability", "R H", rows * experts.hidden_size, sizes.internal)
    if config.latent_size:
        yield _tensor("experts", "latent sum", "T L", sizes.residual * config.latent_size, size, low="experts")


def _shared(config: SharedExpertsConfig | None, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    if config is None:
        return
    yield from _mlp("shared", config.mlp, sizes, "shared_experts")
    if config.gate:
        hidden = config.mlp.hidden_size
        mark = {"recomputed_by": ("shared_experts",)}
        yield _tensor("shared", "output", "T H", sizes.residual * hidden, sizes.activation, **mark)
        yield _tensor("shared", "gate", "T", sizes.residual * 2, sizes.internal, **mark)


def _head(model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Tensors that output layer and loss save, except the final norm's output. A chunked loss saves no logits."""
    if model.loss_chunk is None:
        yield _tensor("head", "logits", "U V", sizes.inner * (model.vocab_size // parallel.tp), sizes.activation)
    yield _tensor("head", "labels and normaliser", "U", sizes.inner, _INDEX + sizes.internal)


def _mtp_layer(model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Tensors that one MTP depth saves. Its input hidden state is already saved as the final norm's output."""
    hidden, tokens = model.hidden_size, sizes.residual
    yield _tensor("mtp", "embedding", "T H", tokens * hidden, sizes.activation)
    yield _tensor("mtp", "statistics", "T", 2 * tokens, sizes.internal)
    low = "" if parallel.sequence_parallel else "mtp"
    yield _tensor("mtp", "joined", "T 2H", 2 * tokens * hidden, sizes.activation, low=low)
    for each in layer_tensors(model.layers[-1], parallel, sizes):
        is_input = (each.module, each.name) == ("input_norm", "input")
        recomputed = each.recomputed_by if is_input else (*each.recomputed_by, WHOLE_LAYER)
        yield replace(each, module="mtp", recomputed_by=recomputed)
    yield from _norm("mtp", model.norm, hidden, sizes)
