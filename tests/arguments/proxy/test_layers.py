"""Selection of the layers and pipeline stages that a proxy keeps."""

import pytest

from arguments.proxy.layers import SelectedLayers, select_layers
from megatron_moe.config.pipeline_layout import parse_layout


def selected(
    kinds: str, layout: str, *, full_pp: int, pp: int, vpp: int = 1, min_layers: int | None = None
) -> SelectedLayers:
    """Kinds of the selected layers, one letter per layer."""
    full = parse_layout(layout, pp=full_pp, num_layers=len(kinds), num_mtp=None)
    num_mtp = sum(stage.num_mtp for stage in full.stages)
    return select_layers(kinds, full, pp=pp, vpp=vpp, num_mtp=num_mtp, min_layers=min_layers)


DEEPSEEK = "d" * 3 + "m" * 58


@pytest.mark.parametrize(
    ("layout", "full_pp", "pp", "vpp", "text", "layers"),
    [
        ("Et|(tt|)*30mL", 8, 2, 2, "Et|(t|)*2mL", "dmm"),
        ("Et*3|(tt|)*29m|L", 16, 4, 2, "Et|(t|)*5m|L", "dmmmmm"),
        ("Et*3|(tt|)*29m|L", 16, 2, 2, "Et|(t|)*2mL", "dmm"),
        ("E|(tttt|)*15tL", 17, 4, 1, "E|tt|t|tL", "dmmm"),
        ("Et*31|t*30mL", 2, 1, 1, None, "dmm"),
    ],
)
def test_deepseek_v3_keeps_the_shape_of_its_stages(layout, full_pp, pp, vpp, text, layers):
    result = selected(DEEPSEEK, layout, full_pp=full_pp, pp=pp, vpp=vpp)
    assert result.layout == text
    assert "".join(DEEPSEEK[layer] for layer in result.layers) == layers


def test_a_stage_keeps_one_layer_of_each_kind():
    result = selected("wf" * 8, "Etttt|tttt|tttt|ttttL", full_pp=4, pp=2)
    assert result == SelectedLayers((0, 1, 12, 13), "Ett|ttL")


def test_a_kind_of_a_dropped_stage_moves_to_the_preceding_stage():
    assert selected("aaabaaaa", "Ett|tt|tt|ttL", full_pp=4, pp=2) == SelectedLayers((0, 3, 6), "Ett|tL")


def test_layers_stay_in_order_on_one_stage_each():
    result = selected("abcabcabcabc", "Et|t|tt|tt|t|t|tt|ttL", full_pp=4, pp=2, vpp=2)
    assert list(result.layers) == sorted(set(result.layers))
    assert result.layout is not None and result.layout.count("t") <= len(result.layers)
    parse_layout(result.layout, pp=2, num_layers=len(result.layers))


def test_a_single_stage_keeps_one_more_layer_than_kinds():
    assert selected("wf" * 4, "Et*8L", full_pp=1, pp=1) == SelectedLayers((0, 1, 2), None)
    assert selected("m", "EtL", full_pp=1, pp=1) == SelectedLayers((0,), None)


def test_the_layer_of_multi_token_prediction_keeps_its_kind():
    """It is like the last layer."""
    assert selected("llla" * 4, "Et*16mL", full_pp=1, pp=1).layers == (0, 3, 15)
    assert selected("llla" * 4, "Et*16L", full_pp=1, pp=1).layers == (0, 3, 4)
    assert selected("llla" * 4, "Ett|t*14mL", full_pp=2, pp=2).layers == (0, 2, 3)
    assert selected("lllalalla", "Ett|t|t*6mL", full_pp=3, pp=2).layers == (0, 3, 4, 8)
    assert selected("lllalalla", "Ett|t|t*6mL", full_pp=3, pp=2, min_layers=3).layers == (0, 3, 4)


def test_more_layers_are_kept_on_request():
    assert selected(DEEPSEEK, "Et*61L", full_pp=1, pp=1, min_layers=5).layers == (0, 3, 4, 5, 6)
    assert len(selected(DEEPSEEK, "Et*31|t*30L", full_pp=2, pp=2, min_layers=7).layers) == 7
    assert len(selected("mm", "EttL", full_pp=1, pp=1, min_layers=7).layers) == 2
