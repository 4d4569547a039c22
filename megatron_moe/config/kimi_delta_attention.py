"""Kimi delta attention: a gated delta net with a decay per channel (Kimi-Linear)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_moe.config.component import NameRule, ParamSpec, linear_parameters
from megatron_moe.config.costs import ActivationSizes, SavedActivation, saved_tensor
from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.config.linear_attention import CHUNK
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import LowPrecisionConfig

_TRANSFORMS = "megatron_moe.checkpoint.huggingface.linear_attention"


@dataclass(frozen=True, kw_only=True)
class KimiDeltaAttentionConfig(GatedDeltaNetConfig):
    """Kimi delta attention (arXiv 2510.26692). Decays of the channels of k and the output gate are low-rank projections
    of the hidden state, whose rank is `value_head_dim`."""

    module: ClassVar[str] = "megatron_moe.model.kimi_delta_attention:KimiDeltaAttention"
    registered_as: ClassVar[str] = "kimi_delta_attention"
    selecting_flags: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"experimental_attention_variant": "kimi_delta_attention", "linear_attention_freq": True}
    )

    @property
    def in_proj_widths(self) -> tuple[int, ...]:
        """Widths of q, k, v, and one beta per value head."""
        return (*self.conv_input_widths, self.num_value_heads)

    @property
    def decay_width(self) -> int:
        """Number of decays per token: one per value head and channel of its keys."""
        return self.num_value_heads * self.key_head_dim

    @property
    def exchanged_channels(self) -> int:
        return sum(self.in_proj_widths) + self.decay_width + self.value_width

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        for spec in super().parameters(parallel):
            if spec.name == "dt_bias":
                bias = replace(spec.meta, init="time_step")
                yield replace(spec, shape=(self.decay_width,), meta=bias)
            else:
                yield spec
        # not quantised: the gates are small matrices, and decays are exponentiated
        linear, rank = partial(linear_parameters, parallel=parallel, counted="attention", low=""), self.value_head_dim
        yield from linear("gates_down_proj", (2 * rank, self.hidden_size), splits=(rank, rank))
        yield from linear("decay_up_proj", (self.decay_width, rank), tp_dim=0)
        yield from linear("output_gate_up_proj", (self.value_width, rank), tp_dim=0)

    def recurrence_macs_per_token(self) -> int:
        return 4 * self.decay_width * self.value_head_dim

    def saved_input_fields(self, parallel: ParallelConfig) -> Mapping[str, Any]:
        return {}

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        yield from super().saved_tensors(parallel, sizes)
        tensor, width = partial(saved_tensor, "attention"), self.shard(parallel.tp).value_width
        yield tensor(
            "latents of the gates", "T 2E", 2 * sizes.residual * self.value_head_dim, sizes.activation_itemsize
        )
        yield tensor("output gate", "U N V", sizes.inner * width, sizes.activation_itemsize)

    def recurrence_tensors(self, heads: int, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        # inputs and outputs of softplus, and its products with the decay rates
        yield saved_tensor("attention", "decay", "U N K", 3 * heads * self.key_head_dim, sizes.internal_itemsize)
        yield saved_tensor("attention", "beta", "U N", heads, sizes.internal_itemsize)
        both = 2 * heads * CHUNK
        yield saved_tensor("attention", "inverse systems and scores", "U N 2 64", both, sizes.activation_itemsize)

    def backward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Adds decayed q and k, cumulative decays and gradients of scores. With narrow heads, the peak comes later,
        when gradients of the triangular systems have replaced the states."""
        heads = sizes.inner * self.shard(parallel.tp).num_value_heads
        keys, narrow, wide = self.key_head_dim, sizes.activation_itemsize, sizes.internal_itemsize
        decayed = (3 * keys + CHUNK) * narrow + (keys + 2 + 2 * keys / CHUNK) * wide
        states = 2 * keys * self.value_head_dim / CHUNK * narrow
        later = (self.value_head_dim + max(keys, CHUNK)) * narrow + keys * wide
        return super().backward_workspace(parallel, sizes, low) + heads * (decayed + max(0.0, later - states))

    def name_rules(self, model_type: str) -> Iterator[NameRule]:
        names = ("q_proj", "k_proj", "v_proj", "b_proj")
        for name, hf_names, sizes in (
            ("in_proj.weight", tuple(f"self_attn.{name}.weight" for name in names), self.in_proj_widths),
            (
                "gates_down_proj.weight",
                ("self_attn.f_a_proj.weight", "self_attn.g_a_proj.weight"),
                (self.value_head_dim,) * 2,
            ),
        ):
            yield NameRule(name, hf_names, f"{_TRANSFORMS}:by_section", sizes)
        filters = tuple(f"self_attn.{name}_conv1d.weight" for name in "qkv")
        yield NameRule("conv1d.weight", filters, f"{_TRANSFORMS}:filters_by_section", self.conv_input_widths)
        yield NameRule("A_log", ("self_attn.A_log",), f"{_TRANSFORMS}:BY_HEAD")
        for name, hf_name in (
            ("dt_bias", "dt_bias"),
            ("decay_up_proj.weight", "f_b_proj.weight"),
            ("output_gate_up_proj.weight", "g_b_proj.weight"),
            ("out_norm.weight", "o_norm.weight"),
            ("out_proj.weight", "o_proj.weight"),
        ):
            yield NameRule(name, (f"self_attn.{hf_name}",))
