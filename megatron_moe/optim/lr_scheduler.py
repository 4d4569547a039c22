"""Learning rate and weight decay as functions of the number of training sequences (samples) consumed.

The schedules are Megatron's. Each step uses the values for the number of samples that earlier steps consumed.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.optimizer import LRConfig, OptimizerConfig

_NOT_PART_OF_THE_CURVE = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
_LENGTHS = ("warmup_samples", "decay_samples", "wsd_decay_samples", "weight_decay_samples")


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate and weight decay schedules of one run."""

    config: LRConfig
    decoupled: tuple[float, float] | None = None
    """(largest, smallest) learning rate of embedding and head (`--decoupled-lr`); None means the values in `config`."""

    @classmethod
    def of(cls, config: LRConfig, optimizer: OptimizerConfig) -> "LRSchedule":
        if optimizer.decoupled_lr is None:
            return cls(config)
        smallest = config.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        return cls(config, (optimizer.decoupled_lr, smallest))

    def lr(self, samples: int) -> float:
        """Learning rate after `samples` sequences."""
        return _learning_rate(self.config, samples, self.config.max_lr, self.config.min_lr)

    def decoupled_lr(self, samples: int) -> float | None:
        """Learning rate of embedding and head, between the values of `decoupled`; None if `decoupled` is None."""
        return None if self.decoupled is None else _learning_rate(self.config, samples, *self.decoupled)

    def weight_decay(self, samples: int) -> float:
        """Weight decay after `samples` sequences. It changes from the start to the end value and then stays
        constant."""
        config = self.config
        over = config.decay_samples if config.weight_decay_samples is None else config.weight_decay_samples
        if config.weight_decay_style == "constant" or samples > over:
            return config.end_weight_decay
        ratio = samples / over
        share = ratio if config.weight_decay_style == "linear" else _half_cosine(1.0 - ratio)
        return config.start_weight_decay + share * (config.end_weight_decay - config.start_weight_decay)

    def to_json(self) -> dict[str, Any]:
        """Settings of the schedule in the form in which checkpoints contain them."""
        curve = {name: value for name, value in asdict(self.config).items() if name not in _NOT_PART_OF_THE_CURVE}
        return curve | {"decoupled": None if self.decoupled is None else list(self.decoupled)}

    def merged_with_checkpoint(
        self, saved: dict[str, Any], batch_sizes: tuple[int, int | None] = (1, None)
    ) -> tuple["LRSchedule", list[str]]:
        """Returns the schedule with which a resumed run continues, and a message per setting that differs.

        `saved`: settings of the checkpoint (`to_json`). `batch_sizes`: `--global-batch-size` of the run and of the
        checkpoint (None if unknown). If settings differ, `--override-opt_param-scheduler` selects the settings of the
        run, and `--use-checkpoint-opt_param-scheduler` those of the checkpoint. Neither flag is needed if the only
        differences are lengths in samples that have the same ratio as the batch sizes: the settings of the checkpoint
        are then used.

        Raises:
            CheckpointProblem: settings differ in another way and neither flag is set, or the checkpoint is to be used
                and only one of the two runs has a separate learning rate of embedding and head.
        """
        own = self.to_json()
        differences = {name: (own[name], saved[name]) for name in own if name in saved and own[name] != saved[name]}
        if not differences:
            return self, []
        pairs = [f"{name} {own} (checkpoint: {stored})" for name, (own, stored) in differences.items()]
        if self.config.override_opt_param_scheduler:
            return self, [f"learning rate schedule: {pair}, the value of the command line is used" for pair in pairs]
        if self.config.use_checkpoint_opt_param_scheduler:
            self._check_decoupled(saved.get("decoupled", own["decoupled"]))
            return self._with(saved), [
                f"learning rate schedule: {pair}, the value of the checkpoint is used" for pair in pairs
            ]
        now, then = batch_sizes
        if then and all(
            name in _LENGTHS and own is not None and stored is not None and math.isclose(own * then, stored * now)
            for name, (own, stored) in differences.items()
        ):
            remedy = "--override-opt_param-scheduler selects the command line's value"
            why = f"the same iterations with another --global-batch-size; the checkpoint's value is used ({remedy})"
            return self._with(saved), [f"learning rate schedule: {pair}, {why}" for pair in pairs]
        raise CheckpointProblem(
            f"the learning rate schedule differs from the checkpoint's: {'; '.join(pairs)}; set "
            f"--override-opt_param-scheduler to continue with the command line's values or "
            f"--use-checkpoint-opt_param-scheduler to continue with the checkpoint's"
        )

    def _check_decoupled(self, saved: list[float] | None) -> None:
        """Raises CheckpointProblem if only one of this run and the checkpoint has a separate learning rate of embedding
        and head: the optimizer was built with or without it."""
        if (saved is None) == (self.decoupled is None):
            return
        what, remedy = "no", "leave out --decoupled-lr"
        if saved is not None:
            what, remedy = "a", f"give --decoupled-lr {saved[0]:g} --decoupled-min-lr {saved[1]:g}"
        raise CheckpointProblem(
            f"--use-checkpoint-opt_param-scheduler: the checkpoint has {what} separate learning rate of embedding and "
            f"output layer, unlike this run; {remedy}, or use --override-opt_param-scheduler"
        )

    def _with(self, saved: dict[str, Any]) -> "LRSchedule":
        own = self.to_json()
        curve = {name: saved[name] for name in own if name in saved and name != "decoupled"}
        decoupled = saved.get("decoupled", own["decoupled"])
        return LRSchedule(replace(self.config, **curve), None if decoupled is None else (decoupled[0], decoupled[1]))


def _learning_rate(config: LRConfig, samples: int, largest: float, smallest: float) -> float:
    if config.warmup_samples > 0 and samples <= config.warmup_samples:
        return config.init_lr + (largest - config.init_lr) * samples / config.warmup_samples
    if config.style == "constant":
        return largest
    if samples > config.decay_samples:
        return smallest
    if config.style == "inverse-square-root":
        return max(smallest, largest * math.sqrt(max(config.warmup_samples, 1) / max(samples, 1)))
    return smallest + _share(config, samples) * (largest - smallest)


def _share(config: LRConfig, samples: int) -> float:
    """Learning rate after warm-up on a scale from 0 (minimum) to 1 (maximum)."""
    if config.style == "WSD":
        assert config.wsd_decay_samples is not None, "WSD needs wsd_decay_samples"
        anneal_start = config.decay_samples - config.wsd_decay_samples
        if samples <= anneal_start:
            return 1.0
        return _annealed(config.wsd_style, (samples - anneal_start) / config.wsd_decay_samples)
    ratio = (samples - config.warmup_samples) / (config.decay_samples - config.warmup_samples)
    return _half_cosine(ratio) if config.style == "cosine" else 1.0 - ratio


def _annealed(style: str, ratio: float) -> float:
    match style:
        case "exponential":
            return 2.0 * math.pow(0.5, ratio) - 1.0
        case "linear":
            return 1.0 - ratio
        case "cosine":
            return _half_cosine(ratio)
        case _:
            return 1.0 - math.sqrt(ratio)


def _half_cosine(ratio: float) -> float:
    """Half a cosine period: 1 at ratio 0, 0 at ratio 1."""
    return 0.5 * (1.0 + math.cos(math.pi * ratio))
