"""What must survive a restart, apart from weights and optimizer state."""

from dataclasses import asdict, dataclass
from typing import Any

from megatron_moe.specs.count_flops import flops_per_step
from megatron_moe.specs.run import RunPlan


@dataclass
class TrainState:
    """Where a run stands. Random streams need no entry: each draw is keyed by seed, iteration and use (`rng.py`)."""

    iteration: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0
    """Training sequences read, over all ranks."""
    skipped_samples: int = 0
    """Those of them that no step was trained on (`--iterations-to-skip`); the learning rate does not count them."""
    consumed_tokens: int = 0
    flops: float = 0.0
    """Model FLOPs spent so far, by the formula of `specs/count_flops.py`."""

    validation_loss: float | None = None
    """Of an evaluation after this very iteration, the mean over its data sets; None without one, or not finite."""

    def advance(self, num_samples: int, plan: RunPlan) -> None:
        """Counts one step of `num_samples` sequences over all ranks."""
        self.iteration += 1
        self.validation_loss = None
        self.consumed_samples += num_samples
        self.consumed_tokens += num_samples * plan.data.seq_length
        self.flops += flops_per_step(plan.model, num_samples, plan.data.seq_length)

    def skip(self, num_samples: int) -> None:
        """Counts an iteration whose samples were passed over."""
        self.iteration += 1
        self.validation_loss = None
        self.consumed_samples += num_samples
        self.skipped_samples += num_samples

    def last_iteration(self, plan: RunPlan) -> int:
        """Iteration after which training ends. `--train-samples` are counted on from `consumed_samples`, so the batch
        size may change between starts."""
        if plan.loop.train_samples is None:
            return plan.loop.train_iters
        return self.iteration + plan.batch.steps_for(plan.loop.train_samples, self.consumed_samples)

    @property
    def trained_samples(self) -> int:
        """Training sequences that steps were made of."""
        return self.consumed_samples - self.skipped_samples

    def to_json(self, plan: RunPlan) -> dict[str, Any]:
        """The content of train_state.json."""
        return {
            "state": asdict(self),
            "seed": plan.loop.seed,
            "data_seed": plan.data.seed,
            "seq_length": plan.data.seq_length,
            "global_batch_size": plan.batch.size_at(self.consumed_samples),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TrainState":
        return cls(**content["state"])
