"""Mamba-2: a state space model as linear attention with a decay (Nemotron-3)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_moe.config.component import NameRule, ParamSpec
from megatron_moe.config.costs import ActivationSizes, SavedActivation, saved_tensor
from megatron_moe.config.linear_attention import LinearAttentionConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamMeta

_NAMES = (
    *("in_proj.weight", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight", "out_proj.weight"),
)
"""Names of the parameters, which are the same in Hugging Face and Megatron checkpoints."""
_TRANSFORMS = "megatron_moe.checkpoint.huggingface.linear_attention"


@dataclass(frozen=True, kw_only=True)
class MambaConfig(LinearAttentionConfig):
    """Mamba-2 (arXiv 2405.21060). Its groups of B and C are the heads of k and q, and its state size is their width.

    The norm is over the value heads of a group, after the gate.
    """

    module: ClassVar[str] = "megatron_moe.model.mamba:Mamba"
    registered_as: ClassVar[str] = "mamba"
    node_name: ClassVar[str] = "mamba"
    mixed_rows: ClassVar[bool] = True
    megatron_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "input_layernorm.weight": ("norm.weight", "mixer.in_proj.layer_norm_weight"),
            **{f"self_attention.{name}": (f"mixer.{name}",) for name in _NAMES},
        }
    )

    def as_flags(self) -> dict[str, Any]:
        return {
            "mamba_num_groups": self.num_key_heads,
            "mamba_num_heads": self.num_value_heads,
            "mamba_state_dim": self.key_head_dim,
            "mamba_head_dim": self.value_head_dim,
        }

    @property
    def conv_input_widths(self) -> tuple[int, ...]:
        """Widths of x, B and C."""
        return self.value_width, self.key_width, self.key_width

    @property
    def in_proj_widths(self) -> tuple[int, ...]:
        """Widths of gate, x, B, C, and one time step per head."""
        return (self.value_width, *self.conv_input_widths, self.num_value_heads)

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        yield from super().parameters(parallel)
        conv, heads = self.conv_input_widths, ParamMeta(role="bias", init="time_step", tp_dim=0, decay=False)
        for name, shape, meta in (
            ("conv1d.bias", (sum(conv),), replace(heads, init="zeros", splits=conv)),
            ("dt_bias", (self.num_value_heads,), heads),
            ("D", (self.num_value_heads,), replace(heads, role="vector", init="ones")),
            ("norm.weight", (self.value_width,), replace(heads, role="norm", init="ones")),
        ):
            yield ParamSpec(name=name, shape=shape, meta=meta, counted="norms" if "norm" in name else "attention")

    def recurrence_macs_per_token(self) -> int:
        return 7 * self.value_width * self.key_head_dim // 2

    def recurrence_tensors(self, heads: int, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        yield saved_tensor("attention", "time steps and decay", "U N", 3 * heads, sizes.internal_itemsize)
        yield saved_tensor(
            "attention", "x times time step", "U N V", heads * self.value_head_dim, sizes.activation_itemsize
        )

    def name_rules(self, model_type: str) -> Iterator[NameRule]:
        for name in _NAMES:
            yield NameRule(name, (f"mixer.{name}",), f"{_TRANSFORMS}:FILTERS" if name == "conv1d.weight" else "copy")
