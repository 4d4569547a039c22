"""Duration and cost of a run, from the estimated time of its steps."""

from dataclasses import dataclass
from typing import Any

from arguments.parser import Settings
from megatron_moe.config.run import RunPlan
from megatron_moe.config.text import counted, significant, with_unit
from megatron_moe.planner.estimator import StepEstimate, estimate_values

ERROR_SOURCE = "the largest deviation measured, on one and two H200; other GPUs and clusters were not measured"
_HOUR = 3600.0
_DURATIONS = ((1.0, "days"), (1 / 24, "hours"), (1 / 1440, "minutes"), (1 / 86400, "seconds"))
_TIMES = ((1e3, "s"), (1.0, "ms"), (1e-3, "µs"))
COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1.0, ""))


@dataclass(frozen=True)
class RunLength:
    """Flags that set the length and the price of a planned run."""

    tokens: float | None = None
    """`--tokens`; None means the iterations of the plan."""
    price: float | None = None
    """Price of a GPU hour (`--gpu-hour-price`), in any currency; None if not given."""

    @classmethod
    def of(cls, start: Settings) -> "RunLength":
        return cls(start.setting("tokens").value, start.setting("gpu_hour_price").value)

    def values(self, plan: RunPlan, step_seconds: float) -> dict[str, Any]:
        """Iterations, tokens, days, GPU hours and, with a price, the cost of the whole run. `step_seconds`: time of a
        step with the full global batch, by which those of smaller batches are estimated in proportion."""
        batch, seq_length, iterations = plan.batch, plan.data.seq_length, plan.loop.train_iters
        if self.tokens is not None:
            wanted = int(-(-self.tokens // seq_length))
            iterations = batch.steps_for(wanted)
            iterations += batch.samples_after(iterations) < wanted
        samples = batch.samples_after(iterations)
        hours = samples / batch.global_batch_size * step_seconds / _HOUR
        gpu_hours = hours * plan.parallel.world_size
        cost = {} if self.price is None else {"cost": gpu_hours * self.price}
        return {
            "iterations": iterations,
            "tokens": samples * seq_length,
            "days": hours / 24,
            "gpu_hours": gpu_hours,
        } | cost

    def text(self, plan: RunPlan, step: StepEstimate) -> str:
        """Formats duration and cost as a sentence, or names the flags that they require."""
        if self.tokens is None and plan.loop.train_iters == 1:
            return "give --tokens or --train-iters for days, GPU hours and cost"
        return length_text(self.values(plan, step.total))


def estimate_text(plan: RunPlan, step: StepEstimate) -> str:
    return throughput_text(estimate_values(plan, step))


def throughput_text(values: dict[str, Any]) -> str:
    """Formats step time, TFLOP/s and tokens/s per GPU in one line, without the times of components."""
    return (
        f"estimate ± {values['error']:.0%}: {with_unit(values['step_ms'], _TIMES)} a step, "
        f"{values['tflops_per_gpu']:,.0f} TFLOP/s and {values['tokens_per_second_per_gpu']:,.0f} tokens/s per GPU"
    )


def length_text(values: dict[str, Any]) -> str:
    """Formats iterations, tokens, duration, GPU hours and, if known, the cost of a run in one line."""
    cost = f", cost {significant(values['cost'])}" if "cost" in values else ""
    steps = f"{counted(values['iterations'], 'iteration')}, {with_unit(values['tokens'], COUNTS)} tokens"
    return f"{steps}: {with_unit(values['days'], _DURATIONS)}, {significant(values['gpu_hours'])} GPU hours{cost}"
