"""Overlap of the optimizer step with the next forward, bucket by bucket on a side stream.

The update is bound by memory bandwidth, the forward mostly by compute. Buckets are stepped in the order in which the
forward reads the weights, and each node of the forward acquires its own unit (`ParamStore.acquire`). Numbers equal
those of an update in one go. A backward writes gradients only of parameters whose forward has waited for the update
that reads them.
"""

from collections.abc import Callable, Iterable, Sequence

from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.state import OptimizerState, UpdateOperands
from megatron_moe.optim.update_rule import StepScalars, UpdateRule
from megatron_moe.parallel.streams import Streams


class OverlappedOptimizerStep:
    """Steps all buckets on the side stream.

    Args:
        buckets: this rank's ranges of every bucket, in forward order.
        write_back: `ParamStore.write_back`.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[UpdateOperands]],
        rule: UpdateRule,
        kernels: Kernels,
        streams: Streams,
        write_back: Callable[[int, Streams], None],
    ) -> None:
        self._buckets = tuple(tuple(bucket) for bucket in buckets)
        self._rule = rule
        self._kernels = kernels
        self._streams = streams
        self._write_back = write_back
        self._scalars: StepScalars | None = None
        """Kept alive while the optimizer stream may read them."""

    def start(self, scalars: StepScalars) -> None:
        """Launches the update of all buckets. Those of the last update have been acquired."""
        self._scalars = scalars
        with self._streams.fork("optimizer"):
            for number, bucket in enumerate(self._buckets):
                for operands in bucket:
                    self._rule.step(scalars, operands, self._kernels)
                self._write_back(number, self._streams)


def operands_of(states: Iterable[OptimizerState], start: int, end: int) -> list[UpdateOperands]:
    """The parts of states of one buffer inside its elements `start` to `end`."""
    inside = [(state, max(start, state.start), min(end, state.end)) for state in states]
    return [state.operands(first - state.start, last - state.start) for state, first, last in inside if first < last]
