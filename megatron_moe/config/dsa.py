"""DeepSeek sparse attention (DSA): multi-latent attention in which a lightning indexer selects the keys of each
query."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_moe.config.attention import NormConfig, RopeConfig
from megatron_moe.config.component import NameRule, ParamSpec, linear_parameters
from megatron_moe.config.costs import (
    FORWARD_FLOPS,
    TRAINING_FLOPS,
    ActivationSizes,
    FlopCount,
    SavedActivation,
    saved_tensor,
)
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.parallel import ParallelConfig

BLOCK_BYTES = 1 << 28
"""Maximum bytes of the scores in one block of queries; a block has at least one query."""
ID_BYTES = 4
"""Bytes of the id of a chosen key."""
_CHOICE_COPIES = 7
"""Temporary values per query and key in a block of the top-k selection: scores, masks and ids."""
_LOGIT_COPIES = 2
"""Temporary values per query, key and attention head in a block of the indexer loss: logits and probabilities."""
_INDEXER_COPIES = 2.25
"""Temporary values per query, key and indexer head in a block of the indexer loss: dot products, their gradients, and a
mask of one byte."""


def has_hadamard_matrix(size: int) -> bool:
    """Whether a Hadamard matrix of this size exists for the indexer, which is the case for powers of two."""
    return size & (size - 1) == 0


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Lightning indexer: the score of key s for query t is sum_h w[t, h] relu(q[t, h] . k[s])."""

    num_heads: int
    """Number of heads of q (`--dsa-indexer-n-heads`); all share one key."""
    head_dim: int
    topk: int
    """Number of keys to which each query attends (`--dsa-indexer-topk`)."""
    rope: RopeConfig
    """Rotary embedding of the first `rope.dim` channels."""
    norm: NormConfig
    """LayerNorm of the key."""
    relu: bool = True
    """Applies ReLU to q . k; if False, the scores are linear in q . k (`--no-dsa-indexer-scoring-relu`)."""
    rotate_activation: bool = True
    """Multiplies q and k by an orthogonal Hadamard matrix, which keeps their dot products
    (`--no-dsa-indexer-rotate-activation` switches it off)."""
    indexer_loss_coeff: float = 0.0
    """Coefficient of the KL divergence between indexer scores and attention probabilities; 0 means that the indexer is
    not trained."""
    sparse_indexer_loss: bool = False
    """Computes the indexer loss over the selected keys only (`--dsa-indexer-use-sparse-loss`) instead of over all keys
    that the mask allows."""
    topk_freq: int = 1
    """After the first layers, every `topk_freq`-th layer has an indexer (`--dsa-indexer-topk-freq`), and the layers
    between attend to the keys that it selects."""
    skip_topk_offset: int = 0
    """Number of first layers that all have an indexer (`--dsa-indexer-skip-topk-offset`); 0 means 1."""

    def layer_reuses_topk(self, layer: int) -> bool:
        """Whether decoder layer `layer`, counted from 0, uses the keys that an earlier layer selects."""
        return layer_reuses_topk(layer, self.topk_freq, max(self.skip_topk_offset, 1))

    @property
    def projection_flops(self) -> int:
        """Training FLOPs per token and weight element of the indexer's projections to q, key and head weights: forward
        and, if the indexer has a loss, weight gradients. Their inputs have no gradients."""
        return 2 * FORWARD_FLOPS if self.indexer_loss_coeff else FORWARD_FLOPS

    def pair_flops(self, attention_width: int) -> int:
        """Training FLOPs per query-key pair: indexer scores and, if the indexer has a loss, their gradients and the
        attention logits, which are constants in that loss. `attention_width`: number of channels of the keys of
        attention over all heads."""
        scores = self.num_heads * self.head_dim
        if not self.indexer_loss_coeff:
            return scores * FORWARD_FLOPS
        return scores * TRAINING_FLOPS + attention_width * FORWARD_FLOPS


def layer_reuses_topk(layer: int, freq: int, offset: int) -> bool:
    """Whether a layer, counted from 0, has no indexer, if the first `offset` layers have one, and then every `freq`-th
    layer."""
    return max(layer + 1 - offset, 0) % freq != 0


def indexer_schedule(shared: Sequence[bool]) -> tuple[int, int] | None:
    """Values of `topk_freq` and `skip_topk_offset` with which the layers for which `shared` is true have no indexer.
    None if there are none."""
    if not any(shared):
        return 1, 0
    for freq, offset in product(range(2, len(shared) + 1), range(1, len(shared))):
        if all(layer_reuses_topk(layer, freq, offset) == expected for layer, expected in enumerate(shared)):
            return freq, offset
    return None


@dataclass(frozen=True, kw_only=True)
class DSAConfig(MLAConfig):
    """Multi-latent attention of each query to the `indexer.topk` keys with the highest scores (DeepSeek-V3.2)."""

    indexer: IndexerConfig
    reuses_topk: bool = False
    """Whether the layer has no indexer and attends to the keys that the last layer before it with one has selected."""

    module: ClassVar[str] = "megatron_moe.model.dsa:DSA"
    registered_as: ClassVar[str] = "dsa"
    selecting_flags: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"multi_latent_attention": True, "linear_attention_freq": False, "experimental_attention_variant": "dsa"}
    )
    megatron_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            **MLAConfig.megatron_names,
            **{
                f"self_attention.indexer.{name}": (f"self_attention.core_attention.indexer.{name}",)
                for name in (
                    *("linear_wq_b.weight", "linear_wk.weight", "linear_weights_proj.weight"),
                    *("k_norm.weight", "k_norm.bias"),
                )
            },
        }
    )

    @classmethod
    def of(cls, latent: MLAConfig, indexer: IndexerConfig, *, reuses_topk: bool = False) -> "DSAConfig":
        """Creates the config of `latent` (multi-latent attention) with an indexer."""
        own = {field.name: getattr(latent, field.name) for field in fields(latent)}
        return cls(**own, indexer=indexer, reuses_topk=reuses_topk)

    def as_flags(self) -> dict[str, Any]:
        indexer = self.indexer
        return {
            **super().as_flags(),
            "dsa_indexer_n_heads": indexer.num_heads,
            "dsa_indexer_head_dim": indexer.head_dim,
            "dsa_indexer_topk": indexer.topk,
            "dsa_indexer_rope_interleaved": indexer.rope.interleaved,
            "dsa_indexer_k_norm_epsilon": indexer.norm.eps,
            "dsa_indexer_scoring_relu": indexer.relu,
            "dsa_indexer_topk_freq": indexer.topk_freq,
            "dsa_indexer_skip_topk_offset": indexer.skip_topk_offset,
        }

    saves_normed_kv: ClassVar[bool] = False

    @property
    def absorbed_key_width(self) -> int:
        """Channels of a row to which all heads attend: kv latent and rotated key."""
        return self.kv_lora_rank + self.qk_rope_dim

    @property
    def rotary_tables(self) -> tuple[RopeConfig, ...]:
        return super().rotary_tables if self.reuses_topk else (*super().rotary_tables, self.indexer.rope)

    @property
    def loss_coeff(self) -> float:
        """Coefficient of the indexer's loss; 0 if there is no loss."""
        return 0.0 if self.reuses_topk else self.indexer.indexer_loss_coeff

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        for spec in super().parameters(parallel):
            # kv_up is multiplied by q and by the attention output in the model's dtype
            yield replace(spec, low="") if spec.name == "linear_kv_up_proj.weight" else spec
        if self.reuses_topk:
            return
        indexer = self.indexer
        linear = partial(
            linear_parameters,
            parallel=parallel,
            counted="attention",
            low="",
            flops_per_element=indexer.projection_flops,
        )
        assert self.q_lora_rank is not None
        yield from linear("indexer.linear_wq_b", (indexer.num_heads * indexer.head_dim, self.q_lora_rank))
        yield from linear("indexer.linear_wk", (indexer.head_dim, self.hidden_size))
        yield from indexer.norm.parameters("indexer.k_norm", indexer.head_dim, parallel)
        yield from linear("indexer.linear_weights_proj", (indexer.num_heads, self.hidden_size))

    def flops(self, seq_length: int) -> FlopCount:
        """FLOPs in absorbed form, in which queries and keys have `absorbed_key_width` channels and values
        `kv_lora_rank`. Attention counts only the selected query-key pairs, the indexer counts all pairs inside the
        causal mask; without an indexer, there are none."""
        chosen = min(self.indexer.topk, seq_length)
        doubled_pairs = 2 * chosen * seq_length - chosen * chosen
        per_pair = self.num_heads * (self.absorbed_key_width + self.kv_lora_rank) * TRAINING_FLOPS
        per_key = 0 if self.reuses_topk else self.indexer.pair_flops(self.num_heads * self.absorbed_key_width)
        core = doubled_pairs * per_pair // 2
        of_indexer = per_key * seq_length * seq_length // 2
        return replace(super().flops(seq_length), core_attention=core, indexer=of_indexer)

    def saved_input_fields(self, parallel: ParallelConfig) -> Mapping[str, Any]:
        # the indexer reads the input in its original format
        read = {"low": ""} if self.loss_coeff else {}
        return {**super().saved_input_fields(parallel), **read}

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        yield from self.latent_tensors(parallel, sizes)
        shard, tokens, size = self.shard(parallel.tp), sizes.inner, sizes.activation_itemsize
        indexer, tensor = self.indexer, partial(saved_tensor, "attention")
        marks: dict[str, Any] = {"offloaded_by": "core_attn"}
        up = {"recomputed_by": ("mla_up_proj",)}
        latent = tokens * shard.num_heads * self.kv_lora_rank
        yield tensor("q before its absorption", "U N D", tokens * shard.q_width, size, up)
        yield tensor("absorbed q", "U N (L+P)", latent + tokens * shard.num_heads * self.qk_rope_dim, size, up | marks)
        yield tensor(
            "rows of latent and key", "S B (L+P)", tokens * parallel.cp * self.absorbed_key_width, size, up | marks
        )
        yield tensor("output before the up-projection of values", "U N L", latent, size, {"offloaded_by": "attn_proj"})
        yield from shard.core_tensors(sizes)
        if not self.reuses_topk:
            yield tensor("chosen keys", "U K", tokens * min(indexer.topk, sizes.length), ID_BYTES, marks)
        if not self.loss_coeff:
            return
        local, width = sizes.residual, indexer.num_heads * indexer.head_dim
        if self.qk_norm:
            yield tensor("q latent of the indexer", "T Q", local * (self.q_lora_rank or 0), size, marks)
        yield tensor("gradient of the indexer's q", "T I D", local * width, size, marks)
        yield tensor("gradient of the indexer's weights", "T I", local * indexer.num_heads, size, marks)
        keys = sizes.inner * parallel.cp
        yield tensor("gradient of the indexer's keys", "S B D", keys * indexer.head_dim, size, marks)
        yield tensor("key of the indexer before its norm", "T D", local * indexer.head_dim, size, marks)
        yield tensor("statistics of the indexer's keys", "2 T", 2 * local, sizes.internal_itemsize, marks)

    def core_workspace(self, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
        """Larger workspace of the backward of attention and of the forward of the indexer loss, which computes its
        gradients."""
        rows, pair = sizes.inner * parallel.cp * self.absorbed_key_width, sizes.length * sizes.internal_itemsize
        per_head = self.kv_lora_rank + self.absorbed_key_width
        of_attention = sizes.inner * self.num_heads * per_head * sizes.activation_itemsize
        of_attention += rows * (sizes.activation_itemsize + sizes.internal_itemsize)
        if self.reuses_topk:
            return float(of_attention)
        indexer, parts = self.indexer, sizes.inner // sizes.residual
        trains = bool(self.loss_coeff)
        most = max(indexer.num_heads, parts * self.num_heads) if trains else indexer.num_heads
        block = min(sizes.residual * most * pair, BLOCK_BYTES) / most
        if not trains:
            return float(max(of_attention, block * (indexer.num_heads + _CHOICE_COPIES)))
        grads = (
            sizes.residual
            * indexer.num_heads
            * indexer.head_dim
            * (sizes.internal_itemsize + sizes.activation_itemsize)
        )
        of_loss = block * _CHOICE_COPIES + block * max(
            indexer.num_heads + _LOGIT_COPIES * parts * self.num_heads, _INDEXER_COPIES * indexer.num_heads
        )
        return float(max(of_attention, of_loss + grads))

    def layout_problem(self, parallel: ParallelConfig) -> str | None:
        if parallel.cp > 1 and self.core.context_exchange != "allgather":
            return (
                f"sparse attention chooses among the keys of all {parallel.cp} context-parallel ranks; use "
                "--cp-comm-type all_gather"
            )
        return super().layout_problem(parallel)

    def gathered_context_channels(self, parallel: ParallelConfig) -> int:
        return max(self.absorbed_key_width, 0 if self.reuses_topk else self.indexer.head_dim)

    def context_parallel_traffic(self, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
        keys = 0 if self.reuses_topk else self.indexer.head_dim * (2 if self.loss_coeff else 1)
        return float((2 * self.absorbed_key_width + keys) * sizes.inner * sizes.activation_itemsize * (parallel.cp - 1))

    def gathered_channels(self, parallel: ParallelConfig) -> int:
        # rows are gathered in place of the input of the up-projection of kv, for which 3 passes are counted
        return self.absorbed_key_width - 3 * self.kv_lora_rank // 2

    def gemm_sizes(self, parallel: ParallelConfig) -> Iterator[tuple[str, int, int]]:
        yield from super().gemm_sizes(parallel)
        yield "--dsa-indexer-head-dim", self.indexer.head_dim, 1

    def name_rules(self, model_type: str) -> Iterator[NameRule]:
        yield from super().name_rules(model_type)
        if self.reuses_topk:
            return
        for name, hf_name in (
            ("linear_wq_b.weight", "wq_b.weight"),
            ("linear_wk.weight", "wk.weight"),
            ("k_norm.weight", "k_norm.weight"),
            ("k_norm.bias", "k_norm.bias"),
            ("linear_weights_proj.weight", "weights_proj.weight"),
        ):
            yield NameRule(f"indexer.{name}", (f"self_attn.indexer.{hf_name}",))
