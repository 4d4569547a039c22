"""Reading a Hugging Face config.json: typed access, refusals, and the parts that families share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_moe.config.attention import (
    NormConfig,
    RopeConfig,
    yarn_mscale,
)
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.moe import ActivationConfig, MLPConfig


@dataclass(frozen=True)
class HFConfig:
    """A config.json. Keys that its writers leave out when they hold the family's default are read by `get`."""

    values: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", "unknown"))

    def need(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise CheckpointProblem(f"config.json of model type {self.model_type} has no {key}; add it to the file.")
        return value

    def get(self, key: str, default: Any) -> Any:
        """The value, or `default` where the file has none or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str) -> int:
        value = self.need(key)
        if not isinstance(value, int):
            raise CheckpointProblem(
                f"config.json has {key} = {value!r}, which is not a whole number; correct the file."
            )
        return value

    def number(self, key: str) -> float:
        value = self.need(key)
        if not isinstance(value, int | float):
            raise CheckpointProblem(f"config.json has {key} = {value!r}, which is not a number; correct the file.")
        return float(value)

    def refuse_if(self, condition: bool, what: str) -> None:
        """Raises CheckpointProblem: this model computes something that ours does not."""
        if condition:
            raise CheckpointProblem(f"config.json of model type {self.model_type} {what}, which is not supported here.")

    def refuse_other(self, key: str, *known: str) -> None:
        """Raises CheckpointProblem for a value that is given and none of those."""
        value = self.get(key, known[0])
        self.refuse_if(value not in known, f"has {key} = {value!r}")


def read_norm(config: HFConfig, default_eps: float) -> NormConfig:
    return NormConfig(kind="RMSNorm", eps=float(config.get("rms_norm_eps", default_eps)))


def read_activation(config: HFConfig) -> ActivationConfig:
    """The gated activation that all families use."""
    name = config.get("hidden_act", "silu")
    config.refuse_if(name != "silu", f"has the activation {name}")
    return ActivationConfig(kind="silu", gated=True)


def read_mlp(config: HFConfig, ffn_hidden_size: int) -> MLPConfig:
    config.refuse_if(config.get("mlp_bias", False), "has biases in its MLPs (mlp_bias)")
    return MLPConfig(
        hidden_size=config.integer("hidden_size"), ffn_hidden_size=ffn_hidden_size, activation=read_activation(config)
    )


def read_rope(
    config: HFConfig, head_dim: int, default_base: float, interleaved: bool = False, default_part: float = 1.0
) -> RopeConfig:
    """Rotation of the first `partial_rotary_factor` of a head."""
    rope = _rope_parameters(config)
    per_kind = [key for key, value in rope.values.items() if isinstance(value, Mapping)]
    config.refuse_if(bool(per_kind), f"has a rotation for each of {', '.join(per_kind)} (rope_parameters)")
    plain = RopeConfig(
        dim=int(head_dim * rope.get("partial_rotary_factor", default_part)),
        base=float(rope.get("rope_theta", default_base)),
        interleaved=interleaved,
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return plain
    if kind == "yarn":
        return _yarn(config, rope, plain)
    if kind == "linear":
        return replace(plain, scaling="linear", scaling_factor=rope.number("factor"))
    config.refuse_if(kind != "llama3", f"has the rope type {kind}")
    return replace(
        plain,
        scaling="llama3",
        scaling_factor=rope.number("factor"),
        original_max_positions=rope.integer("original_max_position_embeddings"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
    )


def _rope_parameters(config: HFConfig) -> HFConfig:
    """Today's `rope_parameters`, or the older `rope_scaling` beside `rope_theta` and `partial_rotary_factor`."""
    beside = {key: config.values.get(key) for key in ("model_type", "rope_theta", "partial_rotary_factor")}
    return HFConfig({**beside, **(config.get("rope_parameters", None) or config.get("rope_scaling", {}))})


def _yarn(config: HFConfig, rope: HFConfig, plain: RopeConfig) -> RopeConfig:
    """Hugging Face uses the two mscales for cos and sin only when both are given and not 0; otherwise the concentration
    is 0.1 ln(factor) + 1. A given attention_factor wins over both."""
    original = rope.integer("original_max_position_embeddings")
    factor = float(rope.get("factor", 0.0) or config.integer("max_position_embeddings") / original)
    mscale, all_dim = float(rope.get("mscale", 0.0)), float(rope.get("mscale_all_dim", 0.0))
    concentration = rope.get("attention_factor", None)
    if concentration is None and not (mscale and all_dim):
        concentration = yarn_mscale(factor, 1.0)
    return replace(
        plain,
        scaling="yarn",
        scaling_factor=factor,
        original_max_positions=original,
        beta_fast=float(rope.get("beta_fast", 32.0)),
        beta_slow=float(rope.get("beta_slow", 1.0)),
        mscale=mscale or 1.0,
        mscale_all_dim=all_dim,
        truncate=bool(rope.get("truncate", True)),
        concentration=concentration,
    )
