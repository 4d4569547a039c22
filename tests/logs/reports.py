"""Step results and reports with simple values."""

from dataclasses import replace
from datetime import datetime
from typing import Any

from megatron_moe.logs.log_line import StepReport, StepResult
from megatron_moe.logs.metric_values import Metric

METRICS = {
    "load_balancing_loss": Metric(1.25, {1: 1.0, 2: 1.5}),
    "z_loss": Metric(0.5),
    "mtp_1 loss": Metric(3.5),
    "moe/max_violation": Metric(0.3, {1: 0.2, 2: 0.4}),
    "moe/tokens_per_expert": Metric([3.0, 5.0], {1: [2.0, 6.0], 2: [4.0, 4.0]}),
}


def step_result(iteration: int = 20, **changes: Any) -> StepResult:
    """Result of a step with 8 sequences that takes half a second."""
    result = StepResult(
        iteration=iteration,
        loss=7.25,
        norms={"all": 1.2345, "experts": 0.75},
        apply_update=True,
        state_is_finite=True,
        learning_rate=3e-3,
        applied_learning_rate=2e-3,
        num_samples=8,
        num_tokens=8 * 256,
        seconds=0.5,
    )
    samples = changes.get("num_samples", result.num_samples)
    return replace(result, **{"num_tokens": samples * 256, **changes})


def step_report(*steps: StepResult, **changes: Any) -> StepReport:
    """Report of iteration 20 of 250 with sequences of 256 tokens."""
    report = StepReport(
        when=datetime(2026, 1, 2, 3, 4, 5, 678901),
        steps=steps or (step_result(),),
        train_iters=250,
        consumed_samples=160,
        consumed_tokens=160 * 256,
        metrics=METRICS,
        flops_per_step=1e12,
    )
    return replace(report, **changes)


class Clock:
    """Manually advanced clock."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
