"""docs/tour.md lists the files that a token passes in the forward and backward pass of an expert-parallel MoE layer on
a GPU host.
"""

import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.transport import SYMMETRIC
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.layers.node_chain import LayerState, run_nodes
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.init import init_parameters
from megatron_moe.model.transformer_layer import TransformerLayer
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import HIDDEN, UNIT_GAIN, layer_config, make_mb, moe_config, randn
from tests.house_rules.source import ROOT

MOST_FILES = 16
BACKENDS = re.compile(r"kernels/(?!ops\.py|autograd\.py)")
"""Implementations of the `Kernels` interface."""


def listed_files() -> list[str]:
    section = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8").split("### A token through", 1)[1]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section.split("\n## ", 1)[0], re.MULTILINE)


def executed_files(run: Callable[[], Any]) -> set[str]:
    """Files below megatron_moe with a function that `run` calls on this thread, without kernel backends and configs."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename.partition("/megatron_moe/")[2]
        if event == "call" and path and not path.startswith("config/") and not BACKENDS.match(path):
            files.add(path)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files


def both_directions(context: ParallelContext) -> set[str]:
    """Files that run in the nodes of an MoE layer from the router to the residual connection, and in their backward,
    with the transport of a GPU host. A first exchange allocates its buffers."""
    moe = tiny.moe(moe_config().router, dispatcher="flex")
    resources = ModelResources(context, reference.bundle(), SavedTensorPolicy())
    layer = TransformerLayer(layer_config(feed_forward=moe), 0, "decoder.layers.0", resources)
    assert layer.mlp.expert_comm.kind is SYMMETRIC
    init_parameters(layer, 5, UNIT_GAIN)
    mb, normed_SBH = make_mb(2, 5), randn(5, 2, HIDDEN).requires_grad_()

    def run() -> None:
        state = LayerState(hidden_SBH=randn(5, 2, HIDDEN), normed_SBH=normed_SBH)
        run_nodes(layer.nodes[1:], state, mb).hidden_SBH.sum().backward()

    run()
    return executed_files(run)


def test_tour_lists_the_files_on_the_path_of_a_token():
    listed = listed_files()
    assert len(listed) == len(set(listed)) <= MOST_FILES, listed
    assert all((ROOT / "megatron_moe" / path).is_file() for path in listed), listed
    for executed in on_threads(ParallelConfig(world_size=2, ep=2), both_directions):
        assert executed == set(listed)
