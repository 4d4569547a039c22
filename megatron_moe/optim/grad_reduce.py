"""When gradients are summed over data-parallel ranks: each bucket as soon as it is complete, or all at the end.

A bucket is complete when every gradient of the step has arrived. How many that are is learned: a backward pass that
brought n gradients to a bucket in one step brings n in the next, so the count to wait for is n times the microbatches.
Until it is known, and wherever it is not a whole number, the bucket waits for the end of the step. Buckets start in one
order that all ranks agree on, whatever order their gradients arrive in, so that no two ranks wait for each other.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.parallel.collectives import (
    PendingCollective,
    start_all_reduce_,
    start_reduce_scatter_,
)
from megatron_moe.parallel.context import ProcessGroup


class GradBucket:
    """A stretch of a flat gradient buffer, the unit of a collective."""

    def __init__(self, grads: Tensor, group: ProcessGroup, fill_gaps: Sequence[Callable[[], None]]) -> None:
        """`fill_gaps`: zero what has received no gradient."""
        self.grads = grads
        self.group = group
        self.num_arrived = 0
        """Gradients of this step so far."""
        self.per_microbatch: int | None = None
        """Gradients that one microbatch brings; None: not known."""
        self.pending: PendingCollective | None = None
        """The reduction, once it has started."""
        self.on_arrival: Callable[[], None] | None = None
        self._fill_gaps = fill_gaps

    def arrived(self) -> None:
        """A gradient has been added."""
        assert self.pending is None, f"a gradient after the reduction of its bucket began ({self.num_arrived} before)"
        self.num_arrived += 1
        if self.on_arrival is not None:
            self.on_arrival()

    def start(self, config: DataParallelConfig) -> None:
        """Begins the reduction. Nothing may be added from now on."""
        for fill in self._fill_gaps:
            fill()
        # dp_cp or edp: one bucket, by default 40 million elements
        if config.sharded_optimizer:
            wide = config.fp32_sums and self.grads.element_size() < 4
            self.pending = start_reduce_scatter_(self.grads, self.group, mean=config.average_in_collective, wide=wide)
        else:
            self.pending = start_all_reduce_(self.grads, self.group, mean=config.average_in_collective)

    def learn(self, num_microbatches: int | None) -> None:
        """Remembers what a step of so many microbatches brought."""
        self.per_microbatch = None
        if num_microbatches and self.num_arrived % num_microbatches == 0:
            self.per_microbatch = self.num_arrived // num_microbatches


class GradReducer:
    """Starts the reduction of buckets in their order, and waits for all of them.

    Args:
        buckets: in the order in which a backward pass completes them.
    """

    def __init__(self, buckets: Sequence[GradBucket], config: DataParallelConfig) -> None:
        self.buckets = tuple(buckets)
        self.num_started = 0
        """Buckets of this step whose reduction has begun."""
        self._config = config
        self._num_microbatches: int | None = None
        for bucket in self.buckets:
            bucket.on_arrival = self._start_complete if config.overlap_grad_reduce else None

    def begin_step(self, num_microbatches: int | None) -> None:
        """Forgets the last step, but not what it taught."""
        self._num_microbatches = num_microbatches
        self.num_started = 0
        for bucket in self.buckets:
            bucket.num_arrived = 0
            bucket.pending = None

    def finish(self) -> None:
        """Starts what has not started, and waits for everything."""
        while self.num_started < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            assert bucket.pending is not None, "a bucket without its reduction"
            bucket.pending.wait()
            bucket.pending = PendingCollective()
            bucket.learn(self._num_microbatches)

    def _start_complete(self) -> None:
        while self.num_started < len(self.buckets) and self._complete(self.buckets[self.num_started]):
            self._start_next()

    def _complete(self, bucket: GradBucket) -> bool:
        if bucket.per_microbatch is None or self._num_microbatches is None:
            return False
        return bucket.num_arrived == bucket.per_microbatch * self._num_microbatches

    def _start_next(self) -> None:
        self.buckets[self.num_started].start(self._config)
        self.num_started += 1
