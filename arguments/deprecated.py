"""Translates deprecated Megatron flags, and flags of other programs, to current flags."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from arguments.hybrid_pattern import depth_flags, pattern_flags
from arguments.values import BadValue, is_off, parse

Words = tuple[str, ...]
_RATIOS = ("--hybrid-attention-ratio", "--hybrid-mlp-ratio")
_LAYERS = "--num-layers with --mixer and --feed-forward and flags of pipeline stages and multi-token prediction"
_NUM_SMS = ("--moe-deepep-num-sms", "--moe-hybridep-num-sms")
ValueOf = Callable[[str], Any]
"""Function that maps the name of a current flag to its value, as set by the flags parsed so far."""


@dataclass(frozen=True)
class Translated:
    """Current flags that replace a deprecated one, or a short form."""

    flags: tuple[tuple[str, Words], ...]
    """(option, values) of each replacement; empty if the deprecated flag requests the default."""
    note: str
    """Predicate of a note whose subject is the old flag, such as "is now called --x"; empty if no note is needed."""
    extends: bool = False
    """True if the new values include the values that the flag already has; giving the flag twice is then no error."""


def translate(option: str, words: Sequence[str], value_of: ValueOf) -> Translated | None:
    """Translates a deprecated option; returns None if it is not deprecated.

    Raises:
        BadValue: the option or its value has no equivalent.
    """
    if option in _RENAMED:
        today = _RENAMED[option]
        return Translated(((today, tuple(words)),), f"is now called {today}")
    if option in _SWITCHES:
        return _switch(_SWITCHES[option], words)
    if option in _FOREIGN:
        raise BadValue(f"is not supported: {_FOREIGN[option]}")
    if option in _TRANSLATED:
        function, _ = _TRANSLATED[option]
        return function(words, value_of)
    return None


def old_names() -> dict[str, str]:
    """Maps each deprecated option to its replacement or the reason for its rejection, as text for the documentation."""
    switches = {old: _text(flags) for old, flags in _SWITCHES.items()}
    foreign = {old: f"rejected: {remedy}" for old, remedy in _FOREIGN.items()}
    translated = {old: current for old, (_, current) in _TRANSLATED.items()}
    return dict(sorted({**_RENAMED, **switches, **foreign, **translated}.items()))


def _text(flags: Sequence[tuple[str, Words]]) -> str:
    return " ".join(word for option, words in flags for word in (option, *words))


def _switch(flags: tuple[tuple[str, Words], ...], words: Sequence[str]) -> Translated:
    if words and not parse(bool, words):
        return Translated((), "is off, which is the default")
    return Translated(flags, f"is now written {_text(flags)}")


def _no_weight_decay_cond_type(words: Sequence[str], _: ValueOf) -> Translated:
    """Translates `--no-weight-decay-cond-type`. Raises BadValue for an unknown condition."""
    if tuple(words) not in (("apply_wd_to_qk_layernorm",), ("qwen3_next",)):
        raise BadValue(f"must be apply_wd_to_qk_layernorm or qwen3_next, not {' '.join(words)!r}")
    return Translated((("--apply-wd-to-qk-layernorm", ()),), "is now written --apply-wd-to-qk-layernorm")


def _hybrid_layer_pattern(words: Sequence[str], _: ValueOf) -> Translated:
    """Translates `--hybrid-layer-pattern`. Raises BadValue if the value is not a layer pattern."""
    return Translated(pattern_flags(words), "")


def _hybrid_override_pattern(words: Sequence[str], _: ValueOf) -> Translated:
    """Translates the old name of `--hybrid-layer-pattern`. Raises BadValue if the value is not a layer pattern."""
    return Translated(pattern_flags(words), "is now called --hybrid-layer-pattern")


def _mtp_hybrid_override_pattern(words: Sequence[str], _: ValueOf) -> Translated:
    """Translates the layer pattern of a multi-token prediction depth. Raises BadValue if the value is not a pattern."""
    return Translated(depth_flags(words), "is now part of --hybrid-layer-pattern, as in MEM*E/*E")


def _hybrid_ratio(words: Sequence[str], value_of: ValueOf) -> Translated:
    """Ignores a ratio of attention or MLP layers, because the layer pattern determines it. Raises BadValue without a
    pattern."""
    if parse(float, words) and "mamba" not in value_of("mixer"):
        raise BadValue("needs a --hybrid-layer-pattern, which determines the layers")
    return Translated((), "has no effect with --hybrid-layer-pattern")


def depends_on_other_flags(option: str, words: Sequence[str]) -> int:
    """Sort key of the order in which deprecated flags are translated. Flags with a key above 0 come last, because their
    translation reads or changes other flags."""
    if option in _RATIOS:
        return 2
    if option == "--cuda-graph-scope":
        return "full_iteration" in words
    if option in ("--hybrid-layer-pattern", "--hybrid-override-pattern", "--mtp-hybrid-override-pattern"):
        return 1
    return option in ("--moe-layer-recompute", "--error-injection-rate", "--moe-enable-deepep", *_NUM_SMS)


def _moe_enable_deepep(words: Sequence[str], value_of: ValueOf) -> Translated:
    """Translates `--moe-enable-deepep`. Raises BadValue if another library is selected."""
    if is_off(words):
        return Translated((), "is off, which is the default")
    if value_of("moe_flex_dispatcher_backend") == "hybridep":
        raise BadValue("selects deepep, but --moe-flex-dispatcher-backend is hybridep; remove one of them")
    flags = (("--moe-token-dispatcher-type", ("flex",)), ("--moe-flex-dispatcher-backend", ("deepep",)))
    return Translated(flags, f"is now written {_text(flags)}")


def _num_sms(words: Sequence[str], value_of: ValueOf) -> Translated:
    """Translates a library's number of SMs. Raises BadValue if the current flag has another value."""
    current = value_of("moe_flex_dispatcher_num_sms")
    if current is not None and current != parse(int, words):
        others = ", ".join(("--moe-flex-dispatcher-num-sms", *_NUM_SMS))
        raise BadValue(f"{words[0]} contradicts the value {current} of another flag; give only one of {others}")
    return Translated((("--moe-flex-dispatcher-num-sms", tuple(words)),), "is now called --moe-flex-dispatcher-num-sms")


def _cuda_graph_scope(words: Sequence[str], _: ValueOf) -> Translated:
    """Translates `--cuda-graph-scope`, whose value `full_iteration` is now an implementation."""
    if tuple(words) == ("full",):
        return Translated((), "full is the default: without --cuda-graph-modules all modules are captured")
    if "full_iteration" not in words:
        return Translated((("--cuda-graph-modules", tuple(words)),), "is now called --cuda-graph-modules")
    if len(words) > 1:
        raise BadValue("full_iteration cannot be combined with modules: leave them out, or use --cuda-graph-impl local")
    return Translated((("--cuda-graph-impl", tuple(words)),), "is now written --cuda-graph-impl full_iteration")


def _moe_layer_recompute(words: Sequence[str], value_of: ValueOf) -> Translated:
    """Translates `--moe-layer-recompute`. Raises BadValue if whole layers are recomputed."""
    if is_off(words):
        return Translated((), "is off, which is the default")
    if value_of("recompute_granularity") == "full":
        raise BadValue("adds moe to selective recompute, but --recompute-granularity is full; remove one of them")
    modules = tuple(dict.fromkeys((*(value_of("recompute_modules") or ("core_attn",)), "moe")))
    flags = (("--recompute-granularity", ("selective",)), ("--recompute-modules", modules))
    return Translated(flags, f"is now written {_text(flags)}", extends=True)


def _error_injection_rate(words: Sequence[str], value_of: ValueOf) -> Translated:
    """Translates `--error-injection-rate`, whose kind of fault is `--error-injection-type`."""
    rate = parse(int, words)
    if rate < 1:
        return Translated((), "is off, which is the default")
    kind = "nan-once" if value_of("error_injection_type") == "transient_error" else "nan-loss"
    flags = (("--inject", (*value_of("inject"), f"{kind}@0:{rate}")),)
    return Translated(flags, f"is now written {_text(flags)}", extends=True)


_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "--batch-size": "--micro-batch-size",
        "--model-parallel-size": "--tensor-model-parallel-size",
        "--encoder-num-layers": "--num-layers",
        "--encoder-seq-length": "--seq-length",
        "--moe-router-padding-for-fp8": "--moe-router-padding-for-quantization",
        "--moe-token-capacity-factor": "--moe-expert-capacity-factor",
        "--linear-attention-type": "--experimental-attention-variant",
        "--qk-nope-head-dim": "--qk-head-dim",
        "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
    }
)
_SWITCHES: Mapping[str, tuple[tuple[str, Words], ...]] = MappingProxyType(
    {
        "--use-rotary-position-embeddings": (("--position-embedding-type", ("rope",)),),
        "--recompute-activations": (("--recompute-granularity", ("selective",)),),
        "--enable-gpt-oss": (
            ("--position-embedding-type", ("yarn",)),
            ("--rotary-scaling-factor", ("32",)),
            ("--yarn-original-max-position-embeddings", ("4096",)),
            ("--no-yarn-correction-range-round-to-int", ()),
        ),
        "--enable-cuda-graph": (("--cuda-graph-impl", ("local",)),),
        "--external-cuda-graph": (("--cuda-graph-impl", ("transformer_engine",)),),
        "--offload-optimizer-states": (("--chunked-optimizer-state-offload", ()),),
    }
)
_FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        "--yaml-cfg": "use --config",
        "--warmup": "use --lr-warmup-fraction, a fraction instead of a percentage",
        "--checkpoint-activations": "use --recompute-granularity full",
        "--decoder-num-layers": "there is no separate decoder; use --num-layers",
        "--decoder-seq-length": "there is no separate decoder; use --seq-length",
        "--extra-vocab-size": "use --padded-vocab-size",
        "--max-padding-length": "use --seq-length",
        "--patch-tokenizer-type": "use --tokenizer-type HuggingFaceTokenizer",
        "--dataset": "use --data-path with .bin/.idx files",
        "--train-mode": "this program only pretrains; --finetune starts from given weights",
    }
)
_TRANSLATED: Mapping[str, tuple[Callable[[Sequence[str], ValueOf], Translated], str]] = MappingProxyType(
    {
        "--moe-layer-recompute": (
            _moe_layer_recompute,
            "--recompute-granularity selective --recompute-modules with moe added",
        ),
        "--moe-enable-deepep": (
            _moe_enable_deepep,
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
        ),
        **dict.fromkeys(_NUM_SMS, (_num_sms, "--moe-flex-dispatcher-num-sms")),
        "--error-injection-rate": (
            _error_injection_rate,
            "--inject nan-once@0:RATE or nan-loss@0:RATE, depending on --error-injection-type",
        ),
        "--cuda-graph-scope": (_cuda_graph_scope, "--cuda-graph-modules or --cuda-graph-impl full_iteration"),
        "--hybrid-layer-pattern": (_hybrid_layer_pattern, _LAYERS),
        "--hybrid-override-pattern": (_hybrid_override_pattern, _LAYERS),
        "--mtp-hybrid-override-pattern": (_mtp_hybrid_override_pattern, "--mtp-mixer with --mtp-feed-forward"),
        **dict.fromkeys(_RATIOS, (_hybrid_ratio, "no flag: the layer pattern implies it")),
        "--no-weight-decay-cond-type": (_no_weight_decay_cond_type, "--apply-wd-to-qk-layernorm"),
    }
)
"""Deprecated option -> (function that translates it, text about its replacement for the documentation)."""
