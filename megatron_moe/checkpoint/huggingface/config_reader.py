"""Typed access to a Hugging Face config.json, and readers for the parts that model families share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, UnionType
from typing import Any

from megatron_moe.config.attention import AttentionConfig, NormConfig, RopeConfig, yarn_mscale
from megatron_moe.config.dsa import IndexerConfig, has_hadamard_matrix, layer_reuses_topk
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import ExpertsConfig, MoEConfig, RouterConfig, SharedExpertsConfig

_DEEPSEEK_V3 = MappingProxyType(
    {
        **{"n_shared_experts": 1, "routed_scaling_factor": 2.5, "q_lora_rank": 1536},
        **{"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
    }
)
_QWEN_HYBRID = MappingProxyType({"num_key_value_heads": 2, "head_dim": 256})
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mixtral": {"num_key_value_heads": 8},
        "qwen3_moe": {"num_key_value_heads": 4},
        "qwen3_next": _QWEN_HYBRID,
        "qwen3_5_moe_text": _QWEN_HYBRID,
        "nemotron_h": {"num_key_value_heads": 8},
        "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64},
        "glm4_moe": {"num_key_value_heads": 8, "n_shared_experts": 1},
        "glm4_moe_lite": {"n_shared_experts": 1, "routed_scaling_factor": 1.8, "q_lora_rank": 768},
        "ernie4_5_moe": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
        "deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 1536},
        "deepseek_v3": _DEEPSEEK_V3,
        "deepseek_v32": _DEEPSEEK_V3,
        "glm_moe_dsa": {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5},
        "kimi_linear": {"num_shared_experts": 1, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5},
        "deepseek_v4": {"routed_scaling_factor": 1.5},
    }
)
"""Values in transformers of keys that a config.json lacks, by `model_type`, where they differ from those of other
families. Keys that are null have no default."""
_OF_WHOLE_MODEL = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "transformers_version")
"""Keys that are read from the top level of a config.json with a `text_config`."""


def language_model(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the language model of a Qwen3.5-MoE folder, which also describes an image encoder; returns
    other configs unchanged."""
    text = values.get("text_config")
    if values.get("model_type") != "qwen3_5_moe" or not isinstance(text, Mapping):
        return values
    whole = {key: values[key] for key in _OF_WHOLE_MODEL if key in values}
    return {**text, **whole, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}


@dataclass(frozen=True)
class HFConfig:
    """Contents of a config.json. Use `get` for keys that transformers omits if they have their default value."""

    values: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", "unknown"))

    def require(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise CheckpointProblem(f"config.json of model type {self.model_type} has no {key}; add it to the file.")
        return value

    def get(self, key: str, default: Any) -> Any:
        """Value of `key`, or `default` if it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str) -> int:
        return self._typed(key, int, "an integer")

    def number(self, key: str) -> float:
        return float(self._typed(key, int | float, "a number"))

    def _typed(self, key: str, kind: type | UnionType, what: str) -> Any:
        value = self.require(key)
        if not isinstance(value, kind):
            raise CheckpointProblem(f"config.json has {key} = {value!r}, which is not {what}; correct the file.")
        return value

    def refuse_if(self, condition: bool, what: str) -> None:
        """Raises CheckpointProblem if `condition` is true. `what`: verb phrase that names the unsupported feature."""
        if condition:
            raise CheckpointProblem(f"config.json of model type {self.model_type} {what}, which is not supported here.")

    def refuse_other(self, key: str, *known: str) -> None:
        """Raises CheckpointProblem if the value of `key` is not in `known`. A missing key has the value `known[0]`."""
        value = self.get(key, known[0])
        self.refuse_if(value not in known, f"has {key} = {value!r}")


def read_norm(config: HFConfig, default_eps: float) -> NormConfig:
    return NormConfig(kind="RMSNorm", eps=float(config.get("rms_norm_eps", default_eps)))


def read_activation(config: HFConfig) -> ActivationConfig:
    """Returns gated SiLU, the activation of all families except GPT-OSS. Raises CheckpointProblem for any other."""
    name = config.get("hidden_act", "silu")
    config.refuse_if(name != "silu", f"has the activation {name}")
    return ActivationConfig(kind="silu", gated=True)


def read_mlp(config: HFConfig, ffn_hidden_size: int) -> MLPConfig:
    config.refuse_if(config.get("mlp_bias", False), "has biases in its MLPs (mlp_bias)")
    return MLPConfig(
        hidden_size=config.integer("hidden_size"), ffn_hidden_size=ffn_hidden_size, activation=read_activation(config)
    )


def read_moe(
    config: HFConfig,
    num_experts: int,
    ffn_hidden_size: int,
    *,
    shared: SharedExpertsConfig | None = None,
    activation: ActivationConfig | None = None,
    bias: bool = False,
    **router: Any,
) -> MoEConfig:
    """Builds an MoE config from a config.json. `activation`: that of the experts; None means that of `read_activation`.
    `bias`: whether experts have biases. `router`: further fields of RouterConfig."""
    hidden, topk = config.integer("hidden_size"), config.integer("num_experts_per_tok")
    return MoEConfig(
        router=RouterConfig(hidden_size=hidden, num_experts=num_experts, topk=topk, **router),
        experts=ExpertsConfig(
            num_experts=num_experts,
            hidden_size=hidden,
            ffn_hidden_size=ffn_hidden_size,
            activation=activation or read_activation(config),
            bias=bias,
        ),
        shared=shared,
    )


def read_layers(
    config: HFConfig,
    norm: NormConfig,
    mixer: AttentionConfig | MLAConfig,
    moe: MoEConfig,
    is_dense: Callable[[int], bool],
) -> tuple[LayerConfig, ...]:
    """Builds the layer configs: layer i has an MLP of `intermediate_size` if `is_dense(i)`, else `moe`."""
    dense = [is_dense(index) for index in range(config.integer("num_hidden_layers"))]
    mlp = read_mlp(config, config.integer("intermediate_size")) if any(dense) else None
    return tuple(LayerConfig(mixer=mixer, feed_forward=mlp if mlp and d else moe, norm=norm) for d in dense)


def read_rope(
    config: HFConfig, head_dim: int, default_base: float, interleaved: bool = False, default_rotary_factor: float = 1.0
) -> RopeConfig:
    """Reads the RoPE config. `default_rotary_factor` is used if `partial_rotary_factor` is missing."""
    rope = _rope_parameters(config)
    per_kind = [key for key, value in rope.values.items() if isinstance(value, Mapping)]
    config.refuse_if(bool(per_kind), f"has separate RoPE parameters for {', '.join(per_kind)} (rope_parameters)")
    plain = RopeConfig(
        dim=int(head_dim * rope.get("partial_rotary_factor", default_rotary_factor)),
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
    """RoPE keys of `rope_parameters` or the older `rope_scaling`. Keys missing there are read from the top level."""
    top_level = {key: config.values.get(key) for key in ("model_type", "rope_theta", "partial_rotary_factor")}
    return HFConfig({**top_level, **(config.get("rope_parameters", None) or config.get("rope_scaling", {}))})


def _yarn(config: HFConfig, rope: HFConfig, plain: RopeConfig) -> RopeConfig:
    """Reads YaRN scaling.

    transformers multiplies cos and sin by `attention_factor`. The default of this key is
    f(mscale) / f(mscale_all_dim) if both these keys are nonzero, otherwise f(1), where f(m) = 0.1 m ln(factor) + 1.
    """
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


def with_leading_dense(config: HFConfig) -> HFConfig:
    """Adds `first_k_dense_replace`, the number of leading dense layers, to a config that lists `mlp_layer_types`;
    returns other configs unchanged. Refuses dense layers after MoE layers."""
    dense = {"dense": True, "sparse": False}
    kinds = config.get("mlp_layer_types", None)
    if kinds is None:
        return config
    leading = sum(dense[kind] for kind in kinds)
    config.refuse_if(any(dense[kind] for kind in kinds[leading:]), "has dense layers after experts")
    return HFConfig({**config.values, "first_k_dense_replace": leading})


def read_indexer(config: HFConfig, rope: RopeConfig, norm: NormConfig) -> IndexerConfig:
    return IndexerConfig(
        num_heads=config.integer("index_n_heads"),
        head_dim=config.integer("index_head_dim"),
        topk=config.integer("index_topk"),
        # the Hadamard rotation does not change q k^T
        rotate_activation=has_hadamard_matrix(config.integer("index_head_dim")),
        rope=rope,
        norm=norm,
    )


def indexer_types(config: HFConfig, num_layers: int) -> Sequence[str]:
    """Kind of every layer: "full" or "F" with an indexer, "shared" or "S" without one."""
    freq, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    usual = ["shared" if layer_reuses_topk(layer, freq, offset) else "full" for layer in range(num_layers)]
    return config.get("indexer_types", None) or config.get("index_topk_pattern", None) or usual
