"""Checks shared by the tests of `tests/examples/`: layouts, FP8 GEMMs, graph replays and memory."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_moe.build import record_steps
from megatron_moe.config.emulation import EmulationConfig
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.memory import RankMemory, rank_with_peak_memory
from megatron_moe.memory_emulation.rank import emulate_rank
from megatron_moe.parallel import peer_ring
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import Ring
from megatron_moe.train.train_state import TrainState
from tests.helpers.eager_graphs import EagerRecorder, TapeRecorder
from tests.helpers.pipelines import make_trainer, run_steps, train
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT
from tests.parity import cells

COVER = (
    "tp=2 sp=on cp=2 ep=2 balance=none",
    "tp=2 sp=on pp=2 vpp=2 ep=2 accumulation=2 balance=none",
    "cp=2 pp=2 vpp=2 ep=2 accumulation=2 balance=none",
)
"""Layouts that contain all pairs of two tensor-, context-, pipeline- and expert-parallel ranks and virtual stages."""


def covering(more: str) -> list[str]:
    """Appends settings to each layout of `COVER`."""
    return [f"{cell} {more}" for cell in COVER]


def check_layout(plan: RunPlan) -> None:
    """Compares losses, gradients and the updated weights of all ranks with those of one rank, in fp64."""
    comparison = cells.compare_plan(plan)
    assert comparison.all_equal, comparison.text()


def check_copies(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `check_layout` with context-parallel ranks that copy from each other's memory, as GPUs do."""
    copying = list[int]()
    monkeypatch.setattr(peer_ring, "may_copy", lambda ctx: not copying.append(ctx.rank))
    monkeypatch.setattr(peer_ring, "SequenceCollectives", None)  # gathers by collectives would fail
    monkeypatch.setattr(Ring, "send_to_next", None)
    check_layout(replace(plan, parallel=replace(plan.parallel, shares_memory=True)))
    assert sorted(copying) == list(range(plan.parallel.world_size))


def with_fp8(plan: RunPlan) -> RunPlan:
    """Copies a plan with emulated FP8 GEMMs."""
    low = low_precision_config("blockwise", blocks=4, hybrid=True, weight_grad=False)
    return replace(plan, precision=replace(plan.precision, low_precision=low))


def check_replay(plan: RunPlan, modules: tuple[str, ...] = ("attn", "mlp", "moe_router")) -> None:
    """Checks on every rank that three steps with captured modules equal eager steps bit for bit."""
    graphs = CudaGraphConfig(cuda_graph_modules=modules, cuda_graph_warmup_steps=1)

    def replayed(context: ParallelContext) -> dict[str, torch.Tensor]:
        trainer = make_trainer(plan, context)
        # the ops of one rank can be recorded; collectives cannot
        recorder = TapeRecorder() if plan.parallel.world_size == 1 else EagerRecorder()
        record_steps(trainer, recorder, graphs)
        found = run_steps(plan, trainer, TrainState(), 3)
        assert trainer.pipeline.graph_instances is not None and trainer.pipeline.graph_instances.summary()
        return found

    found, expected = on_threads(plan.parallel, replayed), on_threads(plan.parallel, partial(train, plan))
    for rank, (of_graphs, eager) in enumerate(zip(found, expected, strict=True)):
        EXACT.check_all(of_graphs, eager, f"replayed steps of rank {rank}")


def check_memory(plan: RunPlan, rel: float = 0.03) -> None:
    """Compares the memory of the fullest rank in the cost model with that of rank 0 in an emulation."""
    plan = replace(plan, emulation=EmulationConfig(), device="cpu")
    closed = rank_with_peak_memory(RankMemory(plan).all_ranks()).total
    emulated = sum(emulate_rank(plan, 0, torch.device("meta")).timeline.peak().categories.values())
    assert emulated == pytest.approx(closed, rel=rel)
