"""What the tools that run something for pretrain_moe.py do with their words. Imports no torch."""

from collections.abc import Sequence


def words_around_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A tool's own words, and behind the first `--` those of pretrain_moe.py."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]
