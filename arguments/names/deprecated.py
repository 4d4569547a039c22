"""Old names, and names of other programs, in today's words. Each is accepted for ever, with a note."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from arguments.values import BadValue, parse

Words = tuple[str, ...]


@dataclass(frozen=True)
class Translated:
    """What an old name means today."""

    flags: tuple[tuple[str, Words], ...]
    """(option, words) of today's flags; none: the name has no meaning any more."""
    note: str


def translate(option: str, words: Sequence[str]) -> Translated | None:
    """Today's flags for an old one; None if `option` is not an old name.

    Raises:
        BadValue: it is, but it or its value has no meaning here.
    """
    if option in _RENAMED:
        today = _RENAMED[option]
        return Translated(((today, tuple(words)),), f"is now called {today}")
    if option in _SWITCHES:
        return _switch(_SWITCHES[option], words)
    if option in _GONE:
        return Translated((), f"has no meaning any more: {_GONE[option]}")
    if option in _FOREIGN:
        raise BadValue(f"does not exist here: {_FOREIGN[option]}")
    if option in _TRANSLATED:
        return _TRANSLATED[option](words)
    return None


def old_names() -> dict[str, str]:
    """Every old name -> what it becomes, for the list of flags."""
    switches = {old: _text(flags) for old, flags in _SWITCHES.items()}
    gone = {old: f"nothing: {reason}" for old, reason in _GONE.items()}
    foreign = {old: f"refused: {remedy}" for old, remedy in _FOREIGN.items()}
    translated = {old: " ".join((function.__doc__ or "").split()) for old, function in _TRANSLATED.items()}
    return dict(sorted({**_RENAMED, **switches, **gone, **foreign, **translated}.items()))


def _text(flags: Sequence[tuple[str, Words]]) -> str:
    return " ".join(word for option, words in flags for word in (option, *words))


def _switch(flags: tuple[tuple[str, Words], ...], words: Sequence[str]) -> Translated:
    if words and not parse(bool, words):
        return Translated((), "is off, which is the default")
    return Translated(flags, f"is now written {_text(flags)}")


def _no_weight_decay_cond_type(words: Sequence[str]) -> Translated:
    """--apply-wd-to-qk-layernorm"""
    if tuple(words) not in (("apply_wd_to_qk_layernorm",), ("qwen3_next",)):
        raise BadValue(f"knows apply_wd_to_qk_layernorm and qwen3_next, not {' '.join(words)!r}")
    return Translated((("--apply-wd-to-qk-layernorm", ()),), "is now written --apply-wd-to-qk-layernorm")


def comes_last(option: str, words: Sequence[str]) -> bool:
    """Does an old name say more of what another flag says, wherever the two stand?"""
    return option == "--cuda-graph-scope" and "full_iteration" in words


def _cuda_graph_scope(words: Sequence[str]) -> Translated:
    """--cuda-graph-modules or --cuda-graph-impl full_iteration"""
    if tuple(words) == ("full",):
        return Translated((), "full is the default: without --cuda-graph-modules all parts of layers are recorded")
    if "full_iteration" not in words:
        return Translated((("--cuda-graph-modules", tuple(words)),), "is now called --cuda-graph-modules")
    if len(words) > 1:
        raise BadValue("full_iteration has no parts beside it: leave them out, or write --cuda-graph-impl local")
    return Translated((("--cuda-graph-impl", tuple(words)),), "is now written --cuda-graph-impl full_iteration")


_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "--batch-size": "--micro-batch-size",
        "--model-parallel-size": "--tensor-model-parallel-size",
        "--encoder-num-layers": "--num-layers",
        "--encoder-seq-length": "--seq-length",
        "--moe-router-padding-for-fp8": "--moe-router-padding-for-quantization",
        "--moe-deepep-num-sms": "--moe-flex-dispatcher-num-sms",
        "--moe-hybridep-num-sms": "--moe-flex-dispatcher-num-sms",
        "--moe-token-capacity-factor": "--moe-expert-capacity-factor",
        "--bias-activation-fusion": "--bias-swiglu-fusion",
        "--linear-attention-type": "--experimental-attention-variant",
        "--qk-nope-head-dim": "--qk-head-dim",
        "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
    }
)
_SWITCHES: Mapping[str, tuple[tuple[str, Words], ...]] = MappingProxyType(
    {
        "--use-rotary-position-embeddings": (("--position-embedding-type", ("rope",)),),
        "--recompute-activations": (("--recompute-granularity", ("selective",)),),
        "--moe-layer-recompute": (("--recompute-granularity", ("selective",)), ("--recompute-modules", ("moe",))),
        "--moe-enable-deepep": (
            ("--moe-token-dispatcher-type", ("flex",)),
            ("--moe-flex-dispatcher-backend", ("deepep",)),
        ),
        "--enable-cuda-graph": (("--cuda-graph-impl", ("local",)),),
        "--external-cuda-graph": (("--cuda-graph-impl", ("transformer_engine",)),),
        "--offload-optimizer-states": (("--chunked-optimizer-state-offload", ()),),
    }
)
_GONE: Mapping[str, str] = MappingProxyType(
    {
        "--no-async-tensor-model-parallel-allreduce": "communication is overlapped where it can be",
        "--use-separate-send-recv-groups": "pipeline stages have one pair of queues",
        "--dist-ckpt-format": "checkpoints have one format",
        "--no-query-key-layer-scaling": "that is the default",
        "--export-force-local-attention": "attention is chosen by --kernel-backend",
    }
)
_FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        "--yaml-cfg": "use --config",
        "--warmup": "use --lr-warmup-fraction, which is a share instead of a percentage",
        "--checkpoint-activations": "use --recompute-granularity full",
        "--decoder-num-layers": "there is one stack of layers; use --num-layers",
        "--decoder-seq-length": "there is one stack of layers; use --seq-length",
        "--loss-scale": "it belongs to fp16; use --bf16",
        "--enable-gpt-oss": "write its parts out: --position-embedding-type yarn --rotary-scaling-factor 32 "
        "--no-yarn-correction-range-round-to-int --softmax-type learnable --quick-geglu --glu-linear-offset 1 "
        "--activation-func-clamp-value 7 --window-size 127,0 --window-attn-skip-freq 2",
        "--extra-vocab-size": "use --padded-vocab-size",
        "--max-padding-length": "use --seq-length",
        "--patch-tokenizer-type": "use --tokenizer-type HuggingFaceTokenizer",
        "--dataset": "use --data-path with .bin/.idx files",
        "--train-mode": "this program pretrains; --finetune starts from weights",
    }
)
_TRANSLATED: Mapping[str, Callable[[Sequence[str]], Translated]] = MappingProxyType(
    {
        "--cuda-graph-scope": _cuda_graph_scope,
        "--no-weight-decay-cond-type": _no_weight_decay_cond_type,
    }
)
