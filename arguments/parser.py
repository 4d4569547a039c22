"""Parses a command line into flags with values, and merges layers of flags (files, then the command line)."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

from arguments.deprecated import depends_on_other_flags, translate
from arguments.errors import Problem
from arguments.flag import Flag
from arguments.flags import Flags, Registry, flag_values, with_dashes
from arguments.recognised import find_recognised
from arguments.values import BadValue, check_bounds, is_list, is_off, is_optional, parse, split_words, without_none

COMMAND_LINE = "command line"
_MAX_NEAR = 3
_MIN_SIMILARITY = 0.7
"""Minimum similarity ratio (`difflib`) of suggested names."""
_DASHES = "\u2010-\u2015\u2212"
"""Dashes that documents and web pages substitute for hyphens, as part of a regular-expression character class."""
_LONGEST_SHOWN = 40
_NEVER_EMPTY = ("config", "allow_environment")
"""Lists that need a value on a command line."""
_SCHEDULE = ("lr_warmup", "lr_decay", "lr_wsd_decay")
"""Flags of the learning-rate schedule, without their unit: `_iters` or `_samples`."""


@dataclass(frozen=True)
class Given:
    """One flag as written on a command line or in a file."""

    option: str
    """Option as written, with its two leading dashes: `--num-layers`."""
    words: tuple[str, ...] | None
    """Values after the option; None if a file sets the flag to null, which unsets it."""
    origin: str
    """Where the flag was written: `command line`, `recipe.yaml:12`."""
    state: Literal["words", "one text", "unusable", "extends"] = "words"
    """State of `words`. "words": separate values. "one text": one scalar of a file, which is split at blanks if the
    flag takes a list. "unusable": no value, because a file error was reported. "extends": the flag's old value followed
    by further values."""


class Setting(NamedTuple):
    """Value of a flag and where it was set."""

    value: Any
    origin: str


@dataclass
class Settings:
    """Values of all flags after merging all layers."""

    registry: Registry
    values: dict[str, Setting] = field(default_factory=dict)
    """Flag name -> setting, for the flags that were given."""
    failed: set[str] = field(default_factory=set)
    """Names of flags with an unusable value; rules about them are skipped."""
    without_effect: dict[str, tuple[Given, str]] = field(default_factory=dict)
    """Option -> (flag, reason) for given Megatron-LM flags that are not implemented and are ignored with a warning."""
    refused: list[tuple[Given, str]] = field(default_factory=list)
    """(flag, reason) for given Megatron-LM flags that are not implemented and are rejected."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def setting(self, name: str) -> Setting:
        """Setting of the flag `name`; its default if the flag was not given."""
        found = self.values.get(name)
        return Setting(self.registry.flags[name].default, "default") if found is None else found

    @property
    def flags(self) -> Flags:
        """Current values as attributes; the value of a missing required flag is `REQUIRED`."""
        given = self.values
        flags = self.registry.flags.items()
        return flag_values({name: given[name].value if name in given else flag.default for name, flag in flags})

    def known(self, name: str) -> bool:
        """Whether the flag has a usable value."""
        return name not in self.failed and (name in self.values or not self.registry.flags[name].required)


def split(words: Sequence[str]) -> tuple[list[Given], list[Problem]]:
    """Splits a command line into flags with their values. A word that starts with two dashes is a flag."""
    found: list[Given] = []
    problems: list[Problem] = []
    corrupted, words = _repaired(words)
    for word in words:
        if not _is_text(word):
            problems.append(Problem(what=f"{ascii(word)} is not UTF-8 text", remedy="encode file names in UTF-8"))
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            found.append(Given(option, (value,) if equals else (), COMMAND_LINE))
        elif found:
            last = found[-1]
            found[-1] = Given(last.option, (*(last.words or ()), word), last.origin)
        else:
            problems.append(Problem(what=f"{word!r} does not follow a flag", remedy="start flags with two dashes"))
    return found, [*corrupted, *problems]


def _repaired(words: Sequence[str]) -> tuple[list[Problem], list[str]]:
    """Repairs words that a shell or the clipboard has corrupted. Returns the problems and the repaired words. Only the
    first problem of each kind is returned, because one cause usually corrupts many words."""
    problems: dict[str, Problem] = {}
    repaired: list[str] = []
    for word in words:
        problem, intended = _corruption(word)
        if problem:
            problems.setdefault(problem.remedy, problem)
        repaired += intended
    return list(problems.values()), repaired


def _corruption(word: str) -> tuple[Problem | None, list[str]]:
    """Returns (problem, words without the corruption); (None, [word]) if the word is not corrupted."""
    shown = repr(word) if len(word) <= _LONGEST_SHOWN else f"{word[:_LONGEST_SHOWN]!r}..."
    option = word.partition("=")[0]
    if word.endswith("\r"):
        what = f"{shown} ends with a carriage return: the script has Windows line endings"
        return Problem(what=what, remedy="sed -i 's/\\r$//' SCRIPT"), [word.rstrip("\r")] if word.strip() else []
    if word and word.strip() in ("", "\\"):
        what = f"{shown} is an argument: a backslash is followed by a blank or is in single quotes"
        return Problem(what=what, remedy="end continued lines with a backslash, without trailing blanks or quotes"), []
    if re.match(rf"-?[{_DASHES}][{_DASHES}-]*[A-Za-z]", word):
        rest = re.sub(rf"^[{_DASHES}-]+", "", word)
        what = f"{shown} starts with the dash U+{ord(word.lstrip('-')[0]):04X} instead of two hyphens"
        return Problem(what=what, remedy=f"type --{rest}"), [f"--{rest}"]
    if option.lstrip().startswith("--") and option.split() != [option]:
        remedy = 'remove the quotes: $ARGS instead of "$ARGS", or use an array: "${ARGS[@]}"'
        return Problem(what=f"{shown} is one argument that contains blanks", remedy=remedy), word.split()
    if re.fullmatch(r"\$\{\w+\[[@*]\]\}", word):
        what = f"{shown} was not expanded: a shell expands nothing in single quotes"
        return Problem(what=what, remedy="use double quotes"), []
    return None, [word]


def _is_text(word: str) -> bool:
    """Whether an argument is valid UTF-8; Python passes other bytes as surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def start_settings(words: Sequence[str], registry: Registry) -> Settings:
    """Parses only the flags of group `start`; reads no files."""
    return merge_settings(registry, [[given for given in split(words)[0] if is_start_flag(given.option, registry)]])


def is_start_flag(option: str, registry: Registry) -> bool:
    """Whether an option belongs to the group `start`, which is allowed on the command line only."""
    found = registry.find(option)
    return found is not None and found[0].group == "start"


def merge_settings(registry: Registry, layers: Sequence[Sequence[Given]]) -> Settings:
    """Merges layers of flags. Later layers silently override earlier ones; two values in one layer cause a note."""
    settings = Settings(registry)
    layer_of: dict[str, int] = {}
    for number, layer in enumerate(layers):
        in_this_layer: dict[str, Setting] = {}
        for given in sorted(
            layer, key=lambda given: depends_on_other_flags(with_dashes(given.option), given.words or ())
        ):
            for current in _translated(given, settings, in_this_layer):
                _take(current, settings, in_this_layer)
        settings.values |= in_this_layer
        layer_of |= dict.fromkeys(in_this_layer, number)
    _use_later_unit(settings, layer_of)
    return settings


def _use_later_unit(settings: Settings, layer_of: Mapping[str, int]) -> None:
    """Keeps the later of `--train-iters` and `--train-samples`, and converts the schedule of earlier layers.

    Both in one layer are left to the rules, as is a schedule without `--global-batch-size`, by which it is converted.

    Args:
        layer_of: flag name -> number of the layer that set its value.
    """
    lengths = {unit: layer_of.get(f"train_{unit}", -1) for unit in ("iters", "samples")}
    given = all(settings.setting(f"train_{unit}").value is not None for unit in lengths)
    if not given or len(set(lengths.values())) == 1:
        return
    old, new = sorted(lengths, key=lambda unit: lengths[unit])
    notes = [f"{_shown(settings, f'train_{new}')} replaces {_shown(settings, f'train_{old}')}"]
    settings.values[f"train_{old}"] = Setting(None, settings.setting(f"train_{new}").origin)
    size = settings.setting("global_batch_size").value
    for name in _SCHEDULE:
        before, after = f"{name}_{old}", f"{name}_{new}"
        if size is None or layer_of.get(before, lengths[new]) >= lengths[new] or not settings.setting(before).value:
            continue
        setting = settings.values.pop(before)
        replaced = layer_of.get(after, -1) > layer_of[before]
        replaced |= name == "lr_warmup" and layer_of.get("lr_warmup_fraction", -1) > layer_of[before]
        if not replaced:
            value = setting.value * size if new == "samples" else -(-setting.value // size)
            settings.values[after] = Setting(value, setting.origin)
            notes.append(f"{_option(settings, before)} {setting.value} becomes {_shown(settings, after)}")
    settings.notes.append("; ".join(notes))


def _option(settings: Settings, name: str) -> str:
    return settings.registry.flags[name].option


def _shown(settings: Settings, name: str) -> str:
    setting = settings.setting(name)
    return f"{_option(settings, name)} {setting.value} ({setting.origin})"


def _translated(given: Given, settings: Settings, layer: Mapping[str, Setting]) -> list[Given]:
    """Returns [given], or the replacements of a deprecated flag, or [] for a flag that is not implemented."""
    option = with_dashes(given.option)
    if settings.registry.find(option):
        return [given]
    if _recognised(option, given, settings):
        return []
    if given.words is None:
        return [given]
    try:
        translated = translate(option, given.words, lambda name: layer.get(name, settings.setting(name)).value)
    except BadValue as problem:
        settings.problems.append(Problem(what=f"{given.option} {problem}", given=(_row(given),)))
        return []
    if translated is None:
        return [given]
    if translated.note:
        settings.notes.append(f"{given.option} ({given.origin}): {translated.note}")

    def replacement(option: str, words: tuple[str, ...]) -> Given:
        own = given.state if words == given.words else "words"  # changed words are separate values
        return replace(given, option=option, words=words, state="extends" if translated.extends else own)

    return [replacement(*each) for each in translated.flags]


def _recognised(option: str, given: Given, settings: Settings) -> bool:
    """Returns whether a flag is recognised but not implemented. Such a flag is added to `settings.without_effect` or
    `settings.refused`, except if its value is null. Flags to refuse are not added if they are switched off."""
    found = find_recognised(option)
    if found is None:
        return False
    known, listed = found
    settings.refused = [each for each in settings.refused if each[0].option != option]
    if given.words is None:
        settings.without_effect.pop(option, None)
    elif not known.refused:
        settings.without_effect[option] = (given, known.reason)
    elif listed and not is_off(given.words):
        settings.refused.append((given, known.reason))
    return True


def _take(given: Given, settings: Settings, layer: dict[str, Setting]) -> None:
    found = settings.registry.find(given.option)
    if found is None:
        unknown = unknown_flag(given.option, settings.registry)
        settings.failed |= _meant(given.option, settings.registry)
        settings.problems.append(replace(unknown, what=f"{unknown.what} ({given.origin})"))
        return
    flag, switched_on = found
    if given.state == "unusable":
        settings.failed.add(flag.name)
        return
    try:
        value = _value(flag, switched_on, given)
    except BadValue as problem:
        shown = " ".join(filter(None, (given.option, *(given.words or ()))))
        settings.problems.append(Problem(what=f"{shown} {problem}", given=(_row(given),)))
        settings.failed.add(flag.name)
        return
    if flag.declaration.repeats:
        earlier = layer.get(flag.name, settings.setting(flag.name)).value
        layer[flag.name] = Setting(tuple(dict.fromkeys((*earlier, *cast(tuple[object, ...], value)))), given.origin)
        return
    before = layer.get(flag.name)
    if before and before.value != value and given.state != "extends":
        settings.notes.append(
            f"{flag.option} is given twice: {flag.text(before.value)} ({before.origin}), then {flag.text(value)} "
            f"({given.origin}); the last value is used"
        )
    layer[flag.name] = Setting(value, given.origin)


def _value(flag: Flag, switched_on: bool, given: Given) -> object:
    if given.words is None:
        if not is_optional(flag.type):
            other = "give a value" if flag.required else f"leave it out to use the default {flag.text(flag.default)}"
            raise BadValue(f"cannot be null; {other}")
        return None
    if flag.is_switch:
        if len(given.words) > 1:
            raise BadValue("takes no value")
        return (parse(bool, given.words) if given.words else True) is switched_on
    if not given.words and flag.declaration.bare is not None:
        return flag.declaration.bare
    # without a value, `--config $FILE` of an unset variable would start another run
    may_be_empty = is_list(flag.type) and not (given.origin == COMMAND_LINE and flag.name in _NEVER_EMPTY)
    is_empty = not given.words or (given.words == ("",) and without_none(flag.type) in (int, float))
    if is_empty and not may_be_empty:
        raise BadValue("needs a value")
    words = split_words(given.words[0]) if given.state == "one text" and is_list(flag.type) else given.words
    value = parse(flag.type, words)
    check_bounds(value, flag.declaration.least, flag.declaration.below)
    return value


def unknown_flag(option: str, registry: Registry) -> Problem:
    """Problem that reports an unknown option and suggests similar names."""
    close = _near_options(option, registry)
    remedy = f"did you mean {' or '.join(f'--{name}' for name in close)}?" if close else "search with --find WORD"
    return Problem(what=f"{option} is not a flag", remedy=remedy)


def _meant(option: str, registry: Registry) -> set[str]:
    """Returns the required flags that an unknown option probably misspells, at most one; they are not reported as
    missing."""
    close = _near_options(option, registry)[:1]
    return {flag.name for flag, _ in (registry.spellings[f"--{name}"] for name in close) if flag.required}


def _near_options(option: str, registry: Registry) -> list[str]:
    """Known options that are spelled like `option`, without dashes in front."""
    return similar_names(with_dashes(option).lstrip("-"), [spelling.lstrip("-") for spelling in registry.spellings])


def similar_names(word: str, names: Sequence[str]) -> list[str]:
    """Returns up to three names that are spelled similarly to `word` or contain it as a part."""
    similar = difflib.get_close_matches(word, names, n=_MAX_NEAR, cutoff=_MIN_SIMILARITY)
    containing = [name for name in names if f"-{word}-" in f"-{name}-"]
    return list(dict.fromkeys((*similar, *containing)))[:_MAX_NEAR]


def _row(given: Given) -> tuple[str, str, str]:
    return given.option, " ".join(given.words or ()), given.origin
