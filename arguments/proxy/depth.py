"""Fewer layers, with the patterns and the pipeline stages that belong to them."""

from collections.abc import Mapping
from typing import Any

from arguments import derive
from arguments.proxy.draft import Draft
from arguments.proxy.fold import Sizes
from arguments.proxy.layers import fewer_layers

_REASON = "one layer of every kind on every stage"
_OTHER_PLACEMENT = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
"""What places layers besides a layout."""


def lower_depth(draft: Draft, sizes: Sizes) -> None:
    """Keeps as few layers as show every kind on the stages of `sizes`, which look like those at full size."""
    patterns = _patterns(draft, draft.value("num_layers"))
    full = derive.pipeline_layout(**{name: draft.value(name) for name in derive.PLACEMENT})
    num_mtp = min(draft.value("mtp_num_layers") or 0, 2)
    vpp = 2 if full.vpp > 1 and sizes.pp > 1 else 1
    kept = fewer_layers(
        list(zip(*patterns.values(), strict=True)),
        full,
        pp=sizes.pp,
        vpp=vpp,
        num_mtp=num_mtp,
        at_least=draft.pinned["num_layers"].value if "num_layers" in draft.pinned else None,
    )
    draft.put("num_layers", len(kept.layers), _REASON)
    for name, entries in patterns.items():
        _keep_pattern(draft, name, tuple(entries[layer] for layer in kept.layers))
    draft.lower("mtp_num_layers", num_mtp, "as few as follow each other")
    draft.lower("recompute_num_layers", 1, "stages have few layers")
    draft.lower("cpu_offloading_num_layers", 1, "stages have few layers")
    _place(draft, kept.layout)


def _patterns(draft: Draft, num_layers: int) -> Mapping[str, tuple[Any, ...]]:
    """What distinguishes layers: one entry per layer, as it stands in a list behind the flag."""
    moe = derive.moe_layers(num_layers, draft.value("num_experts"), draft.value("moe_layer_freq"))
    windowed = derive.windowed_layers(num_layers, draft.value("window_size"), draft.value("window_attn_skip_freq"))
    rotated = derive.rotated_layers(num_layers, draft.value("no_rope_freq"))
    return {
        "moe_layer_freq": tuple(map(int, moe)),
        "window_attn_skip_freq": tuple(map(int, windowed)),
        "no_rope_freq": tuple(int(not turns) for turns in rotated),
        "cp_comm_type": derive.context_exchanges(num_layers, draft.value("cp_comm_type")),
    }


def _keep_pattern(draft: Draft, name: str, entries: tuple[Any, ...]) -> None:
    """Leaves a rule that means `entries` for these layers too, and writes a list otherwise."""
    old = draft.value(name)
    if old is None or (name == "cp_comm_type" and len(old) == 1):
        return
    if isinstance(old, int):
        fits = name != "no_rope_freq" or len(entries) % old == 0
        if fits and _patterns(draft, len(entries))[name] == entries:
            return
    draft.put(name, entries, "the layers that are left")


def _place(draft: Draft, layout: str | None) -> None:
    for name in _OTHER_PLACEMENT:
        draft.default(name, "the layout says it" if layout else "there is one stage")
    reason = "the stages at full size with fewer layers" if layout else "there is one stage"
    draft.put("pipeline_model_parallel_layout", layout, reason)
