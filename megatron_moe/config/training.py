"""Batch sizes and the training loop."""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a global batch is cut into microbatches."""

    micro: int
    """Sequences per microbatch and rank."""
    global_size: int
    """Sequences per step over all ranks, at the end of any ramp-up."""
    rampup: tuple[int, int, int] | None = None
    """(start size, increment, samples over which to ramp)."""

    def size_at(self, consumed_samples: int) -> int:
        """Sequences of the step that begins after `consumed_samples`: the size grows at equal distances of samples."""
        if self.rampup is None:
            return self.global_size
        start, increment, over = self.rampup
        num_increments = (self.global_size - start) // increment
        if num_increments == 0 or consumed_samples > over:
            return self.global_size
        return start + increment * int(consumed_samples / (over / num_increments)) if over else start

    def steps_for(self, samples: int, consumed: int = 0) -> int:
        """Number of whole batches in `samples` after the first `consumed`; a last partial batch is not trained."""
        steps, ramp_samples = 0, self.rampup[2] if self.rampup else -1
        while consumed <= ramp_samples and consumed + self.size_at(consumed) <= samples:
            together = self._steps_of_equal_size(consumed, min(ramp_samples, samples))
            consumed += together * self.size_at(consumed)
            steps += together
        return steps + max(samples - consumed, 0) // self.global_size

    def megatron_steps_for(self, samples: int) -> int:
        """Iteration at which Megatron-LM ends a run of `samples` (`update_train_iters` of its training.py).

        Megatron-LM counts from the first sample in the present batch sizes, even in a resumed run. Within the ramp-up
        it takes a batch as long as no more than `samples` are consumed before it, so the run may exceed `samples`.
        """
        steps = consumed = 0
        while self.rampup is not None and consumed <= min(self.rampup[2], samples):
            consumed += self.size_at(consumed)
            steps += 1
        return steps + max(samples - consumed, 0) // self.global_size

    def _steps_of_equal_size(self, consumed: int, end: int) -> int:
        """Number of steps from `consumed`, at least 1, that have the size of the first and end by `end`."""
        assert self.rampup is not None, "without a ramp-up all steps have the same size"
        size, (start, increment, over) = self.size_at(consumed), self.rampup
        num_increments = (self.global_size - start) // increment
        next_size_at = over / max(num_increments, 1) * ((size - start) // increment + 1)
        number = min(ceil((next_size_at - consumed) / size), (end - consumed) // size)
        while number > 1 and self.size_at(consumed + (number - 1) * size) != size:  # rounding
            number -= 1
        return max(number, 1)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long to train and when to evaluate or leave."""

    train_iters: int
    """With `train_samples`: iterations of a run that starts with the first sample; see `TrainState.last_iteration`."""
    train_samples: int | None = None
    eval_interval: int | None = None
    eval_iters: int = 100
    exit_interval: int | None = None
    exit_duration_minutes: float | None = None
    seed: int = 1234
    skip_train: bool = False
    per_token_loss: bool = False
    """`--calculate-per-token-loss`: divide once by the tokens of the global batch."""
    check_nonfinite: bool = True
    iterations_to_skip: tuple[int, ...] = ()
    """Iterations, counted from 1, whose samples are passed over."""
    manual_gc: bool = False
    manual_gc_interval: int = 0
    manual_gc_eval: bool = True
