"""Metrics of captured functions: outputs of their graphs, recorded after every replay."""

from collections.abc import Callable, Sequence
from enum import Enum, auto

from torch import Tensor

from megatron_moe.logs.metrics import Fold, MetricAccumulator, Reduction


class RecordedMetrics(Enum):
    """Metrics that a captured module records for the log."""

    NOTHING = auto()
    WITHOUT_ROUTING = auto()
    WITH_ROUTING = auto()

    @classmethod
    def of(cls, metrics: MetricAccumulator | None) -> "RecordedMetrics":
        if metrics is None:
            return cls.NOTHING
        return cls.WITHOUT_ROUTING if metrics.trace_routing is None else cls.WITH_ROUTING


class MetricRecorder(MetricAccumulator):
    """Stores the metric tensors of a captured function, so that their values can be recorded after every replay."""

    def __init__(self, *, with_routing: bool = False) -> None:
        """`with_routing`: also stores the expert ids of a routing trace."""
        super().__init__(trace_routing=self._trace_routing if with_routing else None)
        self._tensors: list[Tensor] = []
        """Tensors passed to `record` and `collect` (values, counts, rows), in call order."""
        self._records: list[Callable[[MetricAccumulator, Sequence[Tensor]], None]] = []

    def record(
        self,
        name: str,
        value: Tensor,
        *,
        layer: int | None = None,
        count: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        """Stores the arguments, which `replay` passes to `MetricAccumulator.record`."""
        value_index = self._add(value)
        count_index = None if count is None else self._add(count)

        def record(metrics: MetricAccumulator, tensors: Sequence[Tensor]) -> None:
            number = None if count_index is None else tensors[count_index]
            metrics.record(name, tensors[value_index], layer=layer, count=number, reduction=reduction)

        self._records.append(record)

    def collect(self, name: str, layer: int, row: Tensor, fold: Fold) -> None:
        """Stores the arguments, which `replay` passes to `MetricAccumulator.collect`."""
        index = self._add(row)
        # the accumulator stores rows, but the next replay overwrites this row
        self._records.append(lambda metrics, tensors: metrics.collect(name, layer, tensors[index].clone(), fold))

    def _trace_routing(self, layer: int, ids_TK: Tensor) -> None:
        index = self._add(ids_TK)

        def trace(metrics: MetricAccumulator, tensors: Sequence[Tensor]) -> None:
            assert metrics.trace_routing is not None, (
                "the graph was captured with a routing trace, but replayed without one"
            )
            metrics.trace_routing(layer, tensors[index])

        self._records.append(trace)

    def pop_tensors(self) -> list[Tensor]:
        """Returns the stored tensors, which become outputs of the graph, and drops the references to them."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def replay(self, metrics: MetricAccumulator, tensors: Sequence[Tensor]) -> None:
        """Records all stored metrics in `metrics`. `tensors`: those of `pop_tensors`, with the values of a replay."""
        for record in self._records:
            record(metrics, tensors)

    def _add(self, tensor: Tensor) -> int:
        self._tensors.append(tensor.detach())
        return len(self._tensors) - 1
