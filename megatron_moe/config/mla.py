"""Multi-latent attention (MLA)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_moe.config.attention import NormConfig, RopeConfig, SoftmaxMixerConfig
from megatron_moe.config.component import NameRule, ParamSpec, linear_parameters
from megatron_moe.config.costs import TRAINING_FLOPS, ActivationSizes, FlopCount, SavedActivation, saved_tensor
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import LowPrecisionConfig


@dataclass(frozen=True, kw_only=True)
class MLAConfig(SoftmaxMixerConfig):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    q_lora_rank: int | None
    """Width of the compressed q. None means that q is projected from the hidden state without compression."""
    kv_lora_rank: int
    """Width of the joint compression of k and v."""
    qk_head_dim: int
    """Channels per q or k head that are not rotated."""
    qk_rope_dim: int
    """Rotated channels per q or k head (`--qk-pos-emb-head-dim`). All k heads share the same rotated channels."""
    v_head_dim: int
    rope: RopeConfig | None
    """None means that no channels are rotated (`--rope-type none`)."""
    qk_norm: bool
    """Normalises the compressed q and the compressed kv (`--qk-layernorm`)."""
    norm: NormConfig = NormConfig(kind="RMSNorm")
    """Kind and epsilon of the norm that `qk_norm` enables."""

    module: ClassVar[str] = "megatron_moe.model.mla:MLA"
    registered_as: ClassVar[str] = "mla"
    selecting_flags: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"multi_latent_attention": True, "linear_attention_freq": False}
    )
    megatron_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "self_attention.q_layernorm.weight": ("self_attention.linear_q_up_proj.layer_norm_weight",),
            "self_attention.kv_layernorm.weight": ("self_attention.linear_kv_up_proj.layer_norm_weight",),
        }
    )

    def as_flags(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "none"}
        if self.rope is not None:
            rope = {**self.rope.as_flags(), "position_embedding_type": "rope", "no_rope_freq": True}
            rope["rope_type"] = "yarn" if self.rope.scaling == "yarn" else "rope"
            if self.rope.scaling == "yarn":
                rope["original_max_position_embeddings"] = self.rope.original_max_positions
        return {
            **super().as_flags(),
            **rope,
            "multi_latent_attention": True,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_head_dim": self.qk_head_dim,
            "qk_pos_emb_head_dim": self.qk_rope_dim,
            "v_head_dim": self.v_head_dim,
            "qk_layernorm": self.qk_norm,
        }

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        return ("core_attn", "mla_up_proj")

    @property
    def q_head_dim(self) -> int:
        return self.qk_head_dim + self.qk_rope_dim

    @property
    def value_head_dim(self) -> int:
        return self.v_head_dim

    @property
    def keys_values_width(self) -> int:
        return self.q_width + self.out_width

    @property
    def kv_up_width(self) -> int:
        """Output width of the up-projection of the compressed kv, which computes v and the unrotated channels of k."""
        return self.num_heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def rotary_tables(self) -> tuple[RopeConfig, ...]:
        return () if self.rope is None else (self.rope,)

    saves_normed_kv: ClassVar[bool] = True
    """Whether the up-projection of the compressed kv saves its input."""

    def replicates_kv_down_proj(self, parallel: ParallelConfig) -> bool:
        """Whether each tensor-parallel rank computes the kv latent of all positions itself, from the hidden state that
        it gathers for q, instead of gathering the latent."""
        return parallel.sequence_parallel and parallel.tp > 1 and self.q_lora_rank is None

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        linear = partial(linear_parameters, parallel=parallel, counted="attention", low="qkv_linear")
        up = partial(linear, recomputed_by=("mla_up_proj",), tp_dim=0)
        if self.q_lora_rank is None:
            yield from up("linear_q_proj", (self.q_width, self.hidden_size))
        else:
            yield from linear("linear_q_down_proj", (self.q_lora_rank, self.hidden_size))
            yield from up("linear_q_up_proj", (self.q_width, self.q_lora_rank))
            if self.qk_norm:
                yield from self.norm.parameters("q_layernorm", self.q_lora_rank, parallel)
        yield from linear("linear_kv_down_proj", (self.kv_lora_rank + self.qk_rope_dim, self.hidden_size))
        if self.qk_norm:
            yield from self.norm.parameters("kv_layernorm", self.kv_lora_rank, parallel)
        reads_gathered = self.replicates_kv_down_proj(parallel)
        yield from up("linear_kv_up_proj", (self.kv_up_width, self.kv_lora_rank), reads_gathered=reads_gathered)
        shape = (self.hidden_size, self.out_width)
        yield from linear("linear_proj", shape, low="attn_proj", tp_dim=1, init="output")
        yield from self.sink_parameters()

    def flops(self, seq_length: int) -> FlopCount:
        """Adds the norms of the compressed q and kv, as Megatron does, to the FLOPs of attention."""
        latents = self.kv_lora_rank + (self.q_lora_rank or 0) if self.qk_norm else 0
        return super().flops(seq_length) + FlopCount(attention=seq_length * TRAINING_FLOPS * latents)

    def saved_input_fields(self, parallel: ParallelConfig) -> Mapping[str, Any]:
        # with sequence parallelism, the input of a column-parallel matrix is saved as a shard, before quantisation; the
        # two down projections share one saved input
        low = (not parallel.sequence_parallel and parallel.tp == 1) or self.q_lora_rank is not None
        return {"low": "qkv_linear" if low else "", "shared": True}

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Latents are saved for this rank's T tokens, and backward gathers them for all U tokens, except if forward
        computes them for all U tokens (`replicates_kv_down_proj`)."""
        shard, tokens = self.shard(parallel.tp), sizes.inner
        yield from self.latent_tensors(parallel, sizes)
        tensor, size = partial(saved_tensor, "attention"), sizes.activation_itemsize
        marks = {"recomputed_by": ("mla_up_proj",), "offloaded_by": "core_attn"}
        yield tensor("q", "U N D", tokens * shard.q_width, size, marks)
        yield tensor("k", "U N D", tokens * shard.q_width, size, marks)
        yield tensor("kv latent output, of which v is a view", "U N (D-P+E)", tokens * shard.kv_up_width, size, marks)
        yield from shard.core_tensors(sizes)
        yield from shard.unfused_saved_tensors(parallel, sizes)

    def latent_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Tensors of `saved_tensors` that are saved before the up-projections."""
        tokens, local, tensor = sizes.inner, sizes.residual, partial(saved_tensor, "attention")
        letter, saved_whole = "T", self.replicates_kv_down_proj(parallel)
        if saved_whole:
            letter, local = "U", tokens
        is_shard = parallel.sequence_parallel and not saved_whole
        normed, size = {"low": "" if is_shard else "qkv_linear"}, sizes.activation_itemsize
        if self.q_lora_rank is not None:
            yield tensor("q latent", "T Q", local * self.q_lora_rank, size)
            if self.qk_norm:
                yield tensor("q latent, normed", "T Q", local * self.q_lora_rank, size, normed)
        if self.qk_norm or self.saves_normed_kv:
            yield tensor("kv latent", f"{letter} (L+P)", local * (self.kv_lora_rank + self.qk_rope_dim), size)
        if self.qk_norm:
            if self.saves_normed_kv:
                yield tensor("kv latent, normed", f"{letter} L", local * self.kv_lora_rank, size, normed)
            statistics = 2 if self.q_lora_rank is not None else 1
            yield tensor("statistics of latents", letter, local * statistics, sizes.internal_itemsize)

    def backward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        return self.attention_workspace(self.q_lora_rank or self.kv_lora_rank, parallel, sizes, low)

    def gathered_channels(self, parallel: ParallelConfig) -> int:
        return 0 if self.replicates_kv_down_proj(parallel) else self.qk_rope_dim

    def gemm_sizes(self, parallel: ParallelConfig) -> Iterator[tuple[str, int, int]]:
        if self.q_lora_rank is not None:
            yield "--q-lora-rank", self.q_lora_rank, 1
        yield "--kv-lora-rank", self.kv_lora_rank, 1
        yield "--qk-head-dim", self.qk_head_dim, 1
        yield "--qk-pos-emb-head-dim", self.qk_rope_dim, 1
        yield "--v-head-dim", self.v_head_dim, 1

    def with_unpublished_settings(self, run_config: Any, norm: NormConfig) -> "MLAConfig":
        """Accepts the epsilon of `norm` for the norms of the latents too, because a config.json has no key for it:
        transformers uses 1e-6; Megatron-LM, vLLM and SGLang use rms_norm_eps."""
        return replace(self, norm=norm) if getattr(run_config, "norm", None) == norm else self

    def name_rules(self, model_type: str) -> Iterator[NameRule]:
        for name, hf_name in (
            ("linear_q_proj", "q_proj"),
            ("linear_q_down_proj", "q_a_proj"),
            ("q_layernorm", "q_a_layernorm"),
            ("linear_q_up_proj", "q_b_proj"),
            ("linear_kv_down_proj", "kv_a_proj_with_mqa"),
            ("kv_layernorm", "kv_a_layernorm"),
            ("linear_kv_up_proj", "kv_b_proj"),
            ("linear_proj", "o_proj"),
        ):
            yield NameRule(f"{name}.weight", (f"self_attn.{hf_name}.weight",))
