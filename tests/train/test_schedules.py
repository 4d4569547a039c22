"""Every order of work trains the same weights, bit for bit."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.build import build_data, build_model, introduction
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny
from tests.helpers.pipelines import KERNELS, laid_out, train, train_on_ranks
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

ORDERS = {
    "pairs": PipelineConfig(overlap=True),
    "split": PipelineConfig(delay_wgrad_compute=True),
    "split pairs": PipelineConfig(overlap=True, delay_wgrad_compute=True),
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


def test_the_log_of_a_pipeline_begins_with_its_stages():
    plan = laid_out(tiny.plan(), "Ett|tL", 2)

    def told(context: ParallelContext) -> str:
        datasets = build_data(plan, context)
        return "\n".join(introduction(plan, context, build_model(plan, context, KERNELS), datasets))

    first, second = on_threads(plan.parallel, told)
    for text in (first, second):
        assert "pipeline layout Ett|tL, cost in operations:" in text
        assert "    1    1     0  layer 2, final norm, loss" in text
