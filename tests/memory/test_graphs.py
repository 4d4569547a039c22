"""Recorded parts of layers: a replay is the computation, bit for bit, in memory that never moves."""


import pytest
import torch

from megatron_moe.build import build_model, build_trainer
from megatron_moe.kernels import reference
from megatron_moe.memory.flights import Flights
from megatron_moe.memory.recorder import Repeater
from megatron_moe.memory.whole_step import WholeStep
from megatron_moe.model.captured import capture_parts
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.state import TrainState
from tests import tiny
from tests.pipelines import run_steps
from tests.tolerances import EXACT

KERNELS = reference.bundle()
MODULES = [
    ("attn",),
    ("mlp",),
    ("moe_router",),
    ("moe_router", "moe_preprocess"),
    ("moe",),
    ("attn", "mlp", "moe_router", "moe_preprocess"),
    ("attn", "mlp", "moe"),
]
BIASED = tiny.router(
    score_function="sigmoid", expert_bias=True, balancing=("seq_aux_loss",), aux_loss_coeffs=(0.02,), z_loss_coeff=0.1
)


def figures(plan, modules=(), steps=4, warmup=1):
    context = ParallelContext.single(dtype=torch.float64)
    trainer = build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS)
    if modules:
        assert capture_parts(trainer.model, modules) > 0
        trainer.pipeline.flights = Flights(Repeater(), warmup)
    return run_steps(plan, trainer, TrainState(), steps), trainer


@pytest.mark.parametrize("modules", MODULES, ids="+".join)
def test_replayed_steps_are_computed_steps_bit_for_bit(modules):
    # several microbatches per step: the first one stores its weight gradients, the others add
    plan = tiny.plan(model=tiny.model(moe_spec=tiny.moe(BIASED)))
    expected, _ = figures(plan)
    found, trainer = figures(plan, modules)
    assert list(trainer.pipeline.flights), "nothing was recorded"
    EXACT.check_all(found, expected, "+".join(modules))


def test_replayed_whole_steps_are_computed_steps_bit_for_bit():
    plan = tiny.plan(model=tiny.model(moe_spec=tiny.moe(BIASED)))
    expected, _ = figures(plan)
    context = ParallelContext.single(dtype=torch.float64)
    trainer = build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS)
    trainer.whole_step = WholeStep(Repeater(), 1, list(trainer.buffers.slots))
    found = run_steps(plan, trainer, TrainState(), 4)
    assert trainer.whole_step.has_recorded
    EXACT.check_all(found, expected, "whole steps")
