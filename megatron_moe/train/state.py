"""What must survive a restart, apart from weights and optimizer state."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_moe.specs.count_flops import flops_per_step
from megatron_moe.specs.families.differences import model_differences, recorded_model
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
            "model": recorded_model(plan.model),
            "training": _training(plan),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TrainState":
        return cls(**content["state"])


def config_differences(saved: Mapping[str, Any], plan: RunPlan) -> tuple[list[str], list[str]]:
    """What changed since a checkpoint whose train_state.json is `saved`: in what the weights mean, and in how they are
    trained. One line per value. Checkpoints of older programs do not tell."""
    found = model_differences(plan.model, saved["model"], "checkpoint") if "model" in saved else []
    then, now = saved.get("training", {}), _training(plan)
    changed = {name: (value, then[name]) for name, value in now.items() if name in then and value != then[name]}
    training = [difference.line for difference in found if difference.training]
    training += [f"{name}: {value}, checkpoint {old}" for name, (value, old) in changed.items()]
    return [difference.line for difference in found if not difference.training], training


def _training(plan: RunPlan) -> dict[str, Any]:
    """Values outside of the model that change how it is trained, by name. Data and learning rate are recorded apart."""
    optimizer, precision, data = plan.optimizer, plan.precision, plan.data
    return {
        "--global-batch-size": plan.batch.global_size,
        "--adam-beta1": optimizer.beta1,
        "--adam-beta2": optimizer.beta2,
        "--adam-eps": optimizer.eps,
        "--clip-grad": optimizer.clip_grad,
        "--apply-wd-to-qk-layernorm": optimizer.decay_qk_norm,
        "--calculate-per-token-loss": plan.loop.per_token_loss,
        "--seed": plan.loop.seed,
        "--eod-mask-loss": data.eod_mask_loss,
        "--reset-position-ids": data.reset_position_ids,
        "--reset-attention-mask": data.reset_attention_mask,
        "type of gradients": precision.grads,
        "matrix products in low precision": precision.low,
    }
