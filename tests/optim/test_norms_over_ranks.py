"""Gradient norm, number of zeros and weight norm in every fold of 4 and 8 ranks count each element once."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.pipeline_layout import parse_layout
from megatron_moe.optim.clip_grads import count_zeros
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny
from tests.helpers.optim_ranks import NUM_LAYERS, SPEC, make_optimizer, my_gradients, run_alone, step_with
from tests.helpers.pipelines import make_trainer
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT


def folds(world_size: int) -> Iterator[ParallelConfig]:
    """Yields every layout that fits the query groups (tp), layers (pp) and experts (ep) of the test parameters."""
    sizes = [size for size in (1, 2, 4, 8) if size <= world_size]
    for pp in sizes:
        ranks = world_size // pp
        for tp in (size for size in sizes if size <= 4 and ranks % size == 0 and pp <= NUM_LAYERS):
            for etp in (size for size in sizes if size <= 4 and ranks % size == 0):
                for ep in (size for size in sizes if ranks % (size * etp) == 0):
                    yield ParallelConfig(world_size=world_size, tp=tp, pp=pp, ep=ep, etp=etp)


def name_of(config: ParallelConfig) -> str:
    return f"pp{config.pp}-tp{config.tp}-etp{config.etp}-ep{config.ep}"


FOLDS = {world_size: {name_of(config): config for config in folds(world_size)} for world_size in (4, 8)}


def measured(context: ParallelContext, sharded: bool) -> dict[str, Tensor]:
    optimizer = make_optimizer(context, DataParallelConfig(use_distributed_optimizer=sharded, ddp_bucket_size=100))
    norms = step_with(optimizer, my_gradients(optimizer, 0))
    return {**norms, "zeros": count_zeros(optimizer.buffers), "weights": optimizer.params_norm()}


def expected(config: ParallelConfig) -> dict[str, Tensor]:
    alone = run_alone(config, num_steps=1)
    return {**alone.norms[0], "zeros": count_zeros(alone.optimizer.buffers), "weights": alone.optimizer.params_norm()}


def check(config: ParallelConfig, sharded: bool) -> None:
    oracle = expected(config)
    assert oracle["all"] > SPEC.clip_grad and oracle["zeros"] > 0
    for rank, found in enumerate(on_threads(config, lambda context: measured(context, sharded))):
        EXACT.check(found.pop("zeros"), oracle["zeros"], f"zeros on rank {rank}")
        FP64_LAYOUT.check_all(found, {part: oracle[part] for part in found}, f"norms on rank {rank}")


@pytest.mark.parametrize("config", FOLDS[4].values(), ids=FOLDS[4])
def test_norms_in_every_fold_of_four_ranks_are_those_of_one(config: ParallelConfig) -> None:
    for sharded in (False, True):
        check(config, sharded)


@pytest.mark.parametrize("config", FOLDS[8].values(), ids=FOLDS[8])
def test_norms_in_every_fold_of_eight_ranks_are_those_of_one(config: ParallelConfig) -> None:
    check(config, sharded=True)


def test_a_non_finite_element_on_any_rank_makes_the_norm_non_finite_on_all() -> None:
    def norm(context: ParallelContext, bad_rank: int) -> Tensor:
        optimizer = make_optimizer(context, DataParallelConfig(use_distributed_optimizer=True))
        gradients = my_gradients(optimizer, 0)
        if context.rank == bad_rank:
            next(iter(gradients.values())).view(-1)[-1] = torch.nan
        return step_with(optimizer, gradients, apply_update=False)["all"]

    for bad_rank in range(4):
        for found in on_threads(ParallelConfig(world_size=4, pp=2, ep=2), lambda context, b=bad_rank: norm(context, b)):
            assert torch.isnan(found), f"{found} with a bad element on rank {bad_rank}"


def test_a_stage_without_layers_counts_nothing() -> None:
    layout = parse_layout("Et||tt|L", pp=4, num_layers=3, num_mtp=None)
    parallel = ParallelConfig(world_size=4, pp=4, embedding_ranks=(0,))
    plan = tiny.plan(parallel=parallel, pipeline=PipelineConfig(layout=layout))

    def measured(context: ParallelContext) -> tuple[bool, Tensor]:
        optimizer = make_trainer(plan, context).optimizer
        return bool(optimizer.states), optimizer.params_norm()

    alone = replace(plan, parallel=ParallelConfig(), pipeline=PipelineConfig())
    expected = make_trainer(alone, ParallelContext.single()).optimizer.params_norm()
    found = on_threads(parallel, measured)
    assert [holds for holds, _ in found] == [True, False, True, True]
    for rank, (_, norm) in enumerate(found):
        FP64_LAYOUT.check(norm, expected, f"norm of the weights on rank {rank}")
