"""Ranks must have been started alike: with the same flags, the same source and the same torch.

A rank with another flag makes other collectives than its peers, and hangs or computes nonsense hours later.
"""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megatron_moe.config.exit_codes import EnvironmentProblem, listed
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext

_SOURCE = Path(__file__).parents[1]


def check_agreement(run_yaml: str, context: ParallelContext) -> None:
    """All ranks call it. Raises EnvironmentProblem on every rank when one was started otherwise than the first.

    `run_yaml`: every flag and its value, a line each. Values that are paths may differ, since machines do.
    """
    world = context.group("world")
    if world.size == 1:
        return
    mine = _facts(run_yaml)
    digest = zlib.crc32(repr(mine).encode())
    # world: 8 bytes per rank; some kB per rank where they differ
    if len(set(gather_objects(digest, world))) == 1:
        return
    first, *others = gather_objects(mine, world)
    lines = [line for rank, facts in enumerate(others, 1) for line in _differences(first, facts, rank)]
    raise EnvironmentProblem(
        f"ranks were started differently; give all of them the same command line and the same source:\n  "
        f"{listed(lines)}"
    )


def every_rank_does(act: Callable[[], None], context: ParallelContext) -> None:
    """All ranks call it, and act. What keeps one from that (EnvironmentProblem, OSError) is raised on every rank as an
    EnvironmentProblem, so that none waits for one that has left."""
    sentence = None
    try:
        act()
    except (EnvironmentProblem, OSError) as error:
        sentence = str(error)
    # world: nothing, or one sentence per rank
    for rank, told in enumerate(gather_objects(sentence, context.host_group())):
        if told is not None:
            raise EnvironmentProblem(told if rank == 0 else f"on rank {rank}: {told}")


def first_rank_does(act: Callable[[], None], context: ParallelContext) -> None:
    """All ranks call it, and the first acts, as in `every_rank_does`."""
    every_rank_does(act if context.is_first else lambda: None, context)


def _facts(run_yaml: str) -> dict[str, str]:
    """Flags by name, without comments and paths; and what the program is made of."""
    facts = {"torch": torch.__version__, "source of megatron_moe": f"{_source_checksum():08x}"}
    for line in run_yaml.splitlines():
        name, colon, value = line.partition(" #")[0].partition(":")
        if colon and value.strip() and "/" not in value and name.strip() != "local-rank":
            facts[name.strip()] = value.strip()
    return facts


def _source_checksum() -> int:
    checksum = 0
    for path in sorted(_SOURCE.rglob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum


def _differences(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> list[str]:
    names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
    missing = "not given"
    return [
        f"{name}: {first.get(name, missing)} on rank 0, {other.get(name, missing)} on rank {rank}" for name in names
    ]
