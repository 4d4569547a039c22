"""Replica check: compares checksums of replicated parameters over data-parallel ranks."""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatron_moe.config.exit_codes import DriftProblem
from megatron_moe.config.text import listed
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.parameter import Parameter, named_parameters


def check_replicas(model: nn.Module, context: ParallelContext, iteration: int) -> None:
    """Checks by checksums that all data-parallel replicas of every parameter are equal. Collective over all ranks.
    Copies one parameter at a time to the host.

    Raises DriftProblem on every rank if replicas differ. The message names the parameters and the ranks.
    """
    lines = []
    for grid, name in (("attention", "dp_cp"), ("expert", "edp")):
        group = context.group(name)
        checksums = {key: _checksum(value) for key, value in named_parameters(model) if value.meta.grid == grid}
        # collective over dp_cp, edp: a few dozen bytes per parameter of every rank
        lines += differing_replicas(gather_objects(checksums, group), group)
    # collective over world: empty lists unless replicas differ
    every = sorted({line for part in gather_objects(lines, context.group("world")) for line in part})
    if every:
        raise DriftProblem(
            f"iteration {iteration}: copies of the same weights differ; suspect the hardware of the ranks named, "
            f"exclude their node and restart from the newest earlier checkpoint:\n  {listed(every)}"
        )


def differing_replicas(checksums: Sequence[Mapping[str, int]], group: ProcessGroup) -> list[str]:
    """One line per parameter whose replicas differ; it names the ranks that differ from the majority.

    Without a majority, it names all ranks. `checksums`: per rank of the group, parameter name -> checksum.
    """
    lines = []
    for name in checksums[0]:
        found = [each[name] for each in checksums]
        common, count = Counter(found).most_common(1)[0]
        if count == len(found):
            continue
        if 2 * count > len(found):
            odd = [rank for rank, value in zip(group.ranks, found, strict=True) if value != common]
            lines.append(f"{name}: rank {', '.join(map(str, odd))} of {len(found)} differs from the others")
        else:
            lines.append(f"{name}: ranks {', '.join(map(str, group.ranks))} have no majority value")
    return lines


def _checksum(parameter: Parameter) -> int:
    """crc32 of the parameter's bytes, and of its scales if it is stored in FP8 or FP4."""
    checksum = 0
    for tensor in parameter.stored_tensors:
        flat = tensor.cpu().contiguous().view(-1)
        checksum = zlib.crc32(flat.view(torch.uint8).numpy().data, checksum) if flat.numel() else checksum
    return checksum
