"""Checks at startup that all ranks run with the same flags, source files and torch version.

Ranks with different flags call different collectives and hang, or compute wrong results hours later.
"""

import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.text import listed
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext


def check_agreement(run_yaml: str, context: ParallelContext) -> None:
    """Raises EnvironmentProblem on all ranks if any rank was started differently from rank 0.

    All ranks must call it. `run_yaml`: flags and their values, one flag per line. Paths are not compared, because they
    may differ between machines."""
    world = context.group("world")
    if world.size == 1:
        return
    own = _properties(run_yaml)
    # collective over world: 8 bytes per rank; if the checksums differ, some kB per rank
    if len(set(gather_objects(zlib.crc32(repr(own).encode()), world))) == 1:
        return
    first, *others = gather_objects(own, world)
    lines = [line for rank, properties in enumerate(others, 1) for line in _differences(first, properties, rank)]
    raise EnvironmentProblem(
        "the ranks were started differently: start all of them with the same command line and source files:\n  "
        f"{listed(lines)}"
    )


def run_on_every_rank(action: Callable[[], None], context: ParallelContext) -> None:
    """Runs `action` on every rank. All ranks must call it.

    If `action` raises EnvironmentProblem or OSError on a rank, all ranks raise EnvironmentProblem, so that no rank
    waits for the failed one in a later collective."""
    problem = None
    try:
        action()
    except (EnvironmentProblem, OSError) as error:
        problem = str(error)
    # collective over world: None or one error message per rank
    for rank, message in enumerate(gather_objects(problem, context.host_group())):
        if message is not None:
            raise EnvironmentProblem(message if rank == 0 else f"on rank {rank}: {message}")


def run_on_first_rank(action: Callable[[], None], context: ParallelContext) -> None:
    """Runs `action` on rank 0 and raises its errors on all ranks, as `run_on_every_rank` does. All ranks must call
    it."""
    run_on_every_rank(action if context.is_first else lambda: None, context)


def _properties(run_yaml: str) -> dict[str, str]:
    """Values that must be equal on all ranks, by name: the torch version, a checksum of the source files, and all flags
    except the local rank and those whose values contain a slash (paths)."""
    checksum = 0
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    properties = {"torch": torch.__version__, "source of megatron_moe": f"{checksum:08x}"}
    for line in run_yaml.splitlines():
        name, colon, value = line.partition(" #")[0].partition(":")
        if colon and value.strip() and "/" not in value and name.strip() != "local-rank":
            properties[name.strip()] = value.strip()
    return properties


def _differences(first: dict[str, str], other: dict[str, str], rank: int) -> list[str]:
    pairs = {name: (first.get(name, "not given"), other.get(name, "not given")) for name in first | other}
    differing = sorted(name for name, (own, other) in pairs.items() if own != other)
    return [f"{name}: {pairs[name][0]} on rank 0, {pairs[name][1]} on rank {rank}" for name in differing]
