"""Boxes of a parameter that each rank owns under tensor and expert parallelism."""

from itertools import product

import pytest
import torch

from megatron_moe.config.param_meta import ParamBox, ParamMeta, local_boxes, local_shape
from megatron_moe.parallel.parameter import local_shard, write_shard
from tests.helpers.tolerances import EXACT

QKV = ParamMeta(role="matrix", tp_dim=0, splits=(4, 2, 2))
GATED = ParamMeta(role="matrix", tp_dim=0, splits=(6, 6))
STACK = ParamMeta(role="matrix", grid="expert", num_experts=4, tp_dim=0, splits=(6, 6))
CASES = {
    "columns": ((12, 5), ParamMeta(role="matrix", tp_dim=0)),
    "rows": ((5, 12), ParamMeta(role="matrix", tp_dim=1)),
    "replicated": ((5, 3), ParamMeta(role="norm")),
    "vector": ((12,), ParamMeta(role="bias", tp_dim=0)),
    "gate and up": ((12, 5), GATED),
    "query groups": ((32, 5), QKV),
    "experts": ((4, 12, 5), STACK),
    "rows of experts": ((4, 5, 12), ParamMeta(role="matrix", grid="expert", num_experts=4, tp_dim=1)),
    "replicated over etp": ((4, 5), ParamMeta(role="bias", grid="expert", num_experts=4)),
}


@pytest.mark.parametrize(("shape", "meta"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4)])
def test_the_parts_of_all_ranks_make_the_whole_and_each_element_is_held_once(shape, meta, tp, ep):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    joined = torch.full_like(whole, -1)
    num_held = 0
    for i, j in product(range(tp), range(ep)):
        boxes = local_boxes(shape, meta, tp=(i, tp), ep=(j, ep))
        part = local_shard(whole, boxes, meta)
        assert tuple(part.shape) == local_shape(boxes, meta)
        write_shard(joined, part, boxes, meta)
        num_held += part.numel()
    EXACT.check(joined, whole, "joined")
    copies = (1 if meta.tp_dim is not None else tp) * (1 if meta.num_experts else ep)
    assert num_held == copies * whole.numel()


def test_one_rank_holds_everything_as_one_box():
    assert local_boxes((12, 5), GATED, tp=(0, 1), ep=(0, 1)) == (ParamBox((0, 0), (12, 5)),)


def test_gate_and_up_are_each_cut():
    assert local_boxes((12, 5), GATED, tp=(1, 2), ep=(0, 1)) == (ParamBox((3, 0), (3, 5)), ParamBox((9, 0), (3, 5)))


def test_a_rank_gets_whole_query_groups():
    """With four groups of eight rows, the second of two ranks owns groups 2 and 3 as one range."""
    assert local_boxes((32, 5), QKV, tp=(1, 2), ep=(0, 1)) == (ParamBox((16, 0), (16, 5)),)


def test_a_rank_gets_a_range_of_experts_and_its_share_of_each():
    boxes = local_boxes((4, 12, 5), STACK, tp=(0, 2), ep=(1, 2))
    assert boxes == (ParamBox((2, 0, 0), (2, 3, 5)), ParamBox((2, 6, 0), (2, 3, 5)))
    assert local_shape(boxes, STACK) == (2, 6, 5)


@pytest.mark.parametrize(
    ("shape", "meta", "tp", "what"),
    [
        ((13, 5), ParamMeta(role="matrix", tp_dim=0), 2, "13 rows or columns"),
        ((10, 5), ParamMeta(role="matrix", tp_dim=0, splits=(5, 5)), 2, "5 rows or columns of one part"),
        ((24, 5), QKV, 2, "3 query groups"),
        ((3, 12, 5), ParamMeta(role="matrix", grid="expert", num_experts=3), 1, "3 experts"),
    ],
)
def test_an_indivisible_dim_is_an_error_with_its_numbers(shape, meta, tp, what):
    with pytest.raises(AssertionError, match=f"{what} cannot be divided equally among 2 ranks"):
        local_boxes(shape, meta, tp=(0, tp), ep=(0, 1 if tp == 2 else 2))
