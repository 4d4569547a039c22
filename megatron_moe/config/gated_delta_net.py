"""Gated delta net: linear attention with a decay and the delta rule (Qwen3-Next, Qwen3.5)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.component import MixerConfig, NameRule, ParamSpec, linear_parameters
from megatron_moe.config.costs import TRAINING_FLOPS, ActivationSizes, FlopCount, SavedActivation, saved_tensor
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.precision import LowPrecisionConfig

CHUNK = 64
"""Tokens of a chunk, within which the kernels of linear attention compute matrix products."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(MixerConfig):
    """Gated delta net (arXiv 2412.06464) as in Qwen3-Next."""

    num_key_heads: int
    """Number of heads of q and k (`--linear-num-key-heads`)."""
    num_value_heads: int
    """Number of heads of v, each with its own state (`--linear-num-value-heads`); a multiple of `num_key_heads`."""
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    """Tokens that the short convolution of q, k and v sees (`--linear-conv-kernel-dim`)."""
    norm: NormConfig
    """Norm of each head's output, which is then gated. Its weight is never stored zero-centred."""

    module: ClassVar[str] = "megatron_moe.model.gated_delta_net:GatedDeltaNet"

    @property
    def key_width(self) -> int:
        """Width of q over all heads, which is also that of k."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of v over all heads, which is also that of the output gate."""
        return self.num_value_heads * self.value_head_dim

    @property
    def mixed_sections(self) -> tuple[int, ...]:
        """Widths of q, k and v, which enter the short convolution."""
        return self.key_width, self.key_width, self.value_width

    @property
    def sections(self) -> tuple[int, ...]:
        """Output widths of `in_proj`: q, k, v, output gate, and one beta and one decay per value head."""
        return (*self.mixed_sections, self.value_width, self.num_value_heads, self.num_value_heads)

    def shard(self, tp: int) -> "GatedDeltaNetConfig":
        """Config with the heads of one of `tp` ranks."""
        return replace(self, num_key_heads=self.num_key_heads // tp, num_value_heads=self.num_value_heads // tp)

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        linear = partial(linear_parameters, parallel=parallel, counted="attention")
        yield from linear(
            "in_proj", (sum(self.sections), self.hidden_size), low="qkv_linear", tp_dim=0, splits=self.sections
        )
        spec = partial(ParamSpec, counted="attention")
        mixed, heads = self.mixed_sections, (self.num_value_heads,)
        conv = ParamMeta(role="vector", init="uniform", fan_in=self.conv_width, tp_dim=0, splits=mixed)
        yield spec(name="conv1d.weight", shape=(sum(mixed), self.conv_width), meta=conv)
        bias = ParamMeta(role="bias", init="ones", tp_dim=0, decay=False)
        yield spec(name="dt_bias", shape=heads, meta=bias)
        yield spec(name="A_log", shape=heads, meta=replace(bias, role="vector", init="decay_rate"))
        yield from self.norm.parameters("out_norm", self.value_head_dim, parallel, over_heads=True)
        shape = (self.hidden_size, self.value_width)
        yield from linear("out_proj", shape, low="attn_proj", tp_dim=1, init="output")

    def flops(self, seq_length: int) -> FlopCount:
        """FLOPs of the short convolution and of the recurrence, by Megatron's formula: 4 V^2 per head and token."""
        convolution = self.conv_width * sum(self.mixed_sections)
        recurrence = 4 * self.num_value_heads * self.value_head_dim**2
        return FlopCount(core_attention=seq_length * TRAINING_FLOPS * (convolution + recurrence))

    def layout_problem(self, parallel: ParallelConfig) -> str | None:
        num_ranks = parallel.tp * parallel.cp
        if self.num_key_heads % num_ranks or self.num_value_heads % num_ranks:
            heads = f"{self.num_key_heads} key heads and {self.num_value_heads} value heads of linear attention"
            return f"{parallel.tp} tensor- times {parallel.cp} context-parallel ranks cannot share {heads} equally"
        return None

    def context_parallel_bytes(self, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
        """Bytes of q, k, v, beta and decay, whose heads are scattered, and of the output, whose heads are gathered."""
        shard = self.shard(parallel.tp)
        channels = sum(shard.mixed_sections) + 2 * shard.num_value_heads + shard.value_width
        return 2 * sizes.inner * channels * sizes.activation * (parallel.cp - 1) / parallel.cp

    def input_marks(self, parallel: ParallelConfig) -> Mapping[str, Any]:
        return {"low": "" if parallel.sequence_parallel else "qkv_linear"}

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """The output gate is a part of the projection's output, and q, k and v are parts of the convolution's."""
        shard, tokens, size = self.shard(parallel.tp), sizes.inner, sizes.activation
        tensor, heads = partial(saved_tensor, "attention"), tokens * shard.num_value_heads
        mixed = tokens * sum(shard.mixed_sections)
        yield tensor("projection", "U C", tokens * sum(shard.sections), size)
        if parallel.cp > 1:
            yield tensor("q, k and v of whole sequences", "U C", mixed, size)
        yield tensor("q, k and v", "U C", mixed, size)
        yield tensor("decay and beta", "U N", 4 * heads, sizes.internal)
        yield tensor("inverse systems", "U N 64", heads * CHUNK, size)
        yield tensor("output", "U N V", heads * self.value_head_dim, size)
        yield tensor("gated output", "U N V", heads * self.value_head_dim, size, {"low": "attn_proj"})

    def backward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Backward of the recurrence: solutions, states and stored values, and their gradients."""
        keys, values = self.key_head_dim, self.value_head_dim
        state = keys * values / CHUNK
        narrow = 2 * state + 3 * keys + 7 * values
        heads = sizes.inner * self.shard(parallel.tp).num_value_heads
        return heads * (narrow * sizes.activation + 2 * keys * sizes.internal)

    def name_rules(self, model_type: str) -> Iterator[NameRule]:
        sizes = self.num_key_heads, self.num_value_heads, self.key_head_dim, self.value_head_dim
        if model_type == "qwen3_next":
            names = ("in_proj_qkvz", "in_proj_ba")
            transform, arguments = "megatron_moe.checkpoint.huggingface.delta_net:by_key_head", sizes
        else:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            transform = "megatron_moe.checkpoint.huggingface.delta_net:by_section"
            arguments = sum(self.mixed_sections), *self.sections[3:]
        hf_names = tuple(f"linear_attn.{name}.weight" for name in names)
        yield NameRule("in_proj.weight", hf_names, transform, arguments)
        conv = "megatron_moe.checkpoint.huggingface.delta_net:FILTERS"
        yield NameRule("conv1d.weight", ("linear_attn.conv1d.weight",), conv)
        for name, hf_name in (
            ("dt_bias", "dt_bias"),
            ("A_log", "A_log"),
            ("out_norm.weight", "norm.weight"),
            ("out_proj.weight", "out_proj.weight"),
        ):
            yield NameRule(name, (f"linear_attn.{hf_name}",))
