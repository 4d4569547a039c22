"""Errors injected into the ranks of a layout, to show that the layout check detects and explains them."""

from dataclasses import dataclass, replace

from megatron_moe.config.exit_codes import ExitCode, RunError
from megatron_moe.train.trainer import Trainer

SCALES = ("scale-expert-grads", "scale-attention-grads")
SKIPPED_SUMS = "skip-partial-sums"


class UnknownInjectedError(RunError):
    """Raised if the value of `--inject` has an unknown name or an invalid factor."""

    code = ExitCode.CONFIG


@dataclass(frozen=True)
class InjectedError:
    """Error to inject into a trainer. Calling the object with the trainer, before the first step, injects the error."""

    kind: str
    factor: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "InjectedError":
        """Parses a value of `--inject`, or raises UnknownInjectedError. `scale-expert-grads:2` multiplies the reduced
        gradients of expert parameters by 2. `scale-attention-grads:0.5` multiplies those of all other parameters by
        0.5. `skip-partial-sums` omits the tensor-parallel reduction of partial gradients (e.g. of norms and
        routers)."""
        kind, _, factor = text.partition(":")
        if kind == SKIPPED_SUMS and not factor:
            return cls(kind)
        try:
            number = float(factor)
        except ValueError:
            number = float("nan")
        if kind not in SCALES or number != number:
            known = ", ".join([*(f"{scale}:FACTOR" for scale in SCALES), SKIPPED_SUMS])
            raise UnknownInjectedError(f"--inject {text} is not a known error; choose one of: {known}")
        return cls(kind, number)

    def __call__(self, trainer: Trainer) -> None:
        if self.kind == SKIPPED_SUMS:
            for buffer in trainer.buffers.buffers:
                buffer.layout = replace(buffer.layout, key=replace(buffer.key, partial=False))
            return
        update = trainer._update
        grid = "expert" if self.kind == "scale-expert-grads" else "attention"

        def scale_then_update(*arguments):  # type: ignore[no-untyped-def]
            for buffer in trainer.buffers.buffers:
                if buffer.key.grid == grid:
                    buffer.grads.mul_(self.factor)
            return update(*arguments)

        trainer._update = scale_then_update  # type: ignore[method-assign]
