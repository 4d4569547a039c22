"""From words to settings: what was given, in layers that win over each other, becomes one value per flag."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from arguments.deprecated import comes_last, translate
from arguments.errors import Problem
from arguments.flag import Flag
from arguments.flags import Registry, normal
from arguments.recognised import find_recognised
from arguments.values import BadValue, cut, is_list, is_off, is_optional, parse, within, words_of

COMMAND_LINE = "command line"
_MAX_NEAR = 3
_ALIKE = 0.7
"""Names with a smaller share of letters in common have nothing to do with each other: learning-rate, te-rng-tracker."""
_DASHES = "\u2010-\u2015\u2212"
"""What texts and web pages have in place of hyphens, as a range of a regular expression."""
_LONGEST_SHOWN = 40


@dataclass(frozen=True)
class Given:
    """One flag as somebody wrote it."""

    option: str
    """With its dashes: `--num-layers`."""
    words: tuple[str, ...] | None
    """The words after it; None: taken back (null in a file)."""
    origin: str
    """Where it was written: `command line`, `recipe.yaml:12`."""
    state: Literal["words", "one text", "unusable", "extends"] = "words"
    """one text: of a file, so that a list still has to be cut at its blanks; unusable: its problem is reported;
    extends: the words hold the value given before, and more."""


@dataclass(frozen=True)
class Setting:
    """A flag's value and where it came from."""

    value: Any
    origin: str


@dataclass
class Settings:
    """What all layers together say."""

    registry: Registry
    values: dict[str, Setting] = field(default_factory=dict)
    """By flag name; only flags that were given."""
    failed: set[str] = field(default_factory=set)
    """Flags that were given something unusable. Rules about them are not tried."""
    without_effect: dict[str, tuple[Given, str]] = field(default_factory=dict)
    """Recognised flags that change nothing, by option, each with the reason."""
    refused: list[tuple[Given, str]] = field(default_factory=list)
    """Recognised flags that this program does not have, each with the reason."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def setting(self, name: str) -> Setting:
        """The value in force."""
        return self.values.get(name, Setting(self.registry.flags[name].default, "default"))

    def known(self, name: str) -> bool:
        """Does the flag have a usable value?"""
        return name not in self.failed and (name in self.values or not self.registry.flags[name].required)


def split(words: Sequence[str]) -> tuple[list[Given], list[Problem]]:
    """The command line as flags with their words. A word that begins with two dashes is a flag."""
    found: list[Given] = []
    problems: list[Problem] = []
    spoilt, words = _mended(words)
    for word in words:
        if not _is_text(word):
            problems.append(Problem(what=f"{ascii(word)} is not UTF-8 text", remedy="write names of files in UTF-8"))
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            found.append(Given(option, (value,) if equals else (), COMMAND_LINE))
        elif found:
            last = found[-1]
            found[-1] = Given(last.option, (*(last.words or ()), word), last.origin)
        else:
            problems.append(Problem(what=f"{word!r} stands before any flag", remedy="begin flags with two dashes"))
    return found, [*spoilt, *problems]


def _mended(words: Sequence[str]) -> tuple[list[Problem], list[str]]:
    """The first of every kind of words that a shell or a clipboard has spoilt, and the words that were meant, so that
    nothing else is said of what only follows from that."""
    problems: dict[str, Problem] = {}
    mended: list[str] = []
    for word in words:
        problem, meant = _spoilt(word)
        if problem:
            problems.setdefault(problem.remedy, problem)
        mended += meant
    return list(problems.values()), mended


def _spoilt(word: str) -> tuple[Problem | None, list[str]]:
    """What a shell or a clipboard has done to a word, if anything, and the words that were meant."""
    shown = repr(word) if len(word) <= _LONGEST_SHOWN else f"{word[:_LONGEST_SHOWN]!r}..."
    option = word.partition("=")[0]
    if word.endswith("\r"):
        what = f"{shown} ends with a carriage return: the script has the line ends of Windows"
        return Problem(what=what, remedy="sed -i 's/\\r$//' SCRIPT"), [word.rstrip("\r")] if word.strip() else []
    if word and word.strip() in ("", "\\"):
        what = f"{shown} is a word: a backslash has a blank behind it, or stands in single quotes"
        return Problem(what=what, remedy="end lines that go on with a backslash, outside of single quotes"), []
    if re.match(rf"-?[{_DASHES}][{_DASHES}-]*[A-Za-z]", word):
        rest = re.sub(rf"^[{_DASHES}-]+", "", word)
        what = f"{shown} begins with the dash U+{ord(word.lstrip('-')[0]):04X} in place of two hyphens"
        return Problem(what=what, remedy=f"type --{rest}"), [f"--{rest}"]
    if option.lstrip().startswith("--") and option.split() != [option]:
        remedy = 'take the quotes away: $ARGS in place of "$ARGS"; an array is "${ARGS[@]}"'
        return Problem(what=f"{shown} is one word with blanks in it", remedy=remedy), word.split()
    if re.fullmatch(r"\$\{\w+\[[@*]\]\}", word):
        what = f"{shown} is not what it stands for: a shell puts nothing into single quotes"
        return Problem(what=what, remedy="write it in double quotes"), []
    return None, [word]


def _is_text(word: str) -> bool:
    """Python hands over bytes that are no UTF-8 as halves of characters, which no file of a run can hold."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def start_settings(words: Sequence[str], registry: Registry) -> Settings:
    """Flags of a command line that name files or ask for a report, without reading the files."""
    return settle(registry, [[given for given in split(words)[0] if is_start_flag(given.option, registry)]])


def is_start_flag(option: str, registry: Registry) -> bool:
    """Whether an option belongs to the group `start`, which counts on the command line alone."""
    found = registry.find(option)
    return found is not None and found[0].group == "start"


def settle(registry: Registry, layers: Sequence[Sequence[Given]]) -> Settings:
    """Every layer's flags; later layers win over earlier ones in silence, within a layer a change is noted."""
    settings = Settings(registry)
    for layer in layers:
        in_this_layer: dict[str, Setting] = {}
        for given in sorted(layer, key=_comes_last):
            for plain in _todays(given, settings, in_this_layer):
                _take(plain, settings, in_this_layer)
        settings.values |= in_this_layer
    return settings


def _comes_last(given: Given) -> bool:
    return comes_last(normal(given.option), given.words or ())


def _todays(given: Given, settings: Settings, layer: Mapping[str, Setting]) -> list[Given]:
    """Old names in today's words, and nothing for flags that are only recognised."""
    option = normal(given.option)
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
    settings.notes.append(f"{given.option} ({given.origin}): {translated.note}")
    state = "extends" if translated.extends else given.state
    return [replace(given, option=option, words=words, state=state) for option, words in translated.flags]


def _recognised(option: str, given: Given, settings: Settings) -> bool:
    """Whether a flag is only recognised, in which case it is recorded: unless it is null or switched off, which
    requests nothing."""
    found = find_recognised(option)
    if found is None:
        return False
    known, listed = found
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
        settings.problems.append(replace(unknown, what=f"{unknown.what} ({given.origin})"))
        return
    flag, switched_on = found
    if given.state == "unusable":
        settings.failed.add(flag.name)
        return
    try:
        value = _value(flag, switched_on, given)
    except BadValue as problem:
        shown = " ".join((given.option, *(given.words or ())))
        settings.problems.append(Problem(what=f"{shown} {problem}", given=(_row(given),)))
        settings.failed.add(flag.name)
        return
    before = layer.get(flag.name)
    if before and before.value != value and given.state != "extends":
        settings.notes.append(
            f"{flag.option} is given twice: {_shown(flag, before.value)} ({before.origin}), then "
            f"{_shown(flag, value)} ({given.origin}); the last one wins"
        )
    layer[flag.name] = Setting(value, given.origin)


def _value(flag: Flag, switched_on: bool, given: Given) -> object:
    if given.words is None:
        if not is_optional(flag.type):
            raise BadValue(f"cannot be null; leave it out for its default {_shown(flag, flag.default)}")
        return None
    if flag.is_switch:
        if len(given.words) > 1:
            raise BadValue("takes no value")
        return (parse(bool, given.words) if given.words else True) is switched_on
    if not given.words and flag.declaration.bare is not None:
        return flag.declaration.bare
    if not given.words and not is_list(flag.type):
        raise BadValue("needs a value")
    words = cut(given.words[0]) if given.state == "one text" and is_list(flag.type) else given.words
    value = parse(flag.type, words)
    within(value, flag.declaration.least, flag.declaration.below)
    return value


def unknown_flag(option: str, registry: Registry) -> Problem:
    """That an option is not known, with the nearest that are, if any are near."""
    close = near(normal(option).lstrip("-"), [spelling.lstrip("-") for spelling in registry.spellings])
    remedy = (
        f"did you mean {' or '.join(f'--{name}' for name in close)}?" if close else "--find WORD searches the flags"
    )
    return Problem(what=f"{option} is not a flag", remedy=remedy)


def near(word: str, names: Sequence[str]) -> list[str]:
    """Up to three names that `word` may be meant to be: spelt alike, or with the word among their parts."""
    alike = difflib.get_close_matches(word, names, n=_MAX_NEAR, cutoff=_ALIKE)
    holding = [name for name in names if f"-{word}-" in f"-{name}-"]
    return list(dict.fromkeys((*alike, *holding)))[:_MAX_NEAR]


def _row(given: Given) -> tuple[str, str, str]:
    return given.option, " ".join(given.words or ()), given.origin


def _shown(flag: Flag, value: object) -> str:
    return "nothing" if value is None else " ".join(words_of(flag.type, value))
