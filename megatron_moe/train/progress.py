"""Follows the steps one behind, reports them, and stops a run whose numbers went bad."""

from megatron_moe.logs.reporter import Reporter
from megatron_moe.logs.tally import Tally
from megatron_moe.optim.clip import count_zeros
from megatron_moe.specs.exitcodes import NumericsProblem
from megatron_moe.specs.run import RunPlan
from megatron_moe.train.reading import LateReader, StepReading
from megatron_moe.train.step import StepOutcome, Trainer


class Progress:
    """Between the steps, which must not wait, and the reporter, which needs numbers."""

    def __init__(self, plan: RunPlan, trainer: Trainer, reporter: Reporter) -> None:
        self._plan = plan
        self._trainer = trainer
        self._reporter = reporter
        self._late = LateReader()
        self._recorded = Tally()
        """What the modules recorded up to the step that is held."""

    def after(self, outcome: StepOutcome) -> None:
        """Takes the newest step and reports the one before it. Raises NumericsProblem when that one was refused."""
        self._handle(self._late.push(outcome))
        if self._reporter.due(outcome.iteration):
            self._recorded = self._trainer.tally.cut()

    def catch_up(self) -> None:
        """Reports the held step too: before a save, an evaluation, or the end. Waits for the device."""
        self._handle(self._late.flush())

    def restart_clock(self) -> None:
        """What happened since the last step was no training: do not count it as step time."""
        self._late.restart_clock()

    def _handle(self, reading: StepReading | None) -> None:
        if reading is None:
            return
        self._reporter.observe(reading)
        if self._reporter.due(reading.iteration) or not reading.proceed:
            self._report()
        if not reading.proceed:
            raise NumericsProblem(
                f"iteration {reading.iteration}: loss {reading.loss}, gradient norm {reading.norms['all']}: not "
                f"finite, so the update was refused and the weights are those of iteration "
                f"{reading.iteration - 1}; see metrics.jsonl for what led there, and lower --lr or --clip-grad"
            )

    def _report(self) -> None:
        spec, context = self._plan.logging, self._trainer.context
        metrics, self._recorded = self._recorded.take(context), Tally()
        report = self._reporter.summary(
            metrics,
            num_zeros=int(count_zeros(self._trainer.buffers)) if spec.log_num_zeros else None,
            params_norm=float(self._trainer.optimizer.params_norm()) if spec.log_params_norm else None,
        )
        self._reporter.step(report)
