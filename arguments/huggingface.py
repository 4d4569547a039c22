"""Derives flags from a Hugging Face config.json (`--from-hf-config`) or compares them (`--check-against-hf`)."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arguments import derive
from arguments.checks.run import MODEL_RULES, broken_rules, missing_flags
from arguments.errors import FlagErrors, Problem
from arguments.flag import REQUIRED
from arguments.flags import Flags, Registry, flag_values
from arguments.parser import Given, Settings, merge_settings
from arguments.resolve_model import model_config
from arguments.values import LayerPattern, words_of
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf, with_latent_norms_of
from megatron_moe.checkpoint.huggingface.config_write import NoPublishedFamily, generated_config
from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, RopeConfig, SoftmaxMixerConfig
from megatron_moe.config.component import Component
from megatron_moe.config.exit_codes import CheckpointProblem, ExitCode, RunError
from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.config.mamba import MambaConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.model_differences import differences
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.text import aligned

_MAX_PERIOD = 8
"""Largest interval n (every n-th layer) that `_pattern` tries; other patterns are written as lists."""


def model_flags(model: ModelConfig) -> dict[str, Any]:
    """Returns flag name -> value for the flags that describe a model."""
    first = model.layers[0]
    moe = next(iter(model.moe_configs), None)
    dense = next((layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MLPConfig)), None)
    blocks = [block for block in (dense, moe.experts if moe else None) if block]
    biased = any(block.bias for block in blocks)
    return {
        "num_layers": len(model.layers),
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "hidden_dropout": first.hidden_dropout,
        "apply_residual_connection_post_layernorm": first.residual_from_norm,
        "init_method_std": model.init.std,
        "mtp_num_layers": model.mtp.num_layers if model.mtp else None,
        "add_bias_linear": biased,
        "ffn_hidden_size": dense.ffn_hidden_size if dense else None,
        "normalization": first.norm.kind,
        "norm_epsilon": first.norm.eps,
        "apply_layernorm_1p": first.norm.zero_centered,
        **_activation(blocks[0].activation),
        **_mixer(model, biased),
        **(_moe(moe, model.layers) if moe else {"num_experts": None}),
    }


def described(model: ModelConfig) -> ModelConfig:
    """Rebuilds a model from its `model_flags`. Properties that no flag describes are reset to their defaults."""
    values = model_flags(model)
    return model_config(_flags(values), values["vocab_size"])


def _flags(values: Mapping[str, Any]) -> Flags:
    """Returns all flags: `values`, defaults for the other flags, and 1 for required flags that are not in `values`."""
    flags = Registry.declared().flags.values()
    defaults = {flag.name: 1 if flag.default is REQUIRED else flag.default for flag in flags}
    return flag_values({**defaults, **values})


_GATED, _PLAIN = ("silu", "quick_gelu", "gelu"), ("squared_relu", "gelu_tanh", "gelu")
_SWITCHED = (*((True, kind) for kind in _GATED), *((False, kind) for kind in _PLAIN))
"""(gated, kind) of the activations that have a switch, or are the default."""


def _activation(activation: ActivationConfig) -> dict[str, Any]:
    kind, gated = activation.kind, activation.gated
    return {
        "swiglu": gated and kind == "silu",
        "quick_geglu": gated and kind == "quick_gelu",
        "geglu": gated and kind == "gelu",
        "squared_relu": not gated and kind == "squared_relu",
        "openai_gelu": not gated and kind == "gelu_tanh",
        "activation_func": None if (gated, kind) in _SWITCHED else kind,
        "gated_linear_unit": gated and (gated, kind) not in _SWITCHED,
        "glu_linear_offset": activation.linear_offset,
        "activation_func_clamp_value": activation.clamp,
    }


def _mixer(model: ModelConfig, biased: bool) -> dict[str, Any]:
    mixer = next((layer.mixer for layer in model.layers if isinstance(layer.mixer, SoftmaxMixerConfig)), None)
    assert isinstance(mixer, AttentionConfig | MLAConfig), f"no flags describe {mixer}"
    latent = isinstance(mixer, MLAConfig)
    kind = "learned_absolute" if model.position_embedding == "learned_absolute" else "none"
    rotations = [rope for layer in model.layers for rope in layer.mixer.rotary_tables]
    windows = [layer.mixer.core.window for layer in model.layers if isinstance(layer.mixer, SoftmaxMixerConfig)]
    return {
        "num_attention_heads": mixer.num_heads,
        "multi_latent_attention": latent,
        "position_embedding_type": kind,
        **_core(mixer.core, windows),
        **(_latent(mixer) if isinstance(mixer, MLAConfig) else _grouped(mixer, biased)),
        **(_rotation(rotations[0], mixer) if rotations else {}),
        **({} if latent or not rotations else _unrotated(model.layers)),
        **_other_mixers(model.layers),
    }


def _other_mixers(layers: Sequence[LayerConfig]) -> dict[str, Any]:
    """Flags of layers with linear attention, and of layers with one module."""
    found: dict[str, Any] = {}
    mixers = [layer.mixer for layer in layers]
    delta_net = next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaNetConfig)), None)
    mamba = next((mixer for mixer in mixers if isinstance(mixer, MambaConfig)), None)
    if delta_net is not None:
        found |= {
            "linear_num_key_heads": delta_net.num_key_heads,
            "linear_num_value_heads": delta_net.num_value_heads,
            "linear_key_head_dim": delta_net.key_head_dim,
            "linear_value_head_dim": delta_net.value_head_dim,
            "linear_conv_kernel_dim": delta_net.conv_width,
        }
    if mamba is not None:
        found |= {
            "mamba_num_groups": mamba.num_key_heads,
            "mamba_num_heads": mamba.num_value_heads,
            "mamba_state_dim": mamba.key_head_dim,
            "mamba_head_dim": mamba.value_head_dim,
        }
    if mamba is not None or any(len(layer.sublayers) < 2 for layer in layers):
        feed_forwards = [layer.feed_forward for layer in layers]
        found |= {"mixer": tuple(map(_name_of, mixers)), "feed_forward": tuple(map(_name_of, feed_forwards))}
    elif delta_net is not None:
        is_linear = tuple(isinstance(mixer, GatedDeltaNetConfig) for mixer in mixers)
        variant = "gated_delta_net"
        pattern = _pattern(is_linear, lambda every: derive.linear_layers(len(layers), variant, every))
        found |= {"experimental_attention_variant": variant, "linear_attention_freq": pattern}
    return found


def _name_of(component: Component) -> str:
    """Value of `--mixer` or `--feed-forward` that selects a component."""
    names = {MambaConfig: "mamba", GatedDeltaNetConfig: "gated_delta_net", MLPConfig: "mlp", MoEConfig: "moe"}
    return names.get(type(component), "auto") if component.present else "none"


def _core(core: CoreAttentionConfig, windows: Sequence[tuple[int, int] | None]) -> dict[str, Any]:
    window = next((window for window in windows if window), None)
    pattern: LayerPattern | None = None
    if window and not all(windows):
        present = tuple(window is not None for window in windows)
        pattern = _pattern(present, lambda every: derive.windowed_layers(len(windows), window, every))
    return {
        "attention_dropout": core.dropout,
        "softmax_type": "learnable" if core.sinks else "off-by-one" if core.off_by_one else "vanilla",
        "window_size": window,
        "window_attn_skip_freq": pattern,
    }


def _grouped(mixer: AttentionConfig, biased: bool) -> dict[str, Any]:
    grouped = mixer.num_query_groups != mixer.num_heads
    return {
        "group_query_attention": grouped,
        "num_query_groups": mixer.num_query_groups if grouped else 1,
        "kv_channels": mixer.head_dim,
        "qk_layernorm": mixer.qk_norm in ("per_head", "full"),
        "qk_l2_norm": mixer.qk_norm == "l2",
        "qk_layernorm_over": "all-heads" if mixer.qk_norm == "full" else "head",
        "add_qkv_bias": mixer.qkv_bias and not biased,
        "attention_output_gate": mixer.output_gate,
    }


def _latent(mixer: MLAConfig) -> dict[str, Any]:
    return {
        "q_lora_rank": mixer.q_lora_rank,
        "kv_lora_rank": mixer.kv_lora_rank,
        "qk_head_dim": mixer.qk_head_dim,
        "qk_pos_emb_head_dim": mixer.qk_rope_dim,
        "v_head_dim": mixer.v_head_dim,
        "qk_layernorm": mixer.qk_norm,
    }


def _rotation(rope: RopeConfig, mixer: AttentionConfig | MLAConfig) -> dict[str, Any]:
    latent, yarn = isinstance(mixer, MLAConfig), rope.scaling == "yarn"
    found: dict[str, Any] = {
        "position_embedding_type": "yarn" if yarn and not latent else "rope",
        "rotary_base": rope.base,
        "use_rope_scaling": rope.scaling == "llama3",
    }
    if isinstance(mixer, MLAConfig):
        found |= {"rope_type": "yarn" if yarn else "rope"}
    else:
        found |= {"rotary_percent": rope.dim / mixer.head_dim, "rotary_interleaved": rope.interleaved}
    if rope.scaling == "llama3":
        found |= {"rope_scaling_factor": rope.scaling_factor}
    if rope.scaling == "linear":
        found |= {"rotary_seq_len_interpolation_factor": round(rope.scaling_factor)}
    return found | (_yarn(rope, latent) if yarn else {})


def _yarn(rope: RopeConfig, latent: bool) -> dict[str, Any]:
    """YaRN flags of `rope`. Hugging Face's default attention factor is written as mscale 1 and mscale_all_dim 0."""
    length = "original_max_position_embeddings" if latent else "yarn_original_max_position_embeddings"
    return {
        "rotary_scaling_factor": rope.scaling_factor,
        length: rope.original_max_positions,
        "yarn_beta_fast": rope.beta_fast,
        "yarn_beta_slow": rope.beta_slow,
        "yarn_correction_range_round_to_int": rope.truncate,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


def _unrotated(layers: Sequence[LayerConfig]) -> dict[str, Any]:
    softmax = (isinstance(layer.mixer, SoftmaxMixerConfig) for layer in layers)
    rotated = tuple(not has or bool(layer.mixer.rotary_tables) for layer, has in zip(layers, softmax, strict=True))
    if all(rotated):
        return {"no_rope_freq": None}
    pattern = _pattern(rotated, lambda every: derive.rotated_layers(len(layers), every))
    # a list has 1 for each layer without rotary embedding
    return {"no_rope_freq": pattern if isinstance(pattern, int) else tuple(1 - entry for entry in pattern)}


def _pattern(present: tuple[bool, ...], layers_of: Callable[[int], tuple[bool, ...]]) -> LayerPattern:
    """Writes `present` as the smallest interval n with `layers_of(n) == present`, else as a tuple of 0s and 1s."""
    periods = (every for every in range(1, _MAX_PERIOD + 1) if layers_of(every) == present)
    return next(periods, tuple(map(int, present)))


def _moe(moe: MoEConfig, layers: Sequence[LayerConfig]) -> dict[str, Any]:
    router, experts = moe.router, moe.experts
    present = tuple(layer.is_moe for layer in layers)
    return {
        "num_experts": experts.num_experts,
        "moe_layer_freq": _pattern(present, lambda every: derive.moe_layers(len(layers), experts.num_experts, every)),
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": router.topk,
        "moe_router_score_function": router.score_function,
        "moe_router_pre_softmax": router.pre_softmax,
        "moe_router_num_groups": router.num_groups,
        "moe_router_group_topk": router.group_topk,
        "moe_router_topk_scaling_factor": router.scaling_factor,
        "moe_router_enable_expert_bias": router.expert_bias,
        "moe_router_dtype": router.dtype,
        "moe_latent_size": moe.latent_size,
        "moe_apply_probs_on_input": experts.probs_on_input,
        "moe_shared_expert_intermediate_size": moe.shared.mlp.ffn_hidden_size if moe.shared else None,
        "moe_shared_expert_gate": moe.shared is not None and moe.shared.gate,
    }


_MODEL_GROUPS = ("model", "attention", "moe")
TRAINING_FLAGS = (
    *("attention_dropout", "hidden_dropout", "init_method_std"),
    *("max_position_embeddings", "mtp_num_layers", "vocab_size"),
)
"""Flags in which a run may differ from the published model and still use its published layer weights."""
_HEADINGS = ("flag", "this run", "published")


class AnotherModel(RunError):
    """The flags and the Hugging Face folder describe different models; `str()` is a table of the differences."""

    code = ExitCode.CONFIG


def published_flags(folder: str, registry: Registry) -> tuple[list[Given], list[str]]:
    """Returns the flags that describe the model in a Hugging Face folder, and notes on properties without a flag.

    A different epsilon of MLA's latent norms is only noted, because published weights work with either value.

    Raises FlagErrors if config.json cannot be read, describes a model that cannot be built, or has any other property
    that no flag describes.
    """
    path = _config_path(folder)
    published = _published(path)
    layer = []
    for name, value in model_flags(published).items():
        flag = registry.flags[name]
        if value != flag.default:
            words = None if value is None else tuple(words_of(flag.type, value))
            layer.append(Given(flag.option, words, str(path)))
    expressed = described(published)
    remedy = "correct config.json, or give the model flags without --from-hf-config"
    unsupported = differences(expressed, with_latent_norms_of(expressed, published))
    if unsupported:
        raise FlagErrors([Problem(what=f"{path}: no flag describes its {line}", remedy=remedy) for line in unsupported])
    return layer, [f"{path}: no flag for: {line}" for line in differences(expressed, published)]


def described_with(layer: Sequence[Given], more: Given | None, registry: Registry) -> ModelConfig | None:
    """Model of `published_flags`, with one flag changed; None if the flags describe none."""
    settings = merge_settings(registry, [layer, [more] if more else []])
    flags = _flags({name: setting.value for name, setting in settings.values.items()})
    try:
        return None if settings.problems else model_config(flags, flags.vocab_size or 1)
    except (AssertionError, ValueError, ArithmeticError, TypeError):
        return None


def exported_config(model: ModelConfig, vocab_size: int, registry: Registry) -> dict[str, Any]:
    """Contents of a config.json that describes the model. Raises FlagErrors that name the flags if there is none."""
    try:
        return generated_config(model, vocab_size)
    except NoPublishedFamily as problem:
        rows = [] if problem.nearest is None else _differing_flags(registry, model, problem.nearest)
        others = [row for row in rows if row[0] not in _training_options(registry)]
        table = "\n" + _table(others) if others else ""
        remedy = "an export needs a model that transformers can load, or --hf-config (--save-hf-config) with its code"
        raise FlagErrors.of(f"{problem}{table}", remedy) from None


def _training_options(registry: Registry) -> set[str]:
    return {registry.flags[name].option for name in TRAINING_FLAGS}


def compared_with(folder: str, settings: Settings) -> str:
    """Compares the model of the flags with the model of a Hugging Face folder; returns a message if they are equal.

    Raises AnotherModel with a table of the differences, or FlagErrors if config.json or the flags are invalid.
    """
    path = _config_path(folder)
    published = _published(path)
    own = _model_of(settings, published.vocab_size)
    lines = differences(own, published)
    rows = _differing_flags(settings.registry, own, published)
    if not lines:
        training = _training_options(settings.registry)
        others = _table([row for row in rows if row[0] in training])
        return f"The flags describe the model of {path}." + (f" Choices of this run:\n{others}" if others else "")
    count = f"1 difference from {path}:" if len(lines) == 1 else f"{len(lines)} differences from {path}:"
    parts = [count, *(f"  {line}" for line in lines)]
    if rows:
        parts += ["", "In flags:", _table(rows)]
    raise AnotherModel("\n".join(parts))


def _config_path(folder: str) -> Path:
    path = Path(folder)
    return path if path.suffix == ".json" else path / "config.json"


def _published(path: Path) -> ModelConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise FlagErrors.of(what, "give the folder that contains config.json") from None
    except (ValueError, RecursionError) as error:
        raise FlagErrors.of(f"{path} is not JSON: {error}", "download the file again") from None
    if not isinstance(values, dict):
        raise FlagErrors.of(f"{path} is not a JSON object", "download the file again")
    try:
        return model_config_from_hf(values, mtp=True)
    except CheckpointProblem as error:
        raise FlagErrors.of(f"{path}: {error}") from None


def _model_of(settings: Settings, vocab_size: int) -> ModelConfig:
    """Model described by the model flags in `settings`; `vocab_size` is used if `--vocab-size` is not given."""
    missing = [problem for problem in missing_flags(settings, _MODEL_GROUPS) if "--seq-length" not in problem.what]
    problems = [*settings.problems, *missing, *broken_rules(settings, ProcessInfo(), MODEL_RULES, _MODEL_GROUPS)]
    if problems:
        raise FlagErrors(problems)
    flags = _flags({name: setting.value for name, setting in settings.values.items()})
    return model_config(flags, flags.vocab_size or vocab_size)


def _differing_flags(registry: Registry, own: ModelConfig, published: ModelConfig) -> list[tuple[str, str, str]]:
    own_by_name, published_by_name = model_flags(own), model_flags(published)
    rows = []
    for name in {**published_by_name, **own_by_name}:
        flag = registry.flags[name]
        run, published_value = (flag.text(side.get(name, flag.default)) for side in (own_by_name, published_by_name))
        if run != published_value:
            rows.append((flag.option, run, published_value))
    return rows


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    return "\n".join(f"  {line}" for line in aligned([_HEADINGS, *rows]))
