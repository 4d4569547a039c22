"""Fewer layers: which ones stay, and on which pipeline stages they stand."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from megatron_moe.pipeline.layout import PipelineLayout, place_layers


@dataclass(frozen=True)
class Kept:
    """What is left of the layers."""

    layers: tuple[int, ...]
    """Indices in the model at full size."""
    layout: str | None
    """Of the stages, in the layout language; None where there is one stage."""


@dataclass
class _Stage:
    """A stage that stays."""

    first: int
    """Where it stood among all stages."""
    layers: list[int] = field(default_factory=list)
    range: list[int] = field(default_factory=list)
    """Layers that it may take: its own and those of the stages behind it that go."""


def fewer_layers(
    kinds: Sequence[Hashable], layout: PipelineLayout, *, pp: int, vpp: int, num_mtp: int, at_least: int | None
) -> Kept:
    """One layer of every kind that a stage has, on pp x vpp stages that look like those of `layout`.

    The first and the last stage stay, and the one with multi-token prediction where a pipeline of `pp` ranks may have
    it apart from the loss. A kind that no stage shows goes to the stage before its place. A single stage keeps one
    layer more than there are kinds, so that layers follow each other.

    Args:
        kinds: what distinguishes the layers at full size, one entry per layer.
        layout: of all stages at full size.
        num_mtp: layers of multi-token prediction that are left.
        at_least: layers to keep if there are so many, besides those.
    """
    num_stages = pp * vpp
    mtp_stage = next((index for index, stage in enumerate(layout.stages) if stage.num_mtp), len(layout.stages) - 1)
    stays = _stages_that_stay(kinds, layout, num_stages, mtp_stage if pp > 2 else len(layout.stages) - 1)
    stages = [_Stage(index) for index in stays]
    for stage, following in zip(stages, [*stays[1:], len(layout.stages)], strict=True):
        stage.range = [layer for each in layout.stages[stage.first : following] for layer in each.layers]
        own = layout.stages[stage.first].layers if num_stages > 1 else stage.range
        stage.layers = _one_of_each(own, kinds)
    _add_missing_kinds(stages, kinds)
    _add_layers(stages, len(set(kinds)) + 1 if at_least is None and num_stages == 1 else at_least or 0)
    layers = tuple(layer for stage in stages for layer in stage.layers)
    if pp == 1:
        return Kept(layers, None)
    holder = stays.index(mtp_stage) if mtp_stage in stays and pp > 2 else num_stages - 1
    placed = place_layers([len(stage.layers) for stage in stages], pp, num_mtp, holder)
    return Kept(layers, str(placed))


def _stages_that_stay(kinds: Sequence[Hashable], layout: PipelineLayout, num_stages: int, mtp_stage: int) -> list[int]:
    """The ends and the stage with multi-token prediction; between them those that show another kind, then those that
    look like most stages do, if possible before multi-token prediction."""
    shows = [frozenset(kinds[layer] for layer in stage.layers) for stage in layout.stages]
    last = len(shows) - 1
    stays = list(dict.fromkeys((0, last, mtp_stage)))[:num_stages]
    seen = {kind for index in stays for kind in shows[index]}
    usual = Counter(shows)
    others = [index for index in range(1, last) if index not in stays]
    while len(stays) < num_stages:
        best = min(others, key=lambda index: (not shows[index] - seen, index > mtp_stage, -usual[shows[index]], index))
        others.remove(best)
        stays.append(best)
        seen |= shows[best]
    return sorted(stays)


def _one_of_each(layers: Sequence[int], kinds: Sequence[Hashable]) -> list[int]:
    """The first layer of every kind."""
    first: dict[Hashable, int] = {}
    for layer in layers:
        first.setdefault(kinds[layer], layer)
    return sorted(first.values())


def _add_missing_kinds(stages: Sequence[_Stage], kinds: Sequence[Hashable]) -> None:
    shown = {kinds[layer] for stage in stages for layer in stage.layers}
    for stage in stages:
        for layer in stage.range:
            if kinds[layer] not in shown:
                shown.add(kinds[layer])
                stage.layers = sorted([*stage.layers, layer])


def _add_layers(stages: Sequence[_Stage], at_least: int) -> None:
    """Goes round the stages; each takes the layer behind its last one."""
    while sum(len(stage.layers) for stage in stages) < at_least:
        before = sum(len(stage.layers) for stage in stages)
        for stage in stages:
            behind = [layer for layer in stage.range if stage.layers and layer > stage.layers[-1]]
            if behind and sum(len(each.layers) for each in stages) < at_least:
                stage.layers.append(behind[0])
        if sum(len(stage.layers) for stage in stages) == before:
            return
