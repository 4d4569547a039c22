"""Learning rate and weight decay at the breakpoints of every schedule, and after a resume."""

import json
import math
from dataclasses import replace

import pytest

from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.optimizer import LRConfig, OptimizerConfig
from megatron_moe.optim.lr_scheduler import LRSchedule
from tests.helpers.tolerances import EXACT, FP64_REF

SPEC = LRConfig(max_lr=1e-3, min_lr=1e-4, init_lr=1e-5, warmup_samples=100, decay_samples=1000, wsd_decay_samples=200)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", {0: 1e-5, 50: 5.05e-4, 100: 1e-3, 1000: 1e-3, 5000: 1e-3}),
        ("linear", {0: 1e-5, 100: 1e-3, 550: 5.5e-4, 1000: 1e-4, 1001: 1e-4}),
        ("cosine", {0: 1e-5, 100: 1e-3, 550: 5.5e-4, 1000: 1e-4, 1001: 1e-4}),
        ("inverse-square-root", {0: 1e-5, 100: 1e-3, 400: 5e-4, 1000: 1e-3 / math.sqrt(10), 1001: 1e-4}),
        ("WSD", {0: 1e-5, 100: 1e-3, 800: 1e-3, 900: 1e-4 + 9e-4 * (math.sqrt(2) - 1), 1000: 1e-4, 1001: 1e-4}),
    ],
)
def test_every_curve_has_the_values_computed_manually(style: str, expected: dict[int, float]) -> None:
    schedule = LRSchedule(replace(SPEC, style=style))
    for samples, value in expected.items():
        FP64_REF.check(schedule.lr(samples), value, f"{style} at {samples}")


@pytest.mark.parametrize(
    ("wsd_style", "half_way"),
    [("exponential", math.sqrt(2) - 1), ("linear", 0.5), ("cosine", 0.5), ("minus_sqrt", 1 - math.sqrt(0.5))],
)
def test_every_wsd_decay_ends_at_the_smallest_rate(wsd_style: str, half_way: float) -> None:
    schedule = LRSchedule(replace(SPEC, style="WSD", wsd_style=wsd_style))
    FP64_REF.check(schedule.lr(900), 1e-4 + 9e-4 * half_way, "half way")
    FP64_REF.check(schedule.lr(1000), 1e-4, "end")


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert LRSchedule(replace(SPEC, warmup_samples=0)).lr(0) == 1e-3


def test_a_decoupled_rate_follows_the_same_curve_between_its_own_bounds() -> None:
    assert LRSchedule.of(SPEC, OptimizerConfig()).decoupled_lr(500) is None
    assert LRSchedule.of(SPEC, OptimizerConfig(decoupled_lr=5e-3)).decoupled_lr(5000) == SPEC.min_lr
    bounds = OptimizerConfig(decoupled_lr=5e-3, decoupled_min_lr=1e-3)
    for style, expected in (("linear", 3e-3), ("cosine", 3e-3), ("constant", 5e-3)):
        FP64_REF.check(LRSchedule.of(replace(SPEC, style=style), bounds).decoupled_lr(550), expected, style)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", {0: 0.3, 500: 0.3, 2001: 0.3}),
        ("linear", {0: 0.1, 500: 0.15, 2000: 0.3, 2001: 0.3}),
        ("cosine", {0: 0.1, 1000: 0.2, 500: 0.1 + 0.1 * (1 - math.sqrt(0.5)), 2000: 0.3, 2001: 0.3}),
    ],
)
def test_weight_decay_moves_from_start_to_end(style: str, expected: dict[int, float]) -> None:
    start = 0.3 if style == "constant" else 0.1
    schedule = LRSchedule(
        replace(
            SPEC, start_weight_decay=start, end_weight_decay=0.3, weight_decay_style=style, weight_decay_samples=2000
        )
    )
    for samples, value in expected.items():
        FP64_REF.check(schedule.weight_decay(samples), value, f"{style} at {samples}")


def through_json(schedule: LRSchedule) -> dict:
    return json.loads(json.dumps(schedule.to_json()))


def test_an_unchanged_schedule_resumes_without_a_message() -> None:
    schedule = LRSchedule.of(SPEC, OptimizerConfig(decoupled_lr=5e-3))
    assert schedule.merged_with_checkpoint(through_json(schedule)) == (schedule, [])


def test_a_changed_schedule_is_rejected_with_every_value_that_differs() -> None:
    changed = LRSchedule(replace(SPEC, max_lr=3e-4, decay_samples=2000))
    with pytest.raises(CheckpointProblem, match="override-opt_param-scheduler") as refusal:
        changed.merged_with_checkpoint(through_json(LRSchedule(SPEC)))
    assert "max_lr 0.0003 (checkpoint: 0.001)" in str(refusal.value)
    assert "decay_samples 2000 (checkpoint: 1000)" in str(refusal.value)


def test_override_selects_the_command_line_and_reports_it() -> None:
    changed = LRSchedule(replace(SPEC, max_lr=3e-4, override_opt_param_scheduler=True))
    schedule, notes = changed.merged_with_checkpoint(through_json(LRSchedule(SPEC)))
    assert schedule == changed
    assert notes == ["learning rate schedule: max_lr 0.0003 (checkpoint: 0.001), the value of the command line is used"]


def test_use_checkpoint_selects_the_checkpoint_for_every_curve() -> None:
    saved = LRSchedule.of(SPEC, OptimizerConfig(decoupled_lr=5e-3))
    mine = LRSchedule.of(
        replace(SPEC, max_lr=3e-4, style="cosine", end_weight_decay=0.5, use_checkpoint_opt_param_scheduler=True),
        OptimizerConfig(decoupled_lr=1e-3),
    )
    schedule, notes = mine.merged_with_checkpoint(through_json(saved))
    assert len(notes) == 4, notes
    for samples in (0, 50, 100, 500, 2000):
        EXACT.check(schedule.lr(samples), saved.lr(samples), f"learning rate at {samples}")
        EXACT.check(schedule.decoupled_lr(samples), saved.decoupled_lr(samples), f"decoupled at {samples}")
        EXACT.check(schedule.weight_decay(samples), saved.weight_decay(samples), f"weight decay at {samples}")


def test_use_checkpoint_needs_a_decoupled_rate_in_both_runs_or_in_none() -> None:
    """The buffers of embedding and head were built with or without their own rate, so `Optimizer.step` would fail."""
    spec = replace(SPEC, use_checkpoint_opt_param_scheduler=True)
    plain, decoupled = (LRSchedule.of(spec, OptimizerConfig(decoupled_lr=lr)) for lr in (None, 5e-3))
    with pytest.raises(CheckpointProblem, match="has a separate .* give --decoupled-lr 0.005 --decoupled-min-lr"):
        plain.merged_with_checkpoint(through_json(decoupled))
    with pytest.raises(CheckpointProblem, match="has no separate .* leave out --decoupled-lr, or use --override"):
        decoupled.merged_with_checkpoint(through_json(plain))
