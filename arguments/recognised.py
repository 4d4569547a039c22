"""Flags of Megatron-LM that this program recognises without having them: `recognised.txt` lists them with a reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

_FILE = Path(__file__).with_name("recognised.txt")


@dataclass(frozen=True)
class Recognised:
    """What happens to a flag that is only recognised."""

    reason: str
    """Completes "--flag ..."."""
    refused: bool
    """True: leaving it out would change numbers, so it is rejected. False: it is accepted and reported."""


@cache
def recognised_flags() -> Mapping[str, Recognised]:
    """Option -> what happens to it, by reason. In the file a line `[no effect] REASON` or `[refused] REASON` stands
    above the options."""
    found: dict[str, Recognised] = {}
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            effect, _, reason = line[1:].partition("] ")
            heading = Recognised(reason, refused=effect == "refused")
        else:
            found.update(dict.fromkeys(line.split(), heading))
    return MappingProxyType(found)


def find_recognised(option: str) -> tuple[Recognised, bool] | None:
    """What happens to an option, and whether it is the listed spelling (True) or the opposite switch (False): `--no-x`
    where `--x` is listed, or `--x` where `--no-x` is. None: the option is not recognised."""
    listed = recognised_flags()
    if option in listed:
        return listed[option], True
    opposite = f"--{option[5:]}" if option.startswith("--no-") else f"--no-{option[2:]}"
    return (listed[opposite], False) if opposite in listed else None
