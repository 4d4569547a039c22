"""Translates Megatron's patterns of hybrid models, one letter per layer, to flags of this program.

`MEM*E|M-/*E` has seven layers, each with a single module: M Mamba-2, G gated delta net, `*` attention, `+` multi-latent
attention, D sparse attention, `-` MLP, E experts. `|` ends a pipeline stage, and `/` precedes the layers of a depth of
multi-token prediction, which form one transformer layer: a mixer, a feed-forward module, or both.
"""

from collections.abc import Sequence
from types import MappingProxyType

from arguments.values import BadValue

Replacement = tuple[tuple[str, tuple[str, ...]], ...]
_NONE = "none"
_MODULES = MappingProxyType(
    {
        "M": ("mamba", _NONE),
        "G": ("gated_delta_net", _NONE),
        "*": ("auto", _NONE),
        "+": ("mla", _NONE),
        "D": ("dsa", _NONE),
        "-": (_NONE, "mlp"),
        "E": (_NONE, "moe"),
    }
)
"""Letter -> (value of `--mixer`, value of `--feed-forward`)."""


def pattern_flags(words: Sequence[str]) -> Replacement:
    """Flags that describe the model of a pattern. Raises BadValue."""
    if len(words) != 1:
        raise BadValue(f"takes one pattern, not {len(words)}")
    decoder, *depths = words[0].split("/")
    depths = [depth for depth in depths if depth]
    stages = decoder.split("|")
    modules = [_modules(letter) for letter in "".join(stages)]
    if not modules:
        raise BadValue("has no layers")
    flags = [
        ("--num-layers", (str(len(modules)),)),
        ("--mixer", tuple(mixer for mixer, _ in modules)),
        ("--feed-forward", tuple(feed_forward for _, feed_forward in modules)),
    ]
    if len(stages) > 1:
        ends = "m" * len(depths) + "L"
        flags.append(("--pipeline-model-parallel-layout", ("E" + "|".join("t" * len(s) for s in stages) + ends,)))
    if depths:
        flags.append(("--mtp-num-layers", (str(len(depths)),)))
        flags += _depth(depths)
    return tuple(flags)


def depth_flags(words: Sequence[str]) -> Replacement:
    """Flags that describe a depth of multi-token prediction, such as `*E`. Raises BadValue."""
    if len(words) != 1 or not words[0]:
        raise BadValue(f"takes the layers of one depth, such as *E, not {' '.join(words)!r}")
    return _depth(words)


def _modules(letter: str) -> tuple[str, str]:
    if letter not in _MODULES:
        known = ", ".join(_MODULES)
        raise BadValue(f"has {letter!r}; layers are {known}, stages end with |, and / precedes multi-token prediction")
    return _MODULES[letter]


def _depth(depths: Sequence[str]) -> Replacement:
    """Flags for the mixer and the feed-forward module of a depth of multi-token prediction."""
    if len(set(depths)) > 1:
        raise BadValue(f"has different depths of multi-token prediction: {' and '.join(dict.fromkeys(depths))}")
    modules = [_modules(letter) for letter in depths[0]]
    mixers, feed_forwards = ([name for name in names if name != _NONE] for names in zip(*modules, strict=True))
    if len(mixers) > 1 or len(feed_forwards) > 1 or modules[0][0] == _NONE and mixers:
        raise BadValue(f"has the depth {depths[0]}; a depth has at most one mixer, and after it one MLP or experts")
    first_mixer, first_feed_forward = (*mixers, _NONE)[0], (*feed_forwards, _NONE)[0]
    return ("--mtp-mixer", (first_mixer,)), ("--mtp-feed-forward", (first_feed_forward,))
