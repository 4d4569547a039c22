"""Steps whose expert rows exceed `--moe-expert-rank-capacity-factor` are repeated with a larger bound; steps whose rows
exceed the pages of `--moe-paged-stash` are repeated without the stash."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from megatron_moe import build
from megatron_moe.config.memory import CudaGraphConfig, MemoryConfig, PagedStashConfig, RecomputeConfig
from megatron_moe.config.optimizer import LossScaleConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.resilience import ResilienceConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.data.loader import TrainLoader
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.logs.log_line import StepResult
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.evaluation import evaluate
from megatron_moe.train.step_supervisor import StepSupervisor
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer
from megatron_moe.train.training_log import TrainingLog
from tests.helpers import tiny
from tests.helpers.eager_graphs import EagerRecorder
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

STEPS = 4
EP2 = ParallelConfig(world_size=2, ep=2)
GRAPHS = [
    CudaGraphConfig(cuda_graph_modules=("attn", "mlp", "moe"), cuda_graph_warmup_steps=1),
    CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1),
]
BIASED = tiny.router(score_function="sigmoid", expert_bias=True, bias_update_rate=0.1)


class Reports:
    """Reporter that collects notes, step results and metrics."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.results: list[StepResult] = []
        self.metrics: list[Any] = []
        self.note, self.observe, self.report_steps = self.notes.append, self.results.append, self.metrics.append

    def is_due(self, iteration: int) -> bool:
        return iteration % 2 == 0


def plan(factor: float | None, **changes: Any) -> RunPlan:
    moe = tiny.moe(BIASED, dispatcher="flex", expert_rank_capacity_factor=factor)
    resilience = ResilienceConfig(check_for_spiky_loss=True, check_for_large_grads=True, on_spike="stop")
    return tiny.plan(model=tiny.model(moe_config=moe), resilience=resilience, **changes)


def setup(plan: RunPlan, context: ParallelContext) -> tuple[Trainer, TrainLoader]:
    kernels = reference.bundle()
    trainer = build.build_trainer(plan, context, build.build_model(plan, context, kernels), kernels)
    build.record_steps(trainer, EagerRecorder(), plan.cuda_graphs)
    return trainer, build.build_train_loader(plan, context, build.build_data(plan, context))


def train(
    plan: RunPlan, context: ParallelContext, read_each: bool = False, make: Any = setup
) -> tuple[Reports, dict[str, Tensor], float]:
    """`read_each`: reads the result of every step immediately, as before a save."""
    trainer, loader = make(plan, context)
    reports, state, config = Reports(), TrainState(), build.build_train_state_config(plan)
    supervisor = StepSupervisor(trainer, TrainingLog(trainer, reports), loader)
    for _ in range(STEPS):
        outcome = supervisor.step(state)
        state.advance(outcome.counts, config)
        supervisor.after_step(outcome)
        if read_each:
            supervisor.catch_up()
    supervisor.catch_up()
    values = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return reports, values, trainer.model.expert_comm.row_capacity_factor or 0


@cache
def unlimited() -> list[tuple[Reports, dict[str, Tensor], float]]:
    """Training without a row bound."""
    return on_threads(EP2, lambda context: train(plan(None), context))


@pytest.mark.parametrize("read_each", [False, True])
@pytest.mark.parametrize("factor", [0.2, 0.9])
def test_repeated_steps_equal_steps_without_a_bound(factor: float, read_each: bool) -> None:
    bound = on_threads(EP2, lambda context: train(plan(factor), context, read_each))
    for (reports, values, raised), (expected_reports, expected, _) in zip(bound, unlimited(), strict=True):
        EXACT.check_all(values, expected, "weights and expert biases")
        results, others = reports.results, expected_reports.results
        assert [r.iteration for r in results] == [r.iteration for r in others] == list(range(1, STEPS + 1))
        assert [(r.loss, r.norms, r.learning_rate) for r in results] == [
            (r.loss, r.norms, r.learning_rate) for r in others
        ]
        assert all(r.apply_update and r.extra_scalars["overflow"] == 0 for r in results)
        assert raised > factor
    notes = bound[0][0].notes
    assert notes and all("more expert rows than its bound, so the iteration is repeated with" in note for note in notes)
    assert notes == bound[1][0].notes


@pytest.mark.parametrize("config", GRAPHS, ids=["modules", "whole step"])
def test_graphs_are_captured_again_with_the_raised_bound(config: CudaGraphConfig) -> None:
    """All ranks capture again together, after one eager step."""
    captures: dict[int, list[int]] = {0: [], 1: []}

    def run(context: ParallelContext) -> tuple[Reports, dict[str, Tensor], float]:
        class Counter(EagerRecorder):
            def empty_cache(self) -> None:
                super().empty_cache()
                captures[context.rank].append(len(trainer.recent))

        def with_counter(plan: RunPlan, context: ParallelContext) -> tuple[Trainer, TrainLoader]:
            nonlocal trainer
            trainer, loader = setup(replace(plan, cuda_graphs=CudaGraphConfig()), context)
            build.record_steps(trainer, Counter(), plan.cuda_graphs)
            return trainer, loader

        trainer: Any = None
        return train(plan(0.9, cuda_graphs=config), context, make=with_counter)

    for (reports, values, raised), (_, expected, _) in zip(on_threads(EP2, run), unlimited(), strict=True):
        EXACT.check_all(values, expected, "weights and expert biases")
        assert raised > 0.9 and reports.notes, "no step overflowed"
    assert captures[0] == captures[1] and len(captures[0]) >= 2, f"captures {captures}"


def with_stash(plan: RunPlan, factor: float) -> RunPlan:
    """`factor`: size of the device pages, relative to the rows of a balanced load."""
    stash = PagedStashConfig(moe_paged_stash_page_size=4, moe_paged_stash_buffer_size_factor_cuda=factor)
    act = RecomputeConfig(recompute_modules=("moe_act",))
    return replace(plan, memory=MemoryConfig(paged_stash=stash, recompute=act))


STASHED = [
    (None, CudaGraphConfig()),
    (0.9, CudaGraphConfig()),
    (None, CudaGraphConfig(cuda_graph_modules=("attn", "mlp", "moe_router"), cuda_graph_warmup_steps=1)),
    (None, CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1)),
]
"""(bound on rows, graphs)."""


@pytest.mark.parametrize(("bound", "graphs"), STASHED, ids=["eager", "bounded rows", "modules", "whole step"])
def test_steps_without_free_pages_on_one_rank_equal_steps_without_a_stash(
    bound: float | None, graphs: CudaGraphConfig
) -> None:
    """Only the first rank has too few pages. Both ranks repeat the same steps, once."""

    def run(context: ParallelContext) -> tuple[Reports, dict[str, Tensor], list[bool]]:
        bypassed: list[bool] = []

        def make(plan: RunPlan, context: ParallelContext) -> tuple[Trainer, TrainLoader]:
            trainer, loader = setup(plan, context)
            step = trainer.step

            def counted(*args: Any, without_stash: bool = False) -> Any:
                bypassed.append(without_stash)
                return step(*args, without_stash=without_stash)

            trainer.step = counted  # type: ignore[method-assign]
            return trainer, loader

        each = with_stash(plan(bound, cuda_graphs=graphs), 0.5 if context.rank == 0 else 8.0)
        reports, values, _ = train(each, context, make=make)
        return reports, values, bypassed

    found = on_threads(EP2, run)
    assert found[0][2] == found[1][2] and any(found[0][2]), "the steps without a stash"
    for (reports, values, bypassed), (expected_reports, expected, _) in zip(found, unlimited(), strict=True):
        EXACT.check_all(values, expected, "weights and expert biases")
        results, others = reports.results, expected_reports.results
        assert [(r.iteration, r.loss, r.norms) for r in results] == [(r.iteration, r.loss, r.norms) for r in others]
        assert all(r.apply_update and r.extra_scalars["stash_overflow"] == 0 for r in results)
        notes = [note for note in reports.notes if "without the paged stash" in note]
        assert len(notes) == len(set(notes)) == sum(bypassed), "each step is repeated without the stash at most once"


def test_void_steps_do_not_change_the_loss_scale() -> None:
    """A step without free pages has NaN gradients, which are not an overflow of fp16."""

    def scales(plan: RunPlan, context: ParallelContext) -> tuple[list[float], list[str]]:
        reports, *_ = train(plan, context)
        assert all(math.isfinite(result.norms["all"]) for result in reports.results)
        return [result.extra_scalars["loss_scale"] for result in reports.results], reports.notes

    scaling = LossScaleConfig(initial_loss_scale=8.0, loss_scale_window=2)
    base = plan(None)
    scaled = replace(base, optimizer=replace(base.optimizer, loss_scaling=scaling))
    free = on_threads(EP2, lambda context: scales(scaled, context))
    assert free == [([8.0, 8.0, 16.0, 16.0], [])] * 2
    for found, notes in on_threads(EP2, lambda context: scales(with_stash(scaled, 0.5), context)):
        assert found == free[0][0] and notes


def test_metrics_of_void_steps_are_dropped() -> None:
    free = unlimited()[0][0].metrics
    found = on_threads(EP2, lambda context: train(plan(0.2), context))[0][0].metrics
    assert len(found) == len(free) == STEPS // 2
    for interval, expected in zip(found, free, strict=True):
        assert {name: each.value for name, each in interval.items()} == {n: m.value for n, m in expected.items()}


def test_evaluation_has_no_row_bound() -> None:
    def loss(context: ParallelContext, factor: float | None) -> float:
        trainer, loader = setup(plan(factor), context)
        return evaluate(trainer.pipeline, [loader.next_step()])

    assert on_threads(EP2, lambda c: loss(c, 0.1)) == on_threads(EP2, lambda c: loss(c, None))
