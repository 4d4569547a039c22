"""Number of times that a rank gathers the sharded weights of each layer in one step (ZeRO-3).

Layers share the memory of gathered weights, so a layer is gathered for each use unless it is one of the last layers
that were used: the last layers of a forward are still in memory when its backward begins, and the first layers of a
model chunk when the next microbatch enters it. The simulation follows the order of the pipeline schedule and the rules
of `GatheringStore`, whose prefetches gather only the layer that is used next.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Literal, NamedTuple

from megatron_moe.config.fsdp import NUM_BUFFERS, FSDPConfig
from megatron_moe.config.param_meta import Grid
from megatron_moe.config.pipeline_layout import StageLayout
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.shards import unit_sizes, units_in_turn
from megatron_moe.pipeline.actions import Entry, OverlappedPair
from megatron_moe.pipeline.schedule import computations

NUM_GROUPS = 6
"""Number of microbatch groups to simulate. Every further group adds the same gathers."""


class UnitGathers(NamedTuple):
    """Size of a unit, and number of times per step that its weights are gathered."""

    num_elements: int
    times: int


def unit_gathers(plan: RunPlan, rank: int, grid: Grid) -> dict[str, UnitGathers]:
    """Gathers of all units of a pipeline rank by unit name: layers, and embedding, head and MTP layers of several
    depths, which are gathered once per step."""
    sizes = unit_sizes(plan, rank)[grid]
    times = _gathers_of_layers(plan, rank, grid, units_in_turn(plan, sizes))
    return {unit: UnitGathers(size, times.get(unit, 1)) for unit, size in sizes.items()}


def _gathers_of_layers(plan: RunPlan, rank: int, grid: Grid, units: Sequence[str]) -> Counter[str]:
    """Gathers per step of each of the `units`, the layers of one grid in model order."""
    schedule = plan.pipeline_schedule(plan.num_microbatches)
    total, group = schedule.num_microbatches, schedule.group
    few = replace(schedule, num_microbatches=min(total, NUM_GROUPS * group + total % group))
    found = _simulated(plan, rank, grid, units, computations(few, rank))
    groups_left = (total - few.num_microbatches) // group
    if groups_left:
        fewer = replace(few, num_microbatches=few.num_microbatches - group)
        before = _simulated(plan, rank, grid, units, computations(fewer, rank))
        found = Counter({unit: count + groups_left * (count - before[unit]) for unit, count in found.items()})
    return found


def _simulated(plan: RunPlan, rank: int, grid: Grid, units: Sequence[str], entries: Iterable[Entry]) -> Counter[str]:
    config = plan.data_parallel.fsdp
    assert config is not None, "the run shards no weights"
    chunks = [_blocks(plan, stage, grid, units) for stage in plan.layout.chunks(rank)]
    present = _Present(config, units)
    for entry in entries:
        for unit, following in _uses(entry, chunks, grid):
            if unit:
                present.use(unit)
            if following and following not in present.layers:
                present.use(following)
                if unit and grid == "attention":  # several nodes of a layer use the unit, but one node its experts
                    present.use(unit)
    return present.gathers


def _blocks(plan: RunPlan, stage: StageLayout, grid: Grid, units: Collection[str]) -> list[list[str]]:
    """Units of the layers of a model chunk, in blocks of layers that are recomputed together; "" for layers without a
    unit of the grid."""
    recompute, suffix = plan.memory.recompute, ".experts" if grid == "expert" else ""
    size = recompute.recompute_num_layers if recompute.recompute_method == "uniform" else 1
    layers = [f"layers.{layer}{suffix}" for layer in stage.layers]
    blocks = [layers[first : first + size] for first in range(0, len(layers), size)]
    blocks += [[f"mtp.{depth}{suffix}"] for depth in range(stage.num_mtp)]
    return [[unit if unit in units else "" for unit in block] for block in blocks]


def _uses(entry: Entry, chunks: Sequence[list[list[str]]], grid: Grid) -> Iterator[tuple[str, str]]:
    """Yields (unit, unit that is prefetched during its use) in the order in which an entry of the schedule uses them;
    "" if there is none."""
    if isinstance(entry, OverlappedPair):
        forward, backward = chain(*chunks[entry.forward.chunk]), chain(*chunks[entry.backward.chunk])
        for ahead, behind in zip_longest(_with_next(forward), _with_next(backward, -1), fillvalue=("", "")):
            if grid == "attention":
                yield from (ahead, behind)
            else:  # attention, whose nodes prefetch experts, precedes the experts in forward and follows in backward
                yield from (("", ahead[0] or ahead[1]), behind, ahead, ("", behind[1]))
    elif entry.kind == "forward":
        yield from _with_next(chain(*chunks[entry.chunk]))
    elif entry.kind in ("backward", "backward_input"):
        following = dict(_with_next(chain(*chunks[entry.chunk]), -1))
        for block in reversed(chunks[entry.chunk]):
            yield from ((unit, "") for unit in block)  # recomputed forward, if any
            yield from ((unit, following[unit]) for unit in reversed(block) if unit)


def _with_next(units: Iterable[str], step: Literal[1, -1] = 1) -> list[tuple[str, str]]:
    """Pairs every unit with the next one that is not "". `step`: -1 for the reverse order."""
    found, following = list[tuple[str, str]](), ""
    for unit in list(units)[::-step]:
        found.append((unit, following))
        following = unit or following
    return found[::-1]


class _Present:
    """Layers with gathered weights, as `GatheringStore` keeps them."""

    def __init__(self, config: FSDPConfig, units: Sequence[str]) -> None:
        self.gathers = Counter[str]()
        self._buffers = {unit: index % NUM_BUFFERS for index, unit in enumerate(units)}
        self._double_buffer, self._most = config.fsdp_double_buffer, NUM_BUFFERS * config.num_passes
        self.layers: list[str] = []
        """The least recently used layer comes first."""

    def use(self, unit: str) -> None:
        self.gathers[unit] += unit not in self.layers
        others = [each for each in self.layers if each != unit]
        if self._double_buffer:
            others = [each for each in others if self._buffers[each] != self._buffers[unit]]
        self.layers = [*others, unit][-self._most :]
