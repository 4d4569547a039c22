"""Diagnosis of a step with a non-finite weight gradient."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_moe.build import build_data, build_train_loader
from megatron_moe.optim.grad_buffers import MainGrad
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.nan_diagnosis import RankReport, diagnose
from megatron_moe.train.train_state import TrainState
from tests.helpers.pipelines import make_trainer
from tests.helpers.ranks import on_threads
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of


@pytest.mark.parametrize("zero", ["on", "grads", "params"])
@pytest.mark.parametrize("name", ["self_attention.linear_proj", "mlp.experts.linear_fc2"])
def test_the_parameter_and_the_rank_of_a_nonfinite_gradient_are_named(zero: str, name: str) -> None:
    """Layers share the memory of sharded gradients, which the reduction overwrites with sums over the ranks."""
    plan, broken = plan_of(cell_of(f"dp=2 zero={zero} balance=none")), f"decoder.layers.1.{name}.weight"

    def break_gradient(each: MainGrad) -> None:
        take = each._take

        def compute_nan(compute: Callable[[Tensor, bool], None], out: Tensor, accumulate: bool) -> None:
            compute(out, accumulate)
            out.view(-1)[:1] = torch.nan

        each._take = lambda compute: take(partial(compute_nan, compute))

    def run(context: ParallelContext) -> list[RankReport]:
        trainer, loader = make_trainer(plan, context), build_train_loader(plan, context, build_data(plan, context))
        for each in trainer.buffers.main_grads:
            if each.name == broken and context.rank == 1:
                break_gradient(each)
        outcome = trainer.step(loader.next_step(), TrainState())
        return diagnose(trainer, outcome.result(outcome.scalars(), 0.0), loader, repeat=True)

    for reports in on_threads(plan.parallel, run):
        assert [[(found.kind, found.name) for found in report.findings] for report in reports] == [
            [],
            [("gradient", broken)],
        ]
