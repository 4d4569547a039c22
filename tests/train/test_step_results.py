"""Step results, read one iteration late."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.build import build_data, build_model, build_train_loader, build_train_state_config, build_trainer
from megatron_moe.config.logging import LoggingConfig
from megatron_moe.config.training import StepCounts
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.logs import timers
from megatron_moe.logs.timers import Timers
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.step_results import StepOutcome, StepResultReader
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny
from tests.helpers.tolerances import EXACT, FP64_REF

CPU = torch.device("cpu")
CONTEXT = ParallelContext.single(dtype=torch.float64)
KERNELS = reference.bundle()


def outcome(iteration):
    return StepOutcome(
        loss=torch.tensor(float(iteration)),
        norms={"all": torch.tensor(2.0)},
        extra_scalars={"num_zeros": torch.tensor(7)},
        apply_update=torch.tensor(True),
        state_is_finite=torch.tensor(True),
        counts=StepCounts(4, 128),
        learning_rate=0.1,
        applied_learning_rate=0.05,
        iteration=iteration,
    )


def test_step_is_read_after_the_next_one_starts():
    late = StepResultReader(CPU)
    assert late.push(outcome(1)) is None
    first = late.push(outcome(2))
    assert (first.iteration, first.loss, first.norms, first.extra_scalars) == (1, 1.0, {"all": 2.0}, {"num_zeros": 7.0})
    assert late.flush().iteration == 2
    assert late.flush() is None


def test_step_times_exclude_evaluations(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timers.time, "perf_counter", lambda: clock[0])
    late, readings = StepResultReader(CPU), []

    def step(iteration, seconds):
        clock[0] += seconds
        readings.append(late.push(outcome(iteration)))

    step(1, 5.0)
    step(2, 1.0)
    readings.append(late.flush())
    clock[0] += 100.0  # an evaluation
    late.restart_clock()
    step(3, 2.0)
    readings.append(late.flush())
    assert {r.iteration: r.seconds for r in readings if r} == {1: 5.0, 2: 1.0, 3: 2.0}


def run(steps, plan, timers=None):
    model = build_model(plan, CONTEXT, KERNELS)
    trainer = build_trainer(plan, CONTEXT, model, KERNELS, timers)
    loader, state, outcomes = build_train_loader(plan, CONTEXT, build_data(plan, CONTEXT)), TrainState(), []
    for _ in range(steps):
        outcomes.append(trainer.step(loader.next_step(), state))
        state.advance(outcomes[-1].counts, build_train_state_config(plan))
    return trainer, outcomes, state


def test_params_norm_and_num_zeros_belong_to_their_step():
    plan = tiny.plan(logging=LoggingConfig(log_params_norm=True, log_num_zeros_in_grad=True))
    one, (first,), _ = run(1, plan)
    _, (earlier, later), _ = run(2, plan)
    EXACT.check(earlier.extra_scalars["params_norm"], first.extra_scalars["params_norm"], "params norm after one step")
    flat = torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()])
    FP64_REF.check(first.extra_scalars["params_norm"], flat.norm(), "params norm")
    assert later.extra_scalars["params_norm"] != earlier.extra_scalars["params_norm"]
    # embedding gradients of unused tokens are zero
    assert 0 < int(first.extra_scalars["num_zeros"]) < flat.numel()


def test_step_times_its_parts():
    timers = Timers(1, CPU)
    run(2, tiny.plan(), timers)
    taken = timers.gather_seconds(CONTEXT)
    assert set(taken) == {"forward-backward", "all-grads-sync", "optimizer"}
    assert all(seconds > 0 for (seconds,) in taken.values())


def test_state_counts_samples_and_tokens():
    _, _, state = run(2, tiny.plan())
    assert (state.iteration, state.consumed_samples, state.consumed_tokens) == (2, 16, 16 * tiny.SEQ)
    assert state.flops > 0


def test_schedules_count_trained_samples():
    """Schedules do not count skipped iterations; the logged rate follows the scheduler step, as in Megatron-LM."""
    ramp = replace(
        tiny.plan().lr_schedule,
        warmup_samples=80,
        start_weight_decay=0.0,
        end_weight_decay=0.4,
        weight_decay_style="linear",
    )
    plan = tiny.plan(lr_schedule=ramp)
    trainer, outcomes, _ = run(2, plan)
    assert [outcome.applied_learning_rate for outcome in outcomes] == [0.0, 1e-2 * 8 / 80]
    assert [outcome.learning_rate for outcome in outcomes] == [1e-2 * 8 / 80, 1e-2 * 16 / 80]
    seen = []
    trainer.optimizer.step = lambda **arguments: seen.append((arguments["lr"], arguments["weight_decay"]))
    batches = build_train_loader(plan, CONTEXT, build_data(plan, CONTEXT)).next_step()
    trainer.step(batches, TrainState(iteration=5, consumed_samples=40, skipped_samples=16))
    assert seen == [(pytest.approx(1e-2 * 24 / 80), pytest.approx(0.4 * 24 / 800))]


def test_expert_bias_changes_once_per_step():
    rate = 0.125
    config = tiny.router(score_function="sigmoid", expert_bias=True, bias_update_rate=rate)
    plan = tiny.plan(model=tiny.model(moe_config=tiny.moe(config)))
    before = {n: b.clone() for n, b in build_model(plan, CONTEXT, KERNELS).named_buffers() if n.endswith("expert_bias")}
    trainer, _, _ = run(1, plan)
    after = dict(trainer.model.named_buffers())
    assert before
    for name, bias in before.items():
        moves = ((after[name] - bias) / rate).abs()
        # the step has one update over four microbatches
        assert moves.max() == 1.0 and set(moves.round(decimals=4).tolist()) <= {0.0, 1.0}, (name, moves)
