"""Megatron-LM flags that are recognised but not implemented, read from `recognised.txt`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

_FILE = Path(__file__).with_name("recognised.txt")


@dataclass(frozen=True)
class Recognised:
    """Treatment of a Megatron-LM flag that is not implemented: rejected, or accepted with a warning."""

    reason: str
    """Verb phrase for messages, with the flag as its subject."""
    refused: bool
    """If True, the flag is rejected because ignoring it would change results; if False, it is accepted with a
    warning."""


@cache
def recognised_flags() -> Mapping[str, Recognised]:
    """Maps each option in `recognised.txt` to its treatment. Each section of that file starts with `[no effect] REASON`
    or `[refused] REASON`."""
    found: dict[str, Recognised] = {}
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            effect, _, reason = line[1:].partition("] ")
            heading = Recognised(reason, refused=effect == "refused")
        else:
            found.update(dict.fromkeys(line.split(), heading))
    return MappingProxyType(found)


def find_recognised(option: str) -> tuple[Recognised, bool] | None:
    """Returns (treatment, True) if the option is listed in `recognised.txt`, and (treatment, False) if only its
    negation is listed (`--no-x` for `--x`, or the reverse). Returns None if neither is listed."""
    listed = recognised_flags()
    if option in listed:
        return listed[option], True
    opposite = f"--{option[5:]}" if option.startswith("--no-") else f"--no-{option[2:]}"
    return (listed[opposite], False) if opposite in listed else None
