"""Which layers stay, and how their stages look."""

import pytest

from arguments.proxy.layers import Kept, fewer_layers
from megatron_moe.pipeline.layout import parse_layout


def kept(kinds: str, layout: str, *, full_pp: int, pp: int, vpp: int = 1, at_least: int | None = None) -> Kept:
    """One letter of `kinds` per layer."""
    full = parse_layout(layout, pp=full_pp, num_layers=len(kinds), num_mtp=None)
    num_mtp = sum(stage.num_mtp for stage in full.stages)
    return fewer_layers(kinds, full, pp=pp, vpp=vpp, num_mtp=num_mtp, at_least=at_least)


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
def test_stages_of_deepseek_v3_look_as_at_full_size(layout, full_pp, pp, vpp, text, layers):
    found = kept(DEEPSEEK, layout, full_pp=full_pp, pp=pp, vpp=vpp)
    assert found.layout == text
    assert "".join(DEEPSEEK[layer] for layer in found.layers) == layers


def test_a_stage_keeps_one_layer_of_every_kind_it_has():
    found = kept("wf" * 8, "Etttt|tttt|tttt|ttttL", full_pp=4, pp=2)
    assert found == Kept((0, 1, 12, 13), "Ett|ttL")


def test_a_kind_of_a_stage_that_goes_moves_to_the_stage_before():
    assert kept("aaabaaaa", "Ett|tt|tt|ttL", full_pp=4, pp=2) == Kept((0, 3, 6), "Ett|tL")


def test_layers_stay_in_order_and_stand_on_one_stage_each():
    found = kept("abcabcabcabc", "Et|t|tt|tt|t|t|tt|ttL", full_pp=4, pp=2, vpp=2)
    assert list(found.layers) == sorted(set(found.layers))
    assert found.layout is not None and found.layout.count("t") <= len(found.layers)
    parse_layout(found.layout, pp=2, num_layers=len(found.layers))


def test_one_stage_keeps_a_layer_behind_the_last_kind():
    assert kept("wf" * 4, "Et*8L", full_pp=1, pp=1) == Kept((0, 1, 2), None)
    assert kept("m", "EtL", full_pp=1, pp=1) == Kept((0,), None)


def test_more_layers_are_kept_on_request():
    assert kept(DEEPSEEK, "Et*61L", full_pp=1, pp=1, at_least=5).layers == (0, 3, 4, 5, 6)
    assert len(kept(DEEPSEEK, "Et*31|t*30L", full_pp=2, pp=2, at_least=7).layers) == 7
    assert len(kept("mm", "EttL", full_pp=1, pp=1, at_least=7).layers) == 2
