"""Reduction of gradients over data-parallel ranks, one collective per bucket.

With overlap, the reduction of a bucket starts in the backward pass, as soon as all gradients of its parameters in the
step have been added (`ParamShape.uses` per parameter and microbatch). Reductions start in the same order on all ranks,
regardless of the order of the gradients, so collectives always match.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.parallel.collectives import PendingCollective, start_all_reduce_, start_reduce_scatter_
from megatron_moe.parallel.context import ProcessGroup


class GradBucket:
    """A range of a flat gradient buffer that is reduced in one collective."""

    def __init__(
        self, grads: Tensor, group: ProcessGroup, num_per_microbatch: int, fill_gaps: Sequence[Callable[[], None]]
    ) -> None:
        """`num_per_microbatch`: gradients per microbatch. `fill_gaps`: functions that zero missing gradients."""
        self.grads = grads
        self.group = group
        self.num_per_microbatch = num_per_microbatch
        self.num_arrived = 0
        """Number of gradients added in this step."""
        self.pending: PendingCollective | None = None
        """The reduction; None before it has started."""
        self.on_arrival: Callable[[], None] | None = None
        self._fill_gaps = fill_gaps

    def arrived(self, number: int) -> None:
        """Counts gradients that have been added."""
        assert self.pending is None, f"a gradient after the reduction of its bucket began ({self.num_arrived} before)"
        self.num_arrived += number
        if self.on_arrival is not None:
            self.on_arrival()

    def start(self, config: DataParallelConfig) -> None:
        """Starts the reduction. No gradient may be added from now on."""
        for fill in self._fill_gaps:
            fill()
        # dp_cp or edp: one bucket, by default 40 million elements
        if config.use_distributed_optimizer:
            wide = config.ddp_reduce_scatter_with_fp32_accumulation and self.grads.element_size() < 4
            self.pending = start_reduce_scatter_(
                self.grads, self.group, mean=config.ddp_average_in_collective, fp32_sums=wide
            )
        else:
            self.pending = start_all_reduce_(self.grads, self.group, mean=config.ddp_average_in_collective)


class GradReducer:
    """Starts the reductions of all buckets in order, and waits for them.

    Args:
        buckets: in the order in which a backward pass completes them.
    """

    def __init__(self, buckets: Sequence[GradBucket], config: DataParallelConfig) -> None:
        self.buckets = tuple(buckets)
        self.num_started = 0
        """Number of buckets whose reduction has started in this step."""
        self._config = config
        self._num_microbatches: int | None = None
        for bucket in self.buckets:
            bucket.on_arrival = self._start_complete if config.overlap_grad_reduce else None

    def begin_step(self, num_microbatches: int | None) -> None:
        """Resets the counts. `num_microbatches` None: no reduction starts before `finish`."""
        self._num_microbatches = num_microbatches
        self.num_started = 0
        for bucket in self.buckets:
            bucket.num_arrived = 0
            bucket.pending = None

    def finish(self) -> None:
        """Starts the remaining reductions and waits for all of them."""
        while self.num_started < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            assert bucket.pending is not None, "a bucket without its reduction"
            bucket.pending.wait()
            bucket.pending = PendingCollective()

    def _start_complete(self) -> None:
        while self.num_started < len(self.buckets) and self._complete(self.buckets[self.num_started]):
            self._start_next()

    def _complete(self, bucket: GradBucket) -> bool:
        # `finish` reduces buckets without gradients: no forward has waited for the last update, which may read them.
        if self._num_microbatches is None or bucket.num_per_microbatch == 0:
            return False
        return bucket.num_arrived == bucket.num_per_microbatch * self._num_microbatches

    def _start_next(self) -> None:
        self.buckets[self.num_started].start(self._config)
        self.num_started += 1
