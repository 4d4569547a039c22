"""Compressed attention (DeepSeek-V4): a window of tokens, and entries that summarise groups of earlier tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_moe.config.attention import NormConfig, RopeConfig
from megatron_moe.config.component import MixerConfig, NameRule, ParamSpec, linear_parameters
from megatron_moe.config.costs import (
    TRAINING_FLOPS,
    ActivationSizes,
    FlopCount,
    QuantizedCopyBytes,
    SavedActivation,
    saved_tensor,
)
from megatron_moe.config.dsa import BLOCK_BYTES, IndexerConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.precision import LowPrecisionConfig

OVERLAPPING_RATIO = 4
"""Compression ratio at which each entry also summarises the previous group, and an indexer selects among the
entries."""
NORM_BLOCK_BYTES = 1 << 26
"""Maximum bytes of queries per block in the backward of the q norm; a block has at least one position."""
_NORM_COPIES = 3
"""Temporary values per query and channel in a block of the q norm's backward: query, gradient and their product."""
_TARGET_COPIES = 2
"""Temporary values per query, entry and attention head in a block of the indexer loss: logits and exponentials."""
_SCORE_COPIES = 4
"""Temporary values per query, entry and indexer head in a block of the indexer loss: dot products, ReLU outputs and
their gradients."""
_INDEX_BYTES = 4
"""Bytes of the index of a key row that a query attends to."""


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionConfig(MixerConfig):
    """Attention with one key head, which is also the value, to a window of tokens and to entries of earlier tokens."""

    num_heads: int
    """Number of query heads (`--num-attention-heads`)."""
    head_dim: int
    """Channels per head of q, k and v (`--v-head-dim`)."""
    q_lora_rank: int
    """Width of the compressed q."""
    csa_window_size: int
    """Size of the sliding window in tokens, including the query's own (`--csa-window-size`)."""
    ratio: int
    """Number of tokens per compressed entry (`--csa-compress-ratios`); 0 means a sliding window only."""
    indexer: IndexerConfig | None
    """Indexer that selects the entries of each query, scored by keys that are compressed in the same way. None means
    that queries attend to all entries of complete earlier groups, as with `--csa-dense-mode`."""
    o_groups: int
    """Number of groups of heads that the output projection compresses separately (`--o-groups`)."""
    o_lora_rank: int
    """Width of the compressed output of a group (`--o-lora-rank`)."""
    rope: RopeConfig
    """Rotary embedding of the last `rope.dim` channels. The output is rotated back by the position of its query."""
    norm: NormConfig
    """Kind and epsilon of all norms. The norm of q is per head and has no weight."""

    module: ClassVar[str] = "megatron_moe.model.compressed_attention:CompressedAttention"
    registered_as: ClassVar[str] = "compressed_attention"
    selecting_flags: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            "multi_latent_attention": True,
            "linear_attention_freq": False,
            "experimental_attention_variant": "dsv4_hybrid",
        }
    )

    megatron_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            f"self_attention.{name}": (f"self_attention.core_attention.{megatron_name}",)
            for name, megatron_name in (
                ("sinks", "attn_sink"),
                *(
                    (f"{path}.{kind}", f"{path}.{kind}")
                    for path in ("compressor", "indexer.compressor")
                    for kind in ("linear_wkv.weight", "linear_wgate.weight", "ape", "norm.weight")
                ),
                *((f"indexer.{kind}.weight",) * 2 for kind in ("linear_wq_b", "linear_weights_proj")),
            )
        }
    )

    def as_flags(self) -> dict[str, Any]:
        indexer, base = self.indexer, {"rotary_base": self.rope.base}
        if self.ratio:
            own = {name: value for name, value in self.rope.as_flags().items() if name != "rotary_base"}
            length = {"original_max_position_embeddings": self.rope.original_max_positions}
            base = {"rotary_scaling_factor": 1.0, **own, **length, "csa_compress_rotary_base": self.rope.base}
        if self.ratio == OVERLAPPING_RATIO:
            base |= {"csa_dense_mode": indexer is None}
        if indexer is not None:
            base |= {
                "dsa_indexer_n_heads": indexer.num_heads,
                "dsa_indexer_head_dim": indexer.head_dim,
                "dsa_indexer_topk": indexer.topk,
                "dsa_indexer_scoring_relu": indexer.relu,
            }
        return {
            **base,
            "num_attention_heads": self.num_heads,
            "attention_dropout": 0.0,
            "multi_latent_attention": True,
            "position_embedding_type": "rope",
            "no_rope_freq": True,
            "q_lora_rank": self.q_lora_rank,
            "v_head_dim": self.head_dim,
            "qk_pos_emb_head_dim": self.rope.dim,
            "csa_compress_ratios": self.ratio,
            "csa_window_size": self.csa_window_size,
            "o_groups": self.o_groups,
            "o_lora_rank": self.o_lora_rank,
        }

    @property
    def q_width(self) -> int:
        """Width of q over all heads, which is also that of the output of attention."""
        return self.num_heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Width of the compressed output over all groups."""
        return self.o_groups * self.o_lora_rank

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def rotary_tables(self) -> tuple[RopeConfig, ...]:
        return (self.rope,)

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        return ("mla_up_proj",)

    def group_width(self, width: int) -> int:
        """Projected channels per token from which the compressor computes entries of `width` channels."""
        return 2 * width if self.ratio == OVERLAPPING_RATIO else width

    def num_chosen(self, seq_length: int) -> int:
        """Largest number of entries to which a query attends."""
        if not self.ratio:
            return 0
        entries = seq_length // self.ratio
        return entries if self.indexer is None else min(self.indexer.topk, entries)

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        linear = partial(linear_parameters, parallel=parallel, counted="attention")
        quantised = partial(linear, low="qkv_linear")
        yield from quantised("linear_q_down_proj", (self.q_lora_rank, self.hidden_size))
        yield from self.norm.parameters("q_layernorm", self.q_lora_rank, parallel)
        up = (self.q_width, self.q_lora_rank)
        yield from quantised("linear_q_up_proj", up, recomputed_by=("mla_up_proj",))
        yield from quantised("linear_kv_proj", (self.head_dim, self.hidden_size))
        yield from self.norm.parameters("kv_layernorm", self.head_dim, parallel)
        sinks = ParamMeta(role="sink", init="zeros", decay=False)
        yield ParamSpec(name="sinks", shape=(self.num_heads,), meta=sinks, counted="attention")
        if self.ratio:
            yield from self._compressor("compressor", self.head_dim, parallel)
        if self.indexer is not None:
            cost, width = self.indexer.projection_flops, self.indexer.num_heads * self.indexer.head_dim
            plain = partial(linear, low="", flops_per_element=cost)
            yield from plain("indexer.linear_wq_b", (width, self.q_lora_rank))
            yield from plain("indexer.linear_weights_proj", (self.indexer.num_heads, self.hidden_size))
            yield from self._compressor("indexer.compressor", self.indexer.head_dim, parallel, cost)
        inputs = self.q_width // self.o_groups
        grouped = ParamMeta(role="matrix", fan_in=inputs)
        yield ParamSpec(name="linear_o_group_proj", shape=(self.out_width, inputs), meta=grouped, counted="attention")
        yield from linear("linear_proj", (self.hidden_size, self.out_width), low="attn_proj", init="output")

    def _compressor(
        self, name: str, width: int, parallel: ParallelConfig, flops_per_element: int = TRAINING_FLOPS
    ) -> Iterator[ParamSpec]:
        channels = self.group_width(width)
        linear = partial(
            linear_parameters, parallel=parallel, counted="attention", low="", flops_per_element=flops_per_element
        )
        yield from linear(f"{name}.linear_wkv", (channels, self.hidden_size))
        yield from linear(f"{name}.linear_wgate", (channels, self.hidden_size))
        positions = ParamMeta(role="vector", fan_in=self.ratio)
        yield ParamSpec(name=f"{name}.ape", shape=(self.ratio, channels), meta=positions, counted="attention")
        yield from self.norm.parameters(f"{name}.norm", width, parallel)

    def flops(self, seq_length: int) -> FlopCount:
        """FLOPs of attention over the visible pairs of query and token or entry, and of the indexer over all pairs of a
        query and an entry that ends at or before it."""
        window = min(self.csa_window_size, seq_length)
        doubled_pairs = 2 * window * seq_length - window * window
        of_indexer = 0
        if self.ratio:
            # query t attends to (t + 1) // ratio entries, but at most the chosen number: areas of a triangle and a
            # rectangle
            chosen = self.num_chosen(seq_length)
            doubled_pairs += chosen * (2 * seq_length - chosen * self.ratio)
        if self.indexer is not None:
            of_indexer = self.indexer.pair_flops(self.q_width) * seq_length * (seq_length // self.ratio) // 2
        return FlopCount(core_attention=self.q_width * doubled_pairs * TRAINING_FLOPS, indexer=of_indexer)

    def layout_problem(self, parallel: ParallelConfig) -> str | None:
        if parallel.tp > 1:
            return (
                f"compressed attention has one key head, which {parallel.tp} tensor-parallel ranks cannot share; use "
                "--tensor-model-parallel-size 1"
            )
        return None

    def saved_input_fields(self, parallel: ParallelConfig) -> Mapping[str, Any]:
        # compressors read the input in its original format
        return {"low": "" if self.ratio else "qkv_linear", "shared": True}

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Tensors saved by attention. Keys, and the compressor's values and gates, are saved for the tokens of all
        context-parallel ranks."""
        tokens, size, wide = sizes.inner, sizes.activation_itemsize, sizes.internal_itemsize
        whole, heads = tokens * parallel.cp, tokens * self.num_heads
        tensor, core = partial(saved_tensor, "attention"), {"offloaded_by": "core_attn"}
        yield tensor("q latent", "T Q", tokens * self.q_lora_rank, size)
        yield tensor("q latent, normed", "T Q", tokens * self.q_lora_rank, size, {"low": "qkv_linear"})
        yield tensor("key before its norm", "U D", tokens * self.head_dim, size)
        yield tensor("statistics of norms", "U (2+N)", tokens * (2 + self.num_heads), wide)
        yield tensor("q", "U N D", heads * self.head_dim, size, {"recomputed_by": ("mla_up_proj",), **core})
        yield tensor("output", "U N D", heads * self.head_dim, size, core)
        yield tensor("log-sum-exp", "U N", heads, wide, core)
        entries = whole // self.ratio if self.ratio else 0
        yield tensor("keys and entries", "(S+E) B D", (whole + entries) * self.head_dim, size, core)
        seen = min(self.csa_window_size, sizes.length) + self.num_chosen(sizes.length)
        yield tensor("numbers of the rows that a query sees", "U K", tokens * seen, _INDEX_BYTES, core)
        if self.ratio:
            yield from self._entry_tensors(self.head_dim, "entries", whole, sizes)
        if self.indexer is not None and self.indexer.indexer_loss_coeff:
            heads, width = self.indexer.num_heads, self.indexer.head_dim
            yield from self._entry_tensors(width, "keys of the indexer", whole, sizes)
            yield tensor("q latent of the indexer", "T Q", tokens * self.q_lora_rank, size, core)
            gradients = tokens * heads * (width + 1) + entries * width
            yield tensor("gradients of the indexer's loss", "U I (D+1)", gradients, size, core)
        marks = {"low": "attn_proj", "offloaded_by": "attn_proj"}
        yield tensor("compressed output", "U G R", tokens * self.out_width, size, marks)

    def _entry_tensors(self, width: int, name: str, whole: int, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Tensors that the compressor saves for entries of `width` channels. `whole`: number of tokens on all
        context-parallel ranks."""
        tensor, core = partial(saved_tensor, "attention"), {"offloaded_by": "core_attn"}
        size, wide, number = sizes.activation_itemsize, sizes.internal_itemsize, whole // self.ratio
        yield tensor(f"values and gates of {name}", "S B C", whole * 2 * self.group_width(width), size, core)
        yield tensor(f"{name} before their norm", "E B D", number * width, size, core)
        yield tensor(f"rotation and statistics of {name}", "E B P", number * (2 * self.rope.dim + 1), wide, core)

    def backward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Largest workspace of three phases: the backward of the output projection, the backward of attention and of
        the q norm (gradients of the output, q and the keys of all ranks), and the forward of the indexer loss, which
        computes its gradients."""
        tokens, size, wide = sizes.inner, sizes.activation_itemsize, sizes.internal_itemsize
        of_heads, copies = tokens * self.q_width * size, QuantizedCopyBytes.of(low)
        projection = tokens * (self.hidden_size * copies.grad + self.out_width * size) + 2 * of_heads
        keys = tokens * parallel.cp * self.head_dim * (size + wide)
        block = min(tokens * self.q_width * wide, NORM_BLOCK_BYTES)
        of_attention = 2 * of_heads + max(keys, of_heads, _NORM_COPIES * block)
        return float(max(projection, of_attention, self._loss_workspace(sizes)))

    def _loss_workspace(self, sizes: ActivationSizes) -> float:
        indexer = self.indexer
        if indexer is None or not indexer.indexer_loss_coeff:
            return 0.0
        most = max(self.num_heads, indexer.num_heads)
        pairs = sizes.inner * (sizes.length // self.ratio) * sizes.internal_itemsize
        block = min(pairs * most, BLOCK_BYTES) / most
        return block * max(_TARGET_COPIES * self.num_heads, _SCORE_COPIES * indexer.num_heads)

    def gathered_context_channels(self, parallel: ParallelConfig) -> int:
        width = self.group_width(self.head_dim) if self.ratio else self.head_dim
        return max(width, 0 if self.indexer is None else self.group_width(self.indexer.head_dim))

    def context_parallel_traffic(self, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
        """Bytes sent of keys, of the compressor's values and gates, and of their gradients. Tensors of the indexer have
        no gradients to send."""
        channels = self.head_dim + (2 * self.group_width(self.head_dim) if self.ratio else 0)
        of_indexer = 2 * self.group_width(self.indexer.head_dim) if self.indexer is not None else 0
        return float((parallel.cp - 1) * sizes.inner * sizes.activation_itemsize * (2 * channels + of_indexer))

    def gemm_sizes(self, parallel: ParallelConfig) -> Iterator[tuple[str, int, int]]:
        yield "--q-lora-rank", self.q_lora_rank, 1
        yield "--v-head-dim", self.head_dim, 1
        yield "--qk-pos-emb-head-dim", self.rope.dim, 1
        yield "--o-lora-rank", self.o_lora_rank, 1
        if self.indexer is not None:
            yield "--dsa-indexer-head-dim", self.indexer.head_dim, 1

    def name_rules(self, model_type: str) -> Iterator[NameRule]:
        """Names in the published Hugging Face folders, which differ from the module names in transformers."""
        for name, hf_name in (
            ("linear_q_down_proj.weight", "wq_a.weight"),
            ("q_layernorm.weight", "q_norm.weight"),
            ("linear_q_up_proj.weight", "wq_b.weight"),
            ("linear_kv_proj.weight", "wkv.weight"),
            ("kv_layernorm.weight", "kv_norm.weight"),
            ("sinks", "attn_sink"),
            ("linear_o_group_proj", "wo_a.weight"),
            ("linear_proj.weight", "wo_b.weight"),
            ("indexer.linear_wq_b.weight", "indexer.wq_b.weight"),
            ("indexer.linear_weights_proj.weight", "indexer.weights_proj.weight"),
            *(
                (f"{path}.{name}", f"{path}.{hf_name}")
                for path in ("compressor", "indexer.compressor")
                for name, hf_name in (
                    ("linear_wkv.weight", "wkv.weight"),
                    ("linear_wgate.weight", "wgate.weight"),
                    ("ape", "ape"),
                    ("norm.weight", "norm.weight"),
                )
            ),
        ):
            yield NameRule(name, (f"attn.{hf_name}",))
