"""Reduction of gradients over data-parallel ranks, one collective per bucket.

With overlap, a bucket's reduction starts during the backward pass, once the step has added all gradients of the bucket.
A step adds `ParamShape.uses` gradients per parameter and microbatch. All ranks start the reductions in the same order,
even if gradients are added in another order, so that collectives match.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.parallel.collectives import PendingCollective, Sizes, start_all_reduce_, start_reduce_scatter_
from megatron_moe.parallel.context import ProcessGroup


class GradBucket:
    """A range of a flat gradient buffer that is reduced in one collective."""

    def __init__(
        self,
        grads: Tensor,
        group: ProcessGroup,
        num_per_microbatch: int,
        zero_missing_grads: Sequence[Callable[[], None]],
        sizes: Sizes = None,
    ) -> None:
        """
        Args:
            grads: gradients of the bucket, flat.
            num_per_microbatch: number of gradients that a microbatch adds.
            zero_missing_grads: one function per parameter, which zeroes the parameter's gradient if the step has not
                added any.
            sizes: numbers of elements that each rank of the group owns; None if the numbers are equal.
        """
        self.grads = grads
        self.group = group
        self.num_per_microbatch = num_per_microbatch
        self.num_arrived = 0
        """Number of gradients added in this step."""
        self.pending: PendingCollective | None = None
        """Reduction of this step; None before it has started."""
        self.on_arrival: Callable[[GradBucket], None] | None = None
        self._zero_missing_grads = zero_missing_grads
        self._sizes = sizes

    def count_arrived(self, number: int) -> None:
        """Adds `number` to the count of gradients that have been added in this step, then calls `on_arrival`."""
        assert self.pending is None, f"gradient added after its bucket's reduction started ({self.num_arrived} before)"
        self.num_arrived += number
        if self.on_arrival is not None:
            self.on_arrival(self)

    def zero_missing_grads(self) -> None:
        """Zeroes the gradients of parameters to which this step has added none."""
        for fill in self._zero_missing_grads:
            fill()

    def start(self, config: DataParallelConfig) -> None:
        """Starts the reduction. No gradient may be added to the bucket until `pending` is None again."""
        self.zero_missing_grads()
        # collective over dp_cp or edp: one bucket, by default 40 million elements
        if config.use_distributed_optimizer:
            wide = config.ddp_reduce_scatter_with_fp32_accumulation and self.grads.element_size() < 4
            mean = config.ddp_average_in_collective
            self.pending = start_reduce_scatter_(self.grads, self.group, sizes=self._sizes, mean=mean, fp32_sums=wide)
        else:
            self.pending = start_all_reduce_(self.grads, self.group, mean=config.ddp_average_in_collective)

    def finish(self) -> None:
        """Makes the current stream wait for the reduction."""
        assert self.pending is not None, "the reduction of a bucket was not started"
        self.pending.wait()


class GradReducer:
    """Starts the reductions of all buckets, in the order of `buckets`, and waits for them.

    `buckets` are in the order in which a backward pass completes them.
    """

    def __init__(self, buckets: Sequence[GradBucket], config: DataParallelConfig) -> None:
        self.buckets = tuple(buckets)
        self.num_started = 0
        """Number of buckets whose reduction has started in this step."""
        self.config = config
        self._num_microbatches: int | None = None
        for bucket in self.buckets:
            bucket.on_arrival = self.start_complete_buckets if config.overlap_grad_reduce else None

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """Tensors that reductions keep allocated on this rank in addition to the gradients; none in this base class."""
        return ()

    def begin_step(self, num_microbatches: int | None) -> None:
        """Resets the counters for a new step. If `num_microbatches` is None, no reduction starts before `finish`."""
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
            bucket.finish()
            bucket.pending = PendingCollective()

    def mark_replayed(self) -> None:
        """Called when a CUDA graph has replayed all reductions of this step."""
        self.num_started = len(self.buckets)
        for bucket in self.buckets:
            bucket.pending = PendingCollective()

    def complete_local_grads(self) -> None:
        """Called after the last backward of a step: afterwards, the buffers contain this rank's sums over the step."""
        for bucket in self.buckets:
            bucket.zero_missing_grads()

    def start_complete_buckets(self, bucket: GradBucket) -> None:
        """Starts the reductions of all buckets whose turn it is and that are complete; called when gradients have been
        added to `bucket`."""
        while self.num_started < len(self.buckets) and self._complete(self.buckets[self.num_started]):
            self._start_next()

    def _complete(self, bucket: GradBucket) -> bool:
        # `finish` reduces buckets without gradients: no forward waits for their last update, which may be running.
        if self._num_microbatches is None or bucket.num_per_microbatch == 0:
            return False
        return bucket.num_arrived == bucket.num_per_microbatch * self._num_microbatches

    def _start_next(self) -> None:
        self.buckets[self.num_started].start(self.config)
        self.num_started += 1
