"""Selects the layers of a proxy and places them on its pipeline stages."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from megatron_moe.config.pipeline_layout import PipelineLayout, place_layers


@dataclass(frozen=True)
class SelectedLayers:
    """Layers and pipeline layout of the proxy."""

    layers: tuple[int, ...]
    """Indices of the layers in the full-size model."""
    layout: str | None
    """Pipeline layout string; None for a single stage."""


@dataclass
class _ProxyStage:
    """A stage of the proxy's pipeline, and the layers of the full-size model selected for it."""

    index: int
    """Index of the corresponding stage of the full-size model."""
    layers: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    """Full-size layers that may be placed here: those of stage `index` and of the dropped stages that follow it."""


def select_layers(
    kinds: Sequence[Hashable], layout: PipelineLayout, *, pp: int, vpp: int, num_mtp: int, min_layers: int | None
) -> SelectedLayers:
    """Selects pp x vpp stages of `layout`, and in each of these stages one layer of every kind that it contains.

    The first and the last stage are selected. If pp > 2, the stage with multi-token prediction is selected, too. If a
    kind of layer occurs only in dropped stages, one such layer is added to the selected stage that precedes it. A proxy
    with only one stage has one additional layer unless `min_layers` is given, so that one kind occurs twice. With
    multi-token prediction, whose layer is like the last one, the last layer keeps its kind.

    Args:
        kinds: kind of each layer of the full-size model.
        layout: full-size layout.
        num_mtp: number of multi-token prediction layers of the proxy.
        min_layers: minimum number of layers, if the model has that many.
    """
    num_stages = pp * vpp
    last = len(layout.stages) - 1
    mtp_stage = next((index for index, stage in enumerate(layout.stages) if stage.num_mtp), last)
    indices = _select_stages(kinds, layout, num_stages, mtp_stage if pp > 2 else last)
    stages = [_ProxyStage(index) for index in indices]
    for stage, following in zip(stages, [*indices[1:], last + 1], strict=True):
        stage.candidates = [layer for each in layout.stages[stage.index : following] for layer in each.layers]
        layers = layout.stages[stage.index].layers if num_stages > 1 else stage.candidates
        first_of_kind = {kinds[layer]: layer for layer in reversed(layers)}
        stage.layers = sorted(first_of_kind.values())
    _add_missing_kinds(stages, kinds)
    _add_layers(stages, len(set(kinds)) + 1 if min_layers is None and num_stages == 1 else min_layers or 0)
    if num_mtp:
        _end_with_the_last_kind(stages, kinds, min_layers)
    selected = tuple(layer for stage in stages for layer in stage.layers)
    if pp == 1:
        return SelectedLayers(selected, None)
    holder = indices.index(mtp_stage) if mtp_stage in indices and pp > 2 else num_stages - 1
    return SelectedLayers(selected, str(place_layers([len(stage.layers) for stage in stages], pp, num_mtp, holder)))


def _select_stages(kinds: Sequence[Hashable], layout: PipelineLayout, num_stages: int, mtp_stage: int) -> list[int]:
    """Selects `num_stages` stages and returns their sorted indices. Order of preference: first, last and MTP stage;
    stages with new kinds of layers; stages before the MTP stage; stages whose combination of kinds is frequent."""
    kinds_of = [frozenset(kinds[layer] for layer in stage.layers) for stage in layout.stages]
    last = len(kinds_of) - 1
    selected = list(dict.fromkeys((0, last, mtp_stage)))[:num_stages]
    seen = {kind for index in selected for kind in kinds_of[index]}
    frequency = Counter(kinds_of)
    rest = [index for index in range(1, last) if index not in selected]
    while len(selected) < num_stages:
        best = min(rest, key=lambda i: (not kinds_of[i] - seen, i > mtp_stage, -frequency[kinds_of[i]], i))
        rest.remove(best)
        selected.append(best)
        seen |= kinds_of[best]
    return sorted(selected)


def _add_missing_kinds(stages: Sequence[_ProxyStage], kinds: Sequence[Hashable]) -> None:
    seen = {kinds[layer] for stage in stages for layer in stage.layers}
    for stage in stages:
        for layer in stage.candidates:
            if kinds[layer] not in seen:
                seen.add(kinds[layer])
                stage.layers = sorted([*stage.layers, layer])


def _add_layers(stages: Sequence[_ProxyStage], min_layers: int) -> None:
    """Adds the next candidate of each stage in turn until there are `min_layers` layers or no candidates."""
    missing = min_layers - sum(len(stage.layers) for stage in stages)
    while missing > 0:
        before = missing
        for stage in stages:
            following = [layer for layer in stage.candidates if stage.layers and layer > stage.layers[-1]]
            if following and missing > 0:
                stage.layers.append(following[0])
                missing -= 1
        if missing == before:
            return


def _end_with_the_last_kind(stages: Sequence[_ProxyStage], kinds: Sequence[Hashable], min_layers: int | None) -> None:
    """Ends the selection with the last layer if its own last layer is of another kind. Its own last layer is replaced
    if its stage has another one of its kind; otherwise a layer is added, unless `min_layers` is given."""
    stage = next(stage for stage in reversed(stages) if stage.layers)
    *others, own = stage.layers
    last = len(kinds) - 1
    if kinds[own] == kinds[last]:
        return
    if kinds[own] in {kinds[layer] for layer in others}:
        stage.layers[-1] = last
    elif min_layers is None:
        stage.layers.append(last)
