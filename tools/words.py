"""What the tools that run something for pretrain_moe.py do with their words. Imports no torch."""

import argparse
from collections.abc import Sequence


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def words_around_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A tool's own words, and behind the first `--` those of pretrain_moe.py."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]
