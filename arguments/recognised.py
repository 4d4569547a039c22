"""Megatron-LM flags that are recognised but not implemented, read from `recognised.txt`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

_FILE = Path(__file__).with_name("recognised.txt")


@dataclass(frozen=True)
class Recognised:
    """Effect of a recognised flag."""

    reason: str
    """Verb phrase that follows the name of the flag in messages."""
    refused: bool
    """Whether the flag is rejected because ignoring it would change results. Other flags are accepted with a
    warning."""


@cache
def recognised_flags() -> Mapping[str, Recognised]:
    """Maps each option to its effect. Each section of the file starts with `[no effect] REASON` or `[refused]
    REASON`."""
    found: dict[str, Recognised] = {}
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            effect, _, reason = line[1:].partition("] ")
            heading = Recognised(reason, refused=effect == "refused")
        else:
            found.update(dict.fromkeys(line.split(), heading))
    return MappingProxyType(found)


def find_recognised(option: str) -> tuple[Recognised, bool] | None:
    """Returns the effect of an option, and True if the option is listed or False if only its negation is listed
    (`--no-x` for `--x`, or the reverse). Returns None if neither is listed."""
    listed = recognised_flags()
    if option in listed:
        return listed[option], True
    opposite = f"--{option[5:]}" if option.startswith("--no-") else f"--no-{option[2:]}"
    return (listed[opposite], False) if opposite in listed else None
