"""Reports with simple figures, for tests of lines, tags and the reporter."""

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from megatron_moe.logs.log_line import StepReport
from megatron_moe.logs.metrics import Metric

METRICS = {
    "load_balancing_loss": Metric(1.25, {1: 1.0, 2: 1.5}),
    "z_loss": Metric(0.5),
    "mtp_1 loss": Metric(3.5),
    "moe/max_violation": Metric(0.3, {1: 0.2, 2: 0.4}),
    "moe/tokens_per_expert": Metric([3.0, 5.0], {1: [2.0, 6.0], 2: [4.0, 4.0]}),
}


def step_report(**changes: Any) -> StepReport:
    """Iteration 20 of 250 with a batch of 8 sequences of 256 tokens in half a second."""
    report = StepReport(
        when=datetime(2026, 1, 2, 3, 4, 5, 678901),
        iteration=20,
        train_iters=250,
        consumed_samples=160,
        consumed_tokens=40960,
        batch_size=8,
        tokens_per_step=2048,
        num_steps=10,
        step_seconds=0.5,
        learning_rate=3e-3,
        applied_learning_rate=2e-3,
        losses={"lm loss": 7.25},
        metrics=METRICS,
        grad_norm=1.2345,
        grad_norm_parts={"experts": 0.75},
        flops_per_step=1e12,
    )
    return replace(report, **changes)


@dataclass(frozen=True)
class Reading:
    """One step's results."""

    iteration: int
    loss: float = 2.0
    norms: dict[str, float] = field(default_factory=lambda: {"all": 1.5, "router": 0.5})
    proceed: bool = True
    learning_rate: float = 0.1
    applied_learning_rate: float = 0.05
    num_samples: int = 8
    seconds: float = 0.25
