"""Batch sizes, training length, and intervals of evaluation, exit and garbage collection."""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Microbatch size, global batch size and its ramp-up."""

    micro_batch_size: int
    """Sequences per microbatch and rank."""
    global_batch_size: int
    """Sequences per step over all ranks, after the ramp-up."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """Initial global batch size, increment, and ramp-up length in samples (`--rampup-batch-size`); None means no
    ramp-up."""
    step_sizes: tuple[tuple[int, int], ...] = ()
    """(number of consumed samples, global batch size from there on), ascending from 0 (`--step-batch-size-schedule`).
    `global_batch_size` is the largest of the sizes. Empty without that flag."""
    eval_micro_batch_size: int | None = None
    """Sequences per microbatch and rank in evaluations; None means as in training."""
    eval_global_batch_size: int | None = None
    """Sequences per batch of an evaluation over all ranks; None means `global_batch_size`."""

    @property
    def evaluation(self) -> "BatchConfig":
        """Batch sizes of evaluations, without ramp-up. Sizes that are not set are those of training."""
        return BatchConfig(
            micro_batch_size=self.eval_micro_batch_size or self.micro_batch_size,
            global_batch_size=self.eval_global_batch_size or self.global_batch_size,
        )

    def size_at(self, consumed_samples: int) -> int:
        """Global batch size of the step after `consumed_samples` samples. It is ramped up at equal intervals."""
        if self.step_sizes:
            return next(size for first, size in reversed(self.step_sizes) if first <= consumed_samples)
        if self.rampup_batch_size is None:
            return self.global_batch_size
        start, increment, over = self.rampup_batch_size
        num_increments = (self.global_batch_size - start) // increment
        if num_increments == 0 or consumed_samples > over:
            return self.global_batch_size
        return start + increment * int(consumed_samples / (over / num_increments)) if over else start

    def steps_for(self, samples: int, consumed: int = 0) -> int:
        """Number of complete steps from sample `consumed` to sample `samples`. Batch sizes follow the ramp-up."""
        if self.step_sizes:
            steps = 0
            for (first, size), (end, _) in pairwise((*self.step_sizes, (samples, 0))):
                if consumed < first:  # the samples end before the first change of batch size
                    break
                within = max(0, min(ceil((end - consumed) / size), (samples - consumed) // size))
                steps, consumed = steps + within, consumed + within * size
            return steps
        steps, ramp_samples = 0, self.rampup_batch_size[2] if self.rampup_batch_size else -1
        while consumed <= ramp_samples and consumed + self.size_at(consumed) <= samples:
            equal = self._steps_of_equal_size(consumed, min(ramp_samples, samples))
            consumed += equal * self.size_at(consumed)
            steps += equal
        return steps + max(samples - consumed, 0) // self.global_batch_size

    def samples_after(self, steps: int) -> int:
        """Number of samples that the first `steps` steps consume."""
        consumed = 0
        while steps > 0:
            changes = [first for first, _ in self.step_sizes if first > consumed]
            if changes:
                equal = ceil((changes[0] - consumed) / self.size_at(consumed))
            elif self.rampup_batch_size and consumed <= self.rampup_batch_size[2]:
                equal = self._steps_of_equal_size(consumed, self.rampup_batch_size[2])
            else:
                equal = steps
            steps, consumed = steps - min(equal, steps), consumed + min(equal, steps) * self.size_at(consumed)
        return consumed

    def megatron_steps_for(self, samples: int) -> int:
        """Number of iterations that Megatron-LM computes for `samples` (`update_train_iters` of its training.py).

        Even in a resumed run, Megatron-LM counts from sample 0 with the current batch sizes. If the run ends within
        the ramp-up, Megatron-LM adds batches until more than `samples` samples are consumed.
        """
        if self.step_sizes:
            return self.steps_for(samples)
        steps = consumed = 0
        while self.rampup_batch_size is not None and consumed <= min(self.rampup_batch_size[2], samples):
            consumed += self.size_at(consumed)
            steps += 1
        return steps + max(samples - consumed, 0) // self.global_batch_size

    def _steps_of_equal_size(self, consumed: int, end: int) -> int:
        """Number of steps from sample `consumed` to the next change of batch size, or to sample `end`; at least 1."""
        assert self.rampup_batch_size is not None, "only called during a ramp-up"
        size, (start, increment, over) = self.size_at(consumed), self.rampup_batch_size
        num_increments = (self.global_batch_size - start) // increment
        next_size_at = over / max(num_increments, 1) * ((size - start) // increment + 1)
        number = min(ceil((next_size_at - consumed) / size), (end - consumed) // size)
        while number > 1 and self.size_at(consumed + (number - 1) * size) != size:  # corrects rounding
            number -= 1
        return max(number, 1)


@dataclass(frozen=True)
class StepCounts:
    """Numbers of samples and tokens that one step processes over all ranks."""

    num_samples: int
    """Number of sequences."""
    num_tokens: int
    """Number of positions of these sequences; in packed rows, padding is not counted."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Length of training, evaluation, exit conditions and garbage collection."""

    train_iters: int
    """Number of training iterations. If `train_samples` is set, this number is valid only for runs that start at
    sample 0; a resumed run uses `TrainState.last_iteration` instead."""
    train_samples: int | None = None
    """Number of training samples (sequences). If None, `train_iters` determines the length."""
    eval_interval: int | None = None
    eval_iters: int = 100
    exit_interval: int | None = None
    exit_duration_in_mins: float | None = None
    seed: int = 1234
    use_cpu_initialization: bool = True
    """Draws the initial weights on the CPU (`--use-cpu-initialization`). If False, draws them on the device, which
    gives other values."""
    moe_routing_replay_path: Path | None = None
    """Folder with a routing trace whose expert choices replace those of the routers in training
    (`--moe-routing-replay-path`). None means that the routers select."""
    skip_train: bool = False
    calculate_per_token_loss: bool = False
    """Averages the loss over all tokens of the global batch, instead of averaging the mean losses of microbatches
    (`--calculate-per-token-loss`)."""
    check_for_nan_in_loss_and_grad: bool = True
    iterations_to_skip: tuple[int, ...] = ()
    """Iterations, counted from 1, whose samples are skipped without a training step."""
    manual_gc: bool = False
    manual_gc_interval: int = 0
    manual_gc_eval: bool = True
