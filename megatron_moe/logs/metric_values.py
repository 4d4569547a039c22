"""Final values of metrics, as Python numbers. Loads without torch, so that the tools that compare logs start fast."""

from dataclasses import dataclass, field

MetricValue = float | list[float]
"""Value of a metric: a number, or a list with one number per element of a recorded vector (e.g. per expert)."""


@dataclass(frozen=True)
class Metric:
    """Final value of a metric, over all ranks and microbatches of a log interval."""

    value: MetricValue
    """Mean over the layers that recorded the metric, or the maximum over them if the reduction is "max"."""
    layers: dict[int, MetricValue] = field(default_factory=dict)
    """Values by global layer index; empty for a metric recorded without a layer."""
