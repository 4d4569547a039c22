"""Gated delta net: linear attention with a decay and the delta rule (Qwen3-Next, Qwen3.5)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_moe.config.component import NameRule, ParamSpec
from megatron_moe.config.costs import ActivationSizes, SavedActivation, saved_tensor
from megatron_moe.config.linear_attention import CHUNK, LinearAttentionConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamMeta

_TRANSFORMS = "megatron_moe.checkpoint.huggingface.linear_attention"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(LinearAttentionConfig):
    """Gated delta net (arXiv 2412.06464) as in Qwen3-Next. The norm is over each head and before the gate."""

    module: ClassVar[str] = "megatron_moe.model.gated_delta_net:GatedDeltaNet"
    registered_as: ClassVar[str] = "gated_delta_net"
    selecting_flags: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": True}
    )
    solves_systems: ClassVar[bool] = True

    def as_flags(self) -> dict[str, Any]:
        return {
            "linear_num_key_heads": self.num_key_heads,
            "linear_num_value_heads": self.num_value_heads,
            "linear_key_head_dim": self.key_head_dim,
            "linear_value_head_dim": self.value_head_dim,
            "linear_conv_kernel_dim": self.conv_width,
        }

    @property
    def conv_input_widths(self) -> tuple[int, ...]:
        """Widths of q, k and v."""
        return self.key_width, self.key_width, self.value_width

    @property
    def in_proj_widths(self) -> tuple[int, ...]:
        """Widths of q, k, v, output gate, and one beta and one decay per value head."""
        return (*self.conv_input_widths, self.value_width, self.num_value_heads, self.num_value_heads)

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        yield from super().parameters(parallel)
        bias = ParamMeta(role="bias", init="ones", tp_dim=0, decay=False)
        yield ParamSpec(name="dt_bias", shape=(self.num_value_heads,), meta=bias, counted="attention")
        yield from self.norm.parameters("out_norm", self.value_head_dim, parallel, over_heads=True)

    def recurrence_macs_per_token(self) -> int:
        return 4 * self.num_value_heads * self.value_head_dim**2

    def recurrence_tensors(self, heads: int, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        yield saved_tensor("attention", "decay and beta", "U N", 4 * heads, sizes.internal_itemsize)
        yield saved_tensor("attention", "inverse systems", "U N 64", heads * CHUNK, sizes.activation_itemsize)

    def name_rules(self, model_type: str) -> Iterator[NameRule]:
        names: tuple[str, ...]
        arguments: tuple[int, ...]
        if model_type == "qwen3_next":
            names, transform = ("in_proj_qkvz", "in_proj_ba"), f"{_TRANSFORMS}:by_key_head"
            arguments = self.num_key_heads, self.num_value_heads, self.key_head_dim, self.value_head_dim
        else:
            names, transform = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), f"{_TRANSFORMS}:by_section"
            arguments = sum(self.conv_input_widths), *self.in_proj_widths[3:]
        hf_names = tuple(f"linear_attn.{name}.weight" for name in names)
        yield NameRule("in_proj.weight", hf_names, transform, arguments)
        yield NameRule("conv1d.weight", ("linear_attn.conv1d.weight",), f"{_TRANSFORMS}:FILTERS")
        for name, hf_name in (
            ("dt_bias", "dt_bias"),
            ("A_log", "A_log"),
            ("out_norm.weight", "norm.weight"),
            ("out_proj.weight", "out_proj.weight"),
        ):
            yield NameRule(name, (f"linear_attn.{hf_name}",))
