"""Attention: norms, rotary embeddings, grouped-query attention and multi-latent attention (MLA)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from megatron_moe.config.component import MixerConfig, NameRule, ParamSpec, indivisible, linear_parameters
from megatron_moe.config.costs import (
    TRAINING_FLOPS,
    ActivationSizes,
    FlopCount,
    QuantizedCopyBytes,
    SavedActivation,
    saved_tensor,
)
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.precision import LowPrecisionConfig

_PAIR_GRADS = 2
"""Number of values per query-key pair that the backward of attention with dropout allocates in addition to the saved
values."""
_PAIRS_OF_A_BLOCK = 5
"""Number of values per query-key pair in the backward of blockwise attention with dropout: probability, mask, 3
gradients."""


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """RMSNorm or LayerNorm over the last dim."""

    kind: Literal["RMSNorm", "LayerNorm"] = "LayerNorm"
    """Type of norm (`--normalization`)."""
    eps: float = 1e-5
    """Constant added to the variance or mean square (`--norm-epsilon`)."""
    zero_centered: bool = False
    """Stores the weight as gamma - 1, initialised to 0 (`--apply-layernorm-1p`)."""

    def as_flags(self) -> dict[str, Any]:
        """See `Component.as_flags`."""
        return {"normalization": self.kind, "norm_epsilon": self.eps, "apply_layernorm_1p": self.zero_centered}

    def parameters(
        self, name: str, width: int, parallel: ParallelConfig, *, over_heads: bool = False
    ) -> Iterator[ParamSpec]:
        """Parameters of a norm over `width` channels. `over_heads`: True if its input is q or k of this rank's heads,
        False for the residual stream or a latent."""
        partial = parallel.tp > 1 if over_heads else parallel.sequence_parallel
        init: Literal["zeros", "ones"] = "zeros" if self.zero_centered else "ones"
        meta = ParamMeta(role="norm", init=init, decay=False, partial_over_tp=partial)
        yield ParamSpec(name=f"{name}.weight", shape=(width,), meta=meta, counted="norms")
        if self.kind == "LayerNorm":
            meta = replace(meta, role="bias", init="zeros")
            yield ParamSpec(name=f"{name}.bias", shape=(width,), meta=meta, counted="norms")

    def saved_tensors(
        self, module: str, width: int, sizes: ActivationSizes, *, input_by: str = "", **output: Any
    ) -> Iterator[SavedActivation]:
        """Tensors saved for a norm of the residual stream: input, statistics, and output (the next module's input).

        `input_by`: value of `--offload-modules` for the input; `output`: fields of `SavedActivation` for the output.
        """
        count, size = sizes.residual * width, sizes.activation_itemsize
        numbers = 2 if self.kind == "LayerNorm" else 1
        yield saved_tensor(module, "input", "T H", count, size, {"offloaded_by": input_by})
        yield saved_tensor(module, "statistics", "T", sizes.residual * numbers, sizes.internal_itemsize)
        yield saved_tensor(module, "output", "T H", count, size, output)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and its context extensions."""

    dim: int
    """Number of rotated channels per head: head_dim * rotary_percent, or `MLAConfig.qk_rope_dim`."""
    base: float = 10000.0
    interleaved: bool = False
    """Rotates the channel pairs (0, 1), (2, 3), … instead of (0, D/2), (1, D/2 + 1), …"""
    scaling: Literal["none", "llama3", "linear", "yarn"] = "none"
    scaling_factor: float = 1.0
    """llama3, linear and yarn only: factor by which the context is extended."""
    original_max_positions: int = 4096
    """llama3 and yarn only: context length before the extension."""
    low_freq_factor: float = 1.0
    """llama3 only: wavelengths above `original_max_positions / low_freq_factor` are multiplied by `scaling_factor`."""
    high_freq_factor: float = 4.0
    """llama3 only: wavelengths below `original_max_positions / high_freq_factor` are unchanged."""
    beta_fast: float = 32.0
    """yarn only: channel pairs with more rotations than this over the original context keep their frequency."""
    beta_slow: float = 1.0
    """yarn only: channel pairs with fewer rotations than this have their frequency divided by `scaling_factor`."""
    mscale: float = 1.0
    """yarn only: determines, with `mscale_all_dim`, the factor on cos and sin; see `concentration`."""
    mscale_all_dim: float = 0.0
    """yarn only: determines the softmax scale of MLA and, with `mscale`, the factor on cos and sin."""
    truncate: bool = True
    """yarn only: rounds the bounds of the interpolated range to integers (`--yarn-correction-range-round-to-int`)."""
    concentration: float | None = None
    """yarn only: factor on cos and sin (GPT-OSS: 0.1 ln(scaling_factor) + 1). None means that the factor is
    yarn_mscale(scaling_factor, mscale) / yarn_mscale(scaling_factor, mscale_all_dim)."""

    def as_flags(self) -> dict[str, Any]:
        """Flags without those of the original context length and of `dim`, which differ between mixers; see
        `Component.as_flags`. A `concentration` has no flag."""
        found: dict[str, Any] = {"rotary_base": self.base, "use_rope_scaling": self.scaling == "llama3"}
        match self.scaling:
            case "llama3":
                found |= {"rope_scaling_factor": self.scaling_factor}
            case "linear":
                found |= {"rotary_seq_len_interpolation_factor": round(self.scaling_factor)}
            case "yarn":
                found |= {
                    "rotary_scaling_factor": self.scaling_factor,
                    "yarn_beta_fast": self.beta_fast,
                    "yarn_beta_slow": self.beta_slow,
                    "yarn_correction_range_round_to_int": self.truncate,
                    "mscale": self.mscale,
                    "mscale_all_dim": self.mscale_all_dim,
                }
        return found


def yarn_mscale(factor: float, mscale: float) -> float:
    """Attention scale of YaRN for a context extended by `factor` (arXiv 2309.00071 equation 22); 1 if not extended.

    The softmax scale of MLA with YaRN is yarn_mscale(factor, mscale_all_dim)^2 / sqrt(q_head_dim).
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


ContextExchange = Literal["p2p", "allgather", "a2a", "a2a+p2p"]
"""Context-parallel communication (`--cp-comm-type`): ring, all-gather of k and v, all-to-all, or all-to-all + ring."""


@dataclass(frozen=True, kw_only=True)
class CoreAttentionConfig:
    """Softmax attention: softmax(q k^T * softmax_scale + mask) v."""

    softmax_scale: float
    causal: bool = True
    window: tuple[int, int] | None = None
    """Sliding window (left, right): maximum number of visible keys before and after the query's position; -1 means no
    limit. (127, 0) is a causal window of 128 tokens. None means no window."""
    sinks: bool = False
    """Adds one learned logit per head to the softmax denominator (`--softmax-type learnable`)."""
    off_by_one: bool = False
    """Adds a constant zero logit to the softmax denominator (`--softmax-type off-by-one`)."""
    dropout: float = 0.0
    context_exchange: ContextExchange = "p2p"
    """Communication of context-parallel attention; has no effect with one context-parallel rank."""

    def as_flags(self) -> dict[str, Any]:
        """See `Component.as_flags`."""
        return {
            "attention_dropout": self.dropout,
            "softmax_type": "learnable" if self.sinks else "off-by-one" if self.off_by_one else "vanilla",
            "window_size": self.window,
            "window_attn_skip_freq": self.window is not None,
        }


@dataclass(frozen=True, kw_only=True)
class SoftmaxMixerConfig(MixerConfig):
    """Base of the configs of mixers that end in softmax attention and an output projection `linear_proj`."""

    num_heads: int
    """Number of query heads (`--num-attention-heads`)."""
    core: CoreAttentionConfig

    def as_flags(self) -> dict[str, Any]:
        return {"num_attention_heads": self.num_heads, **self.core.as_flags()}

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        return ("core_attn",)

    def forward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Bytes of the rowwise copy of the input of `linear_proj`."""
        return sizes.inner * self.shard(parallel.tp).out_width * QuantizedCopyBytes.of(low).row

    @property
    def q_head_dim(self) -> int:
        """Channels per head of q and k."""
        raise NotImplementedError

    @property
    def value_head_dim(self) -> int:
        """Channels per head of v."""
        raise NotImplementedError

    @property
    def keys_values_width(self) -> int:
        """Width of k and v together, over all heads or query groups."""
        raise NotImplementedError

    @property
    def is_grouped_query(self) -> bool:
        """Whether several heads share k and v."""
        return False

    @property
    def saves_output_in_full(self) -> bool:
        """Whether an op other than the output projection and the backward of attention reads the attention output."""
        return False

    @property
    def q_width(self) -> int:
        """Width of q over all heads."""
        return self.num_heads * self.q_head_dim

    @property
    def out_width(self) -> int:
        """Width of the attention output over all heads."""
        return self.num_heads * self.value_head_dim

    def ring_channels(self, parallel: ParallelConfig) -> int:
        return self.shard(parallel.tp).keys_values_width if self.core.context_exchange == "p2p" else 0

    def gathered_context_channels(self, parallel: ParallelConfig) -> int:
        widths = self.q_head_dim, self.value_head_dim
        both = self.shard(parallel.tp).keys_values_width
        return both * max(widths) // sum(widths) if self.core.context_exchange == "allgather" else 0

    def sink_parameters(self) -> Iterator[ParamSpec]:
        """Parameters of attention sinks: one learned logit per head, if enabled."""
        if self.core.sinks:
            meta = ParamMeta(role="sink", tp_dim=0, decay=False)
            yield ParamSpec(name="sinks", shape=(self.num_heads,), meta=meta, counted="attention")

    def flops(self, seq_length: int) -> FlopCount:
        """FLOPs of the two GEMMs of attention, which count only the pairs inside the mask."""
        pairs = _doubled_num_pairs(self.core, seq_length)
        return FlopCount(core_attention=(self.q_width + self.out_width) * pairs * TRAINING_FLOPS // 2)

    def layout_problem(self, parallel: ParallelConfig) -> str | None:
        num_ranks, heads = self.head_exchange_ranks(parallel), self.num_heads // parallel.tp
        return indivisible(
            "--tensor-model-parallel-size", parallel.tp, self.num_heads, "attention head"
        ) or indivisible("--cp-comm-type a2a", num_ranks, heads, "local attention head")

    def head_exchange_ranks(self, parallel: ParallelConfig) -> int:
        """Number of context-parallel ranks among which all-to-all distributes the heads."""
        match self.core.context_exchange:
            case "a2a":
                return parallel.cp
            case "a2a+p2p" if parallel.cp_sub_axes is not None:
                return parallel.cp_sub_axes[0]
        return 1

    def context_parallel_traffic(self, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
        """Bytes sent of k and v (for all-to-all: q, k, v and output) and of their gradients."""
        cp, shard = parallel.cp, self.shard(parallel.tp)
        keys, heads = shard.keys_values_width, shard.q_width + shard.keys_values_width + shard.out_width
        narrow, wide = sizes.inner * sizes.activation_itemsize, sizes.inner * sizes.internal_itemsize
        match self.core.context_exchange:
            case "p2p":
                sums = narrow if cp == 2 else wide  # key gradients are not summed in a ring of two ranks
                return (cp - 1) * keys * (2 * narrow + sums)
            case "allgather":
                return (cp - 1) * keys * (narrow + wide)
            case _:
                return 2 * heads * narrow * (cp - 1) / cp

    def shard(self, tp: int) -> Self:
        """Config with the heads of one of `tp` tensor-parallel ranks."""
        return replace(self, num_heads=self.num_heads // tp)

    def saves_attention_probs(self, parallel: ParallelConfig) -> bool:
        """Whether attention saves tensors with one element per query-key pair. Only attention with dropout does, unless
        a context-parallel exchange other than "a2a" recomputes attention blocks in backward."""
        return self.core.dropout > 0.0 and (parallel.cp == 1 or self.core.context_exchange == "a2a")

    def core_tensors(self, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Tensors that fused attention on one rank's heads saves in addition to q, k and v."""
        rows = sizes.inner * self.num_heads
        marks: dict[str, Any] = {"offloaded_by": "attn_proj"}
        if not self.saves_output_in_full:
            marks |= {"low": "attn_proj", "read_unless": "core_attn"}
        yield saved_tensor(
            "attention", "output", "U N E", sizes.inner * self.out_width, sizes.activation_itemsize, marks
        )
        marks = {"recomputed_by": ("core_attn",)}
        yield saved_tensor("attention", "log-sum-exp", "U N", rows, sizes.internal_itemsize, marks)

    def unfused_saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Tensors that unfused attention on one rank's heads saves: q, k, v, and three [U, N, S]: softmax, dropout mask
        and their product."""
        if not self.saves_attention_probs(parallel):
            return
        marks = {"recomputed_by": ("core_attn",), "offloaded_by": "core_attn"}
        rows, size = sizes.inner * self.num_heads, sizes.internal_itemsize
        pairs = 3 * rows * sizes.length
        yield saved_tensor("attention", "probabilities with dropout", "3 U N S", pairs, size, marks)
        width = (1 if sizes.activation_itemsize == size else 2) * self.q_head_dim + self.value_head_dim
        yield saved_tensor("attention", "q, k and v by head", "U N (2D+E)", rows * width, size, marks)

    def attention_workspace(
        self, latent: int, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Peak bytes in the backward of the output projection, of attention, and of the projection of an input with
        `latent` channels to q, k and v."""
        shard, size, tokens = self.shard(parallel.tp), sizes.activation_itemsize, sizes.inner
        gathered, copies = sizes.gathered_bytes_per_channel(parallel), QuantizedCopyBytes.of(low)
        projection = (gathered + tokens * copies.grad) * self.hidden_size + tokens * shard.out_width * size
        inputs = (gathered + (tokens * copies.column if gathered else 0)) * latent
        return max(shard.core_workspace(parallel, sizes), projection, inputs)

    def core_workspace(self, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
        """Peak bytes of gradients and kernel workspace in the backward of attention on one rank's heads. With context
        parallelism, attention may be split into blocks of keys; gradients are then summed over blocks in fp32 or
        wider."""
        q_width, kv_copies, wide = self.q_width, 0, 0
        if self.core.window is None:
            # cuDNN's workspace: the gradient of q in the internal format, and the gradients of k and v expanded to all
            # heads if heads share them. Our sliding-window kernel needs no workspace of this size.
            wide = q_width * sizes.internal_itemsize
            if self.is_grouped_query:
                kv_copies = 2 * q_width
        per_query = (self.out_width + q_width) * sizes.activation_itemsize + wide
        per_key = (self.keys_values_width + kv_copies) * sizes.activation_itemsize
        exchange, tokens = self.core.context_exchange, sizes.inner
        if self.saves_attention_probs(parallel):
            pairs = _PAIR_GRADS * self.num_heads * sizes.length
            return float(tokens * (pairs + 2 * q_width + self.out_width) * sizes.internal_itemsize)
        if parallel.cp == 1 or exchange == "a2a":
            return float(tokens * (per_query + per_key))
        # with two ranks, one gradient is added to another, in the dtype of both
        is_one_sum = exchange != "allgather" and parallel.cp == 2 and self.core.window is None and not self.core.dropout
        per_query += 0 if is_one_sum else q_width * sizes.internal_itemsize
        key_sums = self.keys_values_width * (sizes.activation_itemsize if is_one_sum else sizes.internal_itemsize)
        # with dropout, backward also recomputes the query-key pairs of one block
        pairs = _PAIRS_OF_A_BLOCK * self.num_heads * sizes.length * sizes.internal_itemsize if self.core.dropout else 0
        if exchange == "allgather":  # per chunk of queries, which may attend to the keys of all ranks
            chunk = tokens // 2 if parallel.cp_split == "zigzag" else tokens
            return float(chunk * (per_query + pairs) + tokens * parallel.cp * (per_key + key_sums))
        # a ring has three buffers of key gradients (accumulated, received, sent) and two of keys (received, sent), of
        # which one each is symmetric memory if ranks copy from each other
        shared = 1 if exchange == "p2p" and parallel.shares_keys_values else 0
        received = (2 - shared) * self.keys_values_width * sizes.activation_itemsize
        per_token = per_query + per_key + (3 - shared) * key_sums + received
        return float(tokens * (per_token + pairs / parallel.cp))


def _doubled_num_pairs(core: CoreAttentionConfig, seq_length: int) -> int:
    """Twice the number of query-key pairs of one sequence, as an integer. The number of pairs is approximated: S^2 / 2
    for causal attention, and w S - w^2 / 2 with a window of w tokens."""
    if not core.causal:
        return 2 * seq_length * seq_length
    left = core.window[0] if core.window else -1
    window = seq_length if left < 0 else min(left + 1, seq_length)
    return 2 * window * seq_length - window * window


def _sharing_problem(option: str, num_ranks: int, groups: int) -> str | None:
    """Returns an error message if the query groups can be neither divided among the ranks nor shared by them, else
    None."""
    if groups % num_ranks == 0 or num_ranks % groups == 0:
        return None
    return f"{num_ranks} ranks ({option}) are neither a divisor nor a multiple of {groups} query groups"


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(SoftmaxMixerConfig):
    """Multi-head or grouped-query attention."""

    num_query_groups: int
    head_dim: int
    rope: RopeConfig | None
    """Rotary embedding of q and k. None means no rotation (learned absolute positions or no position embedding)."""
    qk_norm: Literal["none", "per_head", "full", "l2"] = "none"
    """Norm of q and k. per_head: over each head (Qwen3); full: over all heads jointly (OLMoE, MiniMax); l2: over each
    head, without a weight (Llama 4)."""
    norm: NormConfig = NormConfig()
    """Kind and epsilon of the norm that `qk_norm` selects."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Adds a bias to the output projection (`--add-bias-linear`)."""
    output_gate: bool = False
    """Multiplies the output by sigmoid(gate); the QKV projection also computes `gate` (`--attention-output-gate`)."""

    module: ClassVar[str] = "megatron_moe.model.attention:Attention"
    registered_as: ClassVar[str] = "attention"
    selecting_flags: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"multi_latent_attention": False, "linear_attention_freq": False}
    )
    megatron_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight",)}
    )

    def as_flags(self) -> dict[str, Any]:
        grouped = self.num_query_groups != self.num_heads
        found = {
            **super().as_flags(),
            "group_query_attention": grouped,
            "num_query_groups": self.num_query_groups if grouped else 1,
            "kv_channels": self.head_dim,
            "qk_layernorm": self.qk_norm in ("per_head", "full"),
            "qk_l2_norm": self.qk_norm == "l2",
            "qk_layernorm_over": "all-heads" if self.qk_norm == "full" else "head",
            "add_bias_linear": self.out_bias,
            "add_qkv_bias": self.qkv_bias,
            "attention_output_gate": self.output_gate,
            "no_rope_freq": self.rope is not None,
        }
        if self.rope is not None:
            is_yarn = self.rope.scaling == "yarn"
            found |= {
                **self.rope.as_flags(),
                "position_embedding_type": "yarn" if is_yarn else "rope",
                "rotary_percent": self.rope.dim / self.head_dim,
                "rotary_interleaved": self.rope.interleaved,
                "yarn_original_max_position_embeddings": self.rope.original_max_positions if is_yarn else None,
            }
        return found

    @property
    def q_head_dim(self) -> int:
        return self.head_dim

    @property
    def value_head_dim(self) -> int:
        return self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of k over all query groups, which is also the width of v."""
        return self.num_query_groups * self.head_dim

    @property
    def keys_values_width(self) -> int:
        return 2 * self.kv_width

    @property
    def is_grouped_query(self) -> bool:
        return self.num_query_groups < self.num_heads

    @property
    def saves_output_in_full(self) -> bool:
        return self.output_gate

    @property
    def qkv_width(self) -> int:
        """Output width of the fused projection to q, the optional output gate, k and v."""
        return self.num_query_groups * sum(self.group_rows)

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Numbers of rows of `linear_qkv` for one query group: (q, output gate if enabled, k, v). A query group is the
        unit of tensor-parallel sharding and of per-matrix optimizers."""
        q_rows = self.num_heads // self.num_query_groups * self.head_dim
        return (q_rows, *((q_rows,) if self.output_gate else ()), self.head_dim, self.head_dim)

    @property
    def is_fused(self) -> bool:
        """Whether the fused kernel for norm and rotary embedding of q and k supports this config."""
        normed = self.qk_norm == "per_head" and self.norm.kind == "RMSNorm"
        return self.rope is not None and not self.output_gate and (normed or self.qk_norm == "none")

    @property
    def rotary_tables(self) -> tuple[RopeConfig, ...]:
        return () if self.rope is None else (self.rope,)

    def layout_problem(self, parallel: ParallelConfig) -> str | None:
        groups, tp = self.num_query_groups, parallel.tp
        problem = _sharing_problem("--tensor-model-parallel-size", tp, groups)
        if problem is None and groups < tp:
            problem = indivisible("--tensor-model-parallel-size", tp, 2 * self.kv_width, "key and value channel")
        local = max(groups // tp, 1)
        exchange_problem = _sharing_problem("--cp-comm-type a2a", self.head_exchange_ranks(parallel), local)
        return problem or super().layout_problem(parallel) or exchange_problem

    def shares_groups(self, tp: int) -> bool:
        """Whether several of `tp` ranks share a query group; they all-gather the output of the QKV projection."""
        return self.num_query_groups < tp

    def shard(self, tp: int) -> Self:
        """Config with the heads and query groups of one of `tp` tensor-parallel ranks. If several ranks share a query
        group, the config has one group, although each rank holds only a part of the group's k and v projection."""
        groups = max(self.num_query_groups // tp, 1)
        return replace(self, num_heads=self.num_heads // tp, num_query_groups=groups)

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        yield from linear_parameters(
            "linear_qkv",
            (self.qkv_width, self.hidden_size),
            parallel,
            counted="attention",
            low="qkv_linear",
            bias=self.qkv_bias,
            tp_dim=0,
            splits=self.group_rows,
            even_shards=self.shares_groups(parallel.tp),
        )
        yield from linear_parameters(
            "linear_proj",
            (self.hidden_size, self.q_width),
            parallel,
            counted="attention",
            low="attn_proj",
            bias=self.out_bias,
            tp_dim=1,
            init="output",
        )
        if self.qk_norm in ("per_head", "full"):
            full = self.qk_norm == "full"
            for name, width in (("q_layernorm", self.q_width), ("k_layernorm", self.kv_width)):
                yield from self.norm.parameters(name, width if full else self.head_dim, parallel, over_heads=True)
        yield from self.sink_parameters()

    def saved_input_fields(self, parallel: ParallelConfig) -> Mapping[str, Any]:
        return {"low": "" if parallel.sequence_parallel else "qkv_linear"}

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Tensors saved by attention. The output of the QKV projection is saved because v is a view of it. If q and k
        have neither norm nor rotation, k is also a view of this output; with one query group, q is too."""
        shard, tokens, size = self.shard(parallel.tp), sizes.inner, sizes.activation_itemsize
        marks, several_groups = {"offloaded_by": "core_attn"}, shard.num_query_groups > 1
        # the fused kernel normalises, rotates and splits the projection's output, and reads it again in backward
        is_normed = self.qk_norm != "none" and not self.is_fused
        yield saved_tensor("attention", "qkv", "U (N+2G) D", tokens * shard.qkv_width, size, marks)
        if self.qk_norm == "full":
            all_heads = tokens * (self.q_width + self.kv_width)
            yield saved_tensor("attention", "q and k before their norm", "U (N+G) D", all_heads, size)
        elif is_normed and several_groups:
            yield saved_tensor("attention", "q before its norm", "U N D", tokens * shard.q_width, size)
        if is_normed:
            rows = tokens * (2 if self.qk_norm == "full" else shard.num_heads + shard.num_query_groups)
            yield saved_tensor("attention", "statistics of q and k", "U (N+G)", rows, sizes.internal_itemsize)
        changed = self.qk_norm != "none" or self.rope is not None
        if changed or several_groups:
            yield saved_tensor("attention", "q", "U N D", tokens * shard.q_width, size, marks)
        if changed:
            yield saved_tensor("attention", "k", "U G D", tokens * shard.kv_width, size, marks)
        yield from shard.core_tensors(sizes)
        if self.output_gate:
            # the gate saves both factors in the internal format; if it equals the activation format, one factor is the
            # saved attention output
            count, factors = tokens * shard.q_width, 1 if size == sizes.internal_itemsize else 2
            yield saved_tensor("attention", "gate and output", "U N D", factors * count, sizes.internal_itemsize)
            yield saved_tensor("attention", "gated output", "U N D", count, size, {"low": "attn_proj"})
        yield from shard.unfused_saved_tensors(parallel, sizes)

    def backward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        peak = self.attention_workspace(self.hidden_size, parallel, sizes, low)
        if self.shares_groups(parallel.tp):
            # gradients of the local q, k and v, and of those of all heads before and after the reduce-scatter
            widths = self.shard(parallel.tp).qkv_width + 2 * self.qkv_width
            peak = max(peak, sizes.inner * sizes.activation_itemsize * widths)
        return peak

    def gathered_channels(self, parallel: ParallelConfig) -> int:
        return self.qkv_width if self.shares_groups(parallel.tp) else 0

    def gemm_sizes(self, parallel: ParallelConfig) -> Iterator[tuple[str, int, int]]:
        yield "--kv-channels", self.head_dim, 1

    def name_rules(self, model_type: str) -> Iterator[NameRule]:
        sizes = (self.num_query_groups, self.num_heads // self.num_query_groups, 1 + self.output_gate)
        module = "mixer" if model_type == "nemotron_h" else "self_attn"
        for kind in ("weight", "bias"):
            names = tuple(f"{module}.{part}_proj.{kind}" for part in "qkv")
            yield NameRule(f"linear_qkv.{kind}", names, "query_key_value", sizes)
            yield NameRule(f"linear_proj.{kind}", (f"{module}.o_proj.{kind}",))
        for part in "qk":
            yield NameRule(f"{part}_layernorm.weight", (f"{module}.{part}_norm.weight",))
        yield NameRule("sinks", (f"{module}.sinks",))
