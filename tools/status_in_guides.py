"""Keeps guides honest: the last column, `here`, of their tables is what the flags of a row can do today."""

import re
import shlex
from collections.abc import Iterator, Sequence

from arguments.flags import Registry
from arguments.recognised import find_recognised
from arguments.values import parse

_CODE = re.compile(r"`(--[^`]+)`")
_HEADING = "here"
_WORST_FIRST = ("refused", "not yet", "no effect", "yes")


def refreshed(text: str, registry: Registry) -> str:
    """The guide with every cell below the heading `here` written anew; rows that name no flag keep theirs."""
    return "".join(_refreshed_lines(text.splitlines(keepends=True), registry))


def _refreshed_lines(lines: Sequence[str], registry: Registry) -> Iterator[str]:
    inside = False
    for line in lines:
        cells = line.rstrip("\n").split("|")
        if not line.startswith("|"):
            inside = False
        elif cells[-2].strip() == _HEADING:
            inside = True
        elif inside and _CODE.search(line):
            cells[-2] = f" {standing(_CODE.findall(line), registry)} "
            line = "|".join(cells) + "\n"
        yield line


def standing(pieces: Sequence[str], registry: Registry) -> str:
    """The worst of what the flags of some pieces of a command line can do; each piece may hold values."""
    found = {_one(words, registry) for piece in pieces for words in _by_flag(shlex.split(piece))}
    return next(each for each in _WORST_FIRST if each in found)


def _by_flag(words: Sequence[str]) -> list[list[str]]:
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            flags.append([])
        flags[-1].append(word)
    return flags


def _one(words: Sequence[str], registry: Registry) -> str:
    """A flag with its values; without values it is asked about anything but its default."""
    found = registry.find(words[0])
    if found is None:
        known = find_recognised(words[0])
        assert known is not None, f"the guide names {words[0]}, which is not a flag"
        return "refused" if known[0].refused else "no effect"
    flag, is_on = found
    value: object = is_on if flag.is_switch else (parse(flag.type, words[1:]) if words[1:] else object())
    status = flag.declaration.status
    if status in ("not yet", "refused") and not flag.available(value):
        return status
    return "yes"
