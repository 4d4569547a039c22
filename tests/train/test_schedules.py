"""Every order of work trains the same weights, bit for bit."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.pipeline.spec import PipelineSpec
from tests import tiny
from tests.pipelines import laid_out, train, train_on_ranks
from tests.tolerances import EXACT

ORDERS = {
    "pairs": PipelineSpec(overlap=True),
    "split": PipelineSpec(split_backward=True),
    "split pairs": PipelineSpec(overlap=True, split_backward=True),
}


@pytest.mark.parametrize("order", ORDERS)
def test_one_stage_trains_the_same_in_every_order(order):
    plain = tiny.plan()
    expected = train(plain, ParallelContext.single(dtype=torch.float64))
    found = train(replace(plain, pipeline=ORDERS[order]), ParallelContext.single(dtype=torch.float64))
    EXACT.check_all(found, expected, order)


def test_chunks_in_pairs_train_the_same_as_without():
    plain = laid_out(tiny.plan(), "Et|t||tL", 2)
    pairs = replace(plain, pipeline=replace(plain.pipeline, overlap=True))
    EXACT.check_all(train_on_ranks(pairs, steps=2), train_on_ranks(plain, steps=2), "pairs over two ranks")
