"""Generates the config.json of a model. The transformers model family is determined by a round trip: a candidate's
config.json is generated from the model and read back, and must describe the same computation. Families are tried in the
order of `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_moe.checkpoint.huggingface.config_deepseek_v4 import DEFAULT_RATES, HASH, HEAVY, ROUTED, SPARSE, WINDOW
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf, with_latent_norms_of
from megatron_moe.config.attention import AttentionConfig, RopeConfig, SoftmaxMixerConfig
from megatron_moe.config.compressed_attention import CompressedAttentionConfig
from megatron_moe.config.dsa import DSAConfig
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.kimi_delta_attention import KimiDeltaAttentionConfig
from megatron_moe.config.linear_attention import LinearAttentionConfig
from megatron_moe.config.mamba import MambaConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import MLPConfig
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.model_differences import config_differences
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.text import listed

Values = dict[str, Any]


class _NoFamily(Exception):
    """Raised if a family has no key for a property of the model."""


class NoPublishedFamily(CheckpointProblem):
    """Raised if no family describes the model. `nearest`: the model of the family with the fewest differences, if
    any."""

    nearest: ModelConfig | None = None


class Family(NamedTuple):
    """Model family of the transformers library to which a model can be exported."""

    architecture: str
    """Class name in transformers that loads the folder."""
    write: Callable[[ModelConfig, MoEConfig], Values]
    """Function that returns the keys of config.json that `_common` does not contain. It may raise `_NoFamily`,
    AttributeError or TypeError."""


def generated_config(model: ModelConfig, vocab_size: int) -> Values:
    """Contents of a config.json that describes the model, whose first `vocab_size` rows are those of the tokenizer.

    Raises NoPublishedFamily if no family of transformers computes this model.
    """
    found: list[tuple[str, list[str], ModelConfig]] = []
    for model_type, family in FAMILIES.items():
        try:
            own = family.write(model, model.moe_configs[0])
            values = {"architectures": [family.architecture], "model_type": model_type}
            values |= {**_common(model, vocab_size), **own}
            published = model_config_from_hf(values, mtp=model.mtp is not None)
        except (_NoFamily, AttributeError, TypeError, IndexError, CheckpointProblem):
            continue
        lines = config_differences(model, with_latent_norms_of(model, published))
        if not lines:
            return values
        found.append((model_type, lines, published))
    if not found:
        raise NoPublishedFamily("no model family of transformers has the layers of this model")
    model_type, lines, nearest = min(found, key=lambda each: len(each[1]))
    problem = NoPublishedFamily(
        f"no model family of transformers computes this model; the nearest, {model_type}, differs:\n  {listed(lines)}"
    )
    problem.nearest = nearest
    raise problem


def _common(model: ModelConfig, vocab_size: int) -> Values:
    """Keys of config.json that all families share."""
    first, moe = model.layers[0], model.moe_configs[0]
    return {
        "hidden_size": model.hidden_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": len(model.layers),
        "num_experts_per_tok": moe.router.topk,
        "max_position_embeddings": model.max_positions,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init.std,
        "rms_norm_eps": first.norm.eps,
        "hidden_act": "silu",
        "router_aux_loss_coef": max(moe.router.aux_loss_coeffs, default=0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _softmax_mixers(model: ModelConfig) -> list[SoftmaxMixerConfig]:
    """Mixers of the layers with softmax attention."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, SoftmaxMixerConfig)]
    if not mixers:
        raise _NoFamily
    return mixers


def _heads(mixer: SoftmaxMixerConfig) -> Values:
    return {"num_attention_heads": mixer.num_heads, "attention_dropout": mixer.core.dropout}


def _rope(rope: RopeConfig | None) -> Values:
    """Keys of rotary embeddings, which every family has. A model without them differs from the generated config, and
    the resulting error message names the flags."""
    if rope is None:
        return {}
    scaling: Values = {"rope_type": rope.scaling, "factor": rope.scaling_factor}
    if rope.scaling == "none":
        return {"rope_theta": rope.base}
    if rope.scaling != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
        scaling |= {} if rope.concentration is None else {"attention_factor": rope.concentration}
    return {"rope_theta": rope.base, "rope_scaling": scaling}


def _grouped(model: ModelConfig) -> tuple[AttentionConfig, Values]:
    """Returns (attention of the first layer that has it, preferably with a window; its keys of config.json)."""
    mixers = _softmax_mixers(model)
    mixer = next((each for each in mixers if each.core.window), mixers[0])
    if not isinstance(mixer, AttentionConfig):
        raise _NoFamily
    keys = {"num_key_value_heads": mixer.num_query_groups, "head_dim": mixer.head_dim}
    return mixer, {**_heads(mixer), **keys, **_rope(mixer.rope)}


def _linear(model: ModelConfig, kind: type[LinearAttentionConfig]) -> LinearAttentionConfig:
    """First linear-attention mixer of the given kind."""
    mixer = next((layer.mixer for layer in model.layers if isinstance(layer.mixer, kind)), None)
    if mixer is None:
        raise _NoFamily
    return mixer


def _dense(model: ModelConfig) -> tuple[list[int], MLPConfig | None]:
    """Returns (indices of the dense layers, config of their MLP or None)."""
    blocks = [layer.feed_forward for layer in model.layers]
    dense = [index for index, block in enumerate(blocks) if isinstance(block, MLPConfig)]
    first = blocks[dense[0]] if dense else None
    return dense, first if isinstance(first, MLPConfig) else None


def _window(mixer: AttentionConfig) -> int | None:
    return mixer.core.window[0] + 1 if mixer.core.window else None


def _window_kinds(model: ModelConfig) -> list[str]:
    return ["sliding_attention" if mixer.core.window else "full_attention" for mixer in _softmax_mixers(model)]


def _mixtral(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _grouped(model)
    experts = {"num_local_experts": moe.experts.num_experts, "intermediate_size": moe.experts.ffn_hidden_size}
    return {**keys, **experts, "sliding_window": _window(mixer)}


def _softmax(model: ModelConfig, moe: MoEConfig) -> Values:
    """Keys of config.json for Qwen's MoE layers and the dense layers between them."""
    dense, mlp = _dense(model)
    return {
        "num_experts": moe.experts.num_experts,
        "moe_intermediate_size": moe.experts.ffn_hidden_size,
        "intermediate_size": mlp.ffn_hidden_size if mlp else moe.experts.ffn_hidden_size * moe.router.topk,
        "norm_topk_prob": not moe.router.pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _qwen3_moe(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _grouped(model)
    windowed = {"use_sliding_window": mixer.core.window is not None, "sliding_window": _window(mixer)}
    windowed |= {"max_window_layers": 0}
    return {**keys, **_softmax(model, moe), **windowed, "attention_bias": mixer.qkv_bias}


def _qwen3_next(model: ModelConfig, moe: MoEConfig) -> Values:
    (mixer, keys), linear = _grouped(model), _linear(model, GatedDeltaNetConfig)
    if moe.shared is None or mixer.rope is None:
        raise _NoFamily
    is_linear = [isinstance(layer.mixer, GatedDeltaNetConfig) for layer in model.layers]
    return {
        **keys,
        **_softmax(model, moe),
        "shared_expert_intermediate_size": moe.shared.mlp.ffn_hidden_size,
        "attention_bias": mixer.qkv_bias,
        "partial_rotary_factor": mixer.rope.dim / mixer.head_dim,
        "layer_types": ["linear_attention" if each else "full_attention" for each in is_linear],
        "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads,
        "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim,
        "linear_conv_kernel_dim": linear.conv_width,
    }


def _module_kinds(layer: LayerConfig) -> list[str]:
    """Nemotron's names for the modules of each layer."""
    of_mixer = "linear_attention" if isinstance(layer.mixer, MambaConfig) else "full_attention"
    of_feed_forward = "moe" if layer.is_moe else "mlp"
    return [of_mixer] * layer.mixer.present + [of_feed_forward] * layer.feed_forward.present


def _nemotron_h(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, mamba = _softmax_mixers(model)[0], _linear(model, MambaConfig)
    _, mlp = _dense(model)
    if not isinstance(mixer, AttentionConfig) or moe.shared is None:
        raise _NoFamily
    kinds = [kind for layer in model.layers for kind in _module_kinds(layer)]
    depth = {"num_nextn_predict_layers": model.num_mtp, "mtp_layers_block_type": _module_kinds(model.mtp_layer)}
    return {
        **_heads(mixer),
        "layers_block_type": kinds,
        **(depth if model.mtp else {}),
        "num_key_value_heads": mixer.num_query_groups,
        "head_dim": mixer.head_dim,
        "layer_norm_epsilon": model.norm.eps,
        "mlp_hidden_act": "relu2",
        "n_groups": mamba.num_key_heads,
        "mamba_num_heads": mamba.num_value_heads,
        "mamba_head_dim": mamba.value_head_dim,
        "ssm_state_size": mamba.key_head_dim,
        "conv_kernel": mamba.conv_width,
        "time_step_min": 1e-12,  # lower bound of time steps in transformers, which this model does not have
        "n_routed_experts": moe.experts.num_experts,
        "moe_intermediate_size": moe.experts.ffn_hidden_size,
        "intermediate_size": mlp.ffn_hidden_size if mlp else moe.experts.ffn_hidden_size,
        "moe_latent_size": moe.latent_size,
        "moe_shared_expert_intermediate_size": moe.shared.mlp.ffn_hidden_size,
        "n_shared_experts": 1,
        "n_group": moe.router.num_groups or 1,
        "topk_group": moe.router.group_topk or 1,
        "routed_scaling_factor": moe.router.scaling_factor or 1.0,
        "norm_topk_prob": moe.router.topk > 1,
    }


def _qwen2_moe(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _grouped(model)
    if moe.shared is None or keys.pop("head_dim") * mixer.num_heads != model.hidden_size:
        raise _NoFamily
    shared = {"shared_expert_intermediate_size": moe.shared.mlp.ffn_hidden_size, "qkv_bias": mixer.qkv_bias}
    return {**keys, **_softmax(model, moe), **shared}


def _olmoe(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _grouped(model)
    if keys.pop("head_dim") * mixer.num_heads != model.hidden_size:
        raise _NoFamily
    experts = {"num_experts": moe.experts.num_experts, "intermediate_size": moe.experts.ffn_hidden_size}
    return {**keys, **experts, "norm_topk_prob": not moe.router.pre_softmax, "attention_bias": mixer.qkv_bias}


def _gpt_oss(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _grouped(model)
    return {
        **keys,
        "num_local_experts": moe.experts.num_experts,
        "intermediate_size": moe.experts.ffn_hidden_size,
        "swiglu_limit": moe.experts.activation.clamp,
        "attention_bias": mixer.qkv_bias,
        "sliding_window": _window(mixer),
        "layer_types": _window_kinds(model),
    }


def _sigmoid(model: ModelConfig, moe: MoEConfig) -> Values:
    """Keys of config.json for the MoE layers of DeepSeek and GLM and the dense layers before them."""
    dense, mlp = _dense(model)
    leading = list(takewhile(lambda index: index in dense, range(len(model.layers))))
    if dense != leading:
        raise _NoFamily
    width, shared = moe.experts.ffn_hidden_size, moe.shared.mlp.ffn_hidden_size if moe.shared else 0
    if shared % width:
        raise _NoFamily
    return {
        "n_routed_experts": moe.experts.num_experts,
        "n_shared_experts": shared // width,  # 0 without them: transformers rejects null
        "moe_intermediate_size": width,
        "intermediate_size": mlp.ffn_hidden_size if mlp else width * moe.router.topk,
        "first_k_dense_replace": len(dense),
        "n_group": moe.router.num_groups or 1,
        "topk_group": moe.router.group_topk or 1,
        "routed_scaling_factor": moe.router.scaling_factor or 1.0,
        "norm_topk_prob": moe.router.score_function == "sigmoid" and moe.router.topk > 1,
        "aux_loss_alpha": max(moe.router.aux_loss_coeffs, default=0.0),
        "seq_aux": "seq_aux_loss" in moe.router.balancing,
    }


def _glm4_moe(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _grouped(model)
    if mixer.rope is None:
        raise _NoFamily
    options = {"use_qk_norm": mixer.qk_norm == "per_head", "attention_bias": mixer.qkv_bias}
    return {**keys, **_sigmoid(model, moe), **options, "partial_rotary_factor": mixer.rope.dim / mixer.head_dim}


def _dots1(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _grouped(model)
    options = {"attention_bias": mixer.qkv_bias, "sliding_window": _window(mixer)}
    return {**keys, **_sigmoid(model, moe), **options, "layer_types": _window_kinds(model)}


def _ernie4_5_moe(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _grouped(model)
    (dense, mlp), width = _dense(model), moe.experts.ffn_hidden_size
    routed = [index for index in range(len(model.layers)) if index not in dense]
    shared = moe.shared.mlp.ffn_hidden_size if moe.shared else 0
    if keys.pop("head_dim") * mixer.num_heads != model.hidden_size or shared % width:
        raise _NoFamily
    return {
        **keys,
        "use_bias": mixer.qkv_bias,
        "moe_k": moe.router.topk,
        "moe_num_experts": moe.experts.num_experts,
        "moe_num_shared_experts": shared // width,
        "moe_intermediate_size": width,
        "intermediate_size": mlp.ffn_hidden_size if mlp else width * moe.router.topk,
        "moe_layer_start_index": routed[0],
        "moe_layer_end_index": routed[-1],
        "moe_layer_interval": routed[1] - routed[0] if len(routed) > 1 else 1,
    }


def _minimax_m2(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _grouped(model)
    if mixer.rope is None:
        raise _NoFamily
    experts = {"num_local_experts": moe.experts.num_experts, "intermediate_size": moe.experts.ffn_hidden_size}
    return {**keys, **experts, "partial_rotary_factor": mixer.rope.dim / mixer.head_dim}


def _latent(model: ModelConfig, moe: MoEConfig) -> tuple[MLAConfig, Values]:
    mixer = _softmax_mixers(model)[0]
    if not isinstance(mixer, MLAConfig):
        raise _NoFamily
    return mixer, {
        **_sigmoid(model, moe),
        **_heads(mixer),
        "num_key_value_heads": mixer.num_heads,
        "q_lora_rank": mixer.q_lora_rank,
        "kv_lora_rank": mixer.kv_lora_rank,
        "qk_nope_head_dim": mixer.qk_head_dim,
        "qk_rope_head_dim": mixer.qk_rope_dim,
        "v_head_dim": mixer.v_head_dim,
        "moe_layer_freq": 1,
        **_rope(mixer.rope),
    }


def _deepseek_v3(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _latent(model, moe)
    interleaved = mixer.rope is not None and mixer.rope.interleaved
    return {**keys, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": interleaved}


def _deepseek_v2(model: ModelConfig, moe: MoEConfig) -> Values:
    _, keys = _latent(model, moe)
    method = "group_limited_greedy" if (moe.router.num_groups or 1) > 1 else "greedy"
    return {**keys, "scoring_func": "softmax", "topk_method": method}


def _kimi_linear(model: ModelConfig, moe: MoEConfig) -> Values:
    """Keys of published config files, which transformers reads too."""
    _, keys = _latent(model, moe)
    linear = _linear(model, KimiDeltaAttentionConfig)
    numbers: dict[bool, list[int]] = {True: [], False: []}
    for number, layer in enumerate(model.layers, start=1):
        numbers[isinstance(layer.mixer, KimiDeltaAttentionConfig)].append(number)
    return {
        **keys,
        "linear_attn_config": {
            "full_attn_layers": numbers[False],
            "kda_layers": numbers[True],
            "head_dim": linear.key_head_dim,
            "num_heads": linear.num_key_heads,
            "short_conv_kernel_size": linear.conv_width,
        },
        "mla_use_nope": True,
        "model_max_length": model.max_positions,
        "moe_renormalize": keys["norm_topk_prob"],
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": keys["n_group"],
        "num_experts": keys["n_routed_experts"],
        "num_experts_per_token": moe.router.topk,
        "num_shared_experts": keys["n_shared_experts"],
    }


def _indexed(model: ModelConfig, moe: MoEConfig) -> Values:
    mixer, keys = _latent(model, moe)
    if not isinstance(mixer, DSAConfig):
        raise _NoFamily
    indexer, num_dense = mixer.indexer, len(_dense(model)[0])
    return {
        **keys,
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.topk,
        "mlp_layer_types": ["dense"] * num_dense + ["sparse"] * (len(model.layers) - num_dense),
    }


def _glm_moe_dsa(model: ModelConfig, moe: MoEConfig) -> Values:
    shares = [isinstance(layer.mixer, DSAConfig) and layer.mixer.reuses_topk for layer in model.layers]
    return {**_indexed(model, moe), "indexer_types": ["shared" if each else "full" for each in shares]}


def _deepseek_v4(model: ModelConfig, moe: MoEConfig) -> Values:
    """Keys of published config files and of config files that transformers writes."""
    layers = (*model.layers, model.mtp_layer) if model.mtp else model.layers
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, CompressedAttentionConfig)]
    streams = model.residual
    if len(mixers) != len(layers) or not isinstance(streams, HyperConnectionsConfig):
        raise _NoFamily
    first, by_id = mixers[0], [each.router.hash_vocab_size is not None for each in model.moe_configs]
    ratios = [mixer.ratio for mixer in mixers]
    heavy = max((ratio for ratio in ratios if ratio != DEFAULT_RATES[SPARSE]), default=0) or DEFAULT_RATES[HEAVY]
    rates = {**DEFAULT_RATES, HEAVY: heavy}
    kinds = {0: WINDOW, **{rate: kind for kind, rate in rates.items()}}
    # rotary embedding of layers without compressed entries, and of layers with them; if there are no such layers, that
    # of the others
    main, compress = (max(mixers, key=lambda mixer: bool(mixer.ratio) == has).rope for has in (False, True))
    factor = {"partial_rotary_factor": first.rope.dim / first.head_dim}
    indexer = next((mixer.indexer for mixer in mixers if mixer.indexer), None)
    sizes = {"n_heads": indexer.num_heads, "head_dim": indexer.head_dim, "topk": indexer.topk} if indexer else {}
    return {
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": 1,
        "head_dim": first.head_dim,
        "q_lora_rank": first.q_lora_rank,
        "qk_rope_head_dim": first.rope.dim,
        **factor,
        "rope_theta": main.base,
        "compress_rope_theta": compress.base,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": main.base, **factor},
            "compress": {"rope_type": "default", **_flat_rope(compress), **factor},
        },
        "sliding_window": first.csa_window_size,
        "o_groups": first.o_groups,
        "o_lora_rank": first.o_lora_rank,
        "layer_types": [kinds.get(ratio) for ratio in ratios[: len(model.layers)]],
        "compress_rates": rates,
        "compress_ratios": ratios,
        **{f"index_{name}": size for name, size in sizes.items()},
        "hc_mult": streams.num_streams,
        "hc_sinkhorn_iters": streams.sinkhorn_iterations,
        "hc_eps": streams.eps,
        "mlp_layer_types": [HASH if each else ROUTED for each in by_id],
        "num_hash_layers": sum(by_id),
        "n_routed_experts": moe.experts.num_experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": moe.experts.ffn_hidden_size,
        "swiglu_limit": moe.experts.activation.clamp,
        "scoring_func": moe.router.score_function,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": moe.router.scaling_factor or 1.0,
        "num_nextn_predict_layers": model.num_mtp,
    }


def _flat_rope(rope: RopeConfig) -> Values:
    keys = _rope(rope)
    return {"rope_theta": keys["rope_theta"], **keys.get("rope_scaling", {})}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "mixtral": Family("MixtralForCausalLM", _mixtral),
        "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe),
        "qwen2_moe": Family("Qwen2MoeForCausalLM", _qwen2_moe),
        "qwen3_next": Family("Qwen3NextForCausalLM", _qwen3_next),
        "nemotron_h": Family("NemotronHForCausalLM", _nemotron_h),
        "olmoe": Family("OlmoeForCausalLM", _olmoe),
        "gpt_oss": Family("GptOssForCausalLM", _gpt_oss),
        "glm4_moe": Family("Glm4MoeForCausalLM", _glm4_moe),
        "dots1": Family("Dots1ForCausalLM", _dots1),
        "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", _ernie4_5_moe),
        "minimax_m2": Family("MiniMaxM2ForCausalLM", _minimax_m2),
        "deepseek_v3": Family("DeepseekV3ForCausalLM", _deepseek_v3),
        "deepseek_v2": Family("DeepseekV2ForCausalLM", _deepseek_v2),
        "kimi_linear": Family("KimiLinearForCausalLM", _kimi_linear),
        "deepseek_v32": Family("DeepseekV32ForCausalLM", _indexed),
        "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", _glm_moe_dsa),
        "deepseek_v4": Family("DeepseekV4ForCausalLM", _deepseek_v4),
    }
)
"""Families by `model_type`, the most general ones first. Kimi K2 has no class in transformers and is written as
deepseek_v3."""
