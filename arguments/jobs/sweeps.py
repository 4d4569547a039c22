"""A grid of runs: every combination of some flags' values, each with a name and the words that make it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from arguments.errors import FlagErrors, Problem
from arguments.flags import Registry
from arguments.parser import unknown_flag

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_ON, _OFF = ("on", "true"), ("off", "false")


@dataclass(frozen=True)
class Axis:
    """One flag and the values to try; of a switch `on` and `off`."""

    option: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One combination."""

    name: str
    """For a folder: `lr=1e-3,micro-batch-size=2`."""
    flags: tuple[str, ...]


def axis_of(words: Sequence[str], registry: Registry) -> Axis:
    """From `lr 1e-3 3e-4`. Raises FlagErrors: no such flag, or no value."""
    name, equals, value = words[0].partition("=")
    option = "--" + name.lstrip("-").replace("_", "-")
    if registry.find(option) is None:
        remedy = unknown_flag(option, registry).remedy
        raise FlagErrors([Problem(what=f"--set {words[0]}: there is no flag {option}", remedy=remedy)])
    if equals:
        remedy = " ".join(("--set", name, *value.split(","), *words[1:]))
        raise FlagErrors([Problem(what=f"--set {words[0]}: values stand behind the flag, apart", remedy=remedy)])
    if len(words) == 1:
        raise FlagErrors([Problem(what=f"--set {words[0]} has no values", remedy=f"--set {words[0]} VALUE VALUE ...")])
    return Axis(option, tuple(dict.fromkeys(words[1:])))


def points(axes: Sequence[Axis], registry: Registry) -> list[Point]:
    """Every combination, the last axis changing fastest. Names that would be the same folder get a number.

    Raises FlagErrors: two axes of one flag.
    """
    names = [found[0].name for axis in axes if (found := registry.find(axis.option))]
    twice = [axis.option for axis, name in zip(axes, names, strict=True) if names.count(name) > 1]
    if twice:
        raise FlagErrors([Problem(what=f"--set {twice[0][2:]} is given twice", remedy="list all values behind one")])
    made: list[Point] = []
    for values in product(*(axis.values for axis in axes)):
        pairs = list(zip(axes, values, strict=True))
        name = ",".join(f"{axis.option[2:]}={_UNSAFE.sub('_', value)}" for axis, value in pairs)
        same = sum(point.name == name or point.name.startswith(f"{name},again=") for point in made)
        words = tuple(word for axis, value in pairs for word in _words(axis.option, value, registry))
        made.append(Point(f"{name},again={same}" if same else name, words))
    return made


def _words(option: str, value: str, registry: Registry) -> tuple[str, ...]:
    """A value of several words (`1 2 3`) is several; a switch becomes `--x` or `--no-x`."""
    found = registry.find(option)
    assert found is not None, f"{option} was found before"
    flag, switches_on = found
    if flag.is_switch and value in (*_ON, *_OFF):
        return (flag.option,) if (value in _ON) == switches_on else (flag.off_options[0],)
    return (option, *value.split())
