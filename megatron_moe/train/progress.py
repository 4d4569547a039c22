"""Follows the steps one behind, reports them, and stops a run whose numbers went bad."""

from megatron_moe.data.loader import TrainLoader
from megatron_moe.logs.reporter import Reporter
from megatron_moe.logs.tally import Tally
from megatron_moe.specs.exitcodes import NumericsProblem
from megatron_moe.train.reading import LateReader, StepReading
from megatron_moe.train.state import TrainState
from megatron_moe.train.step import StepOutcome, Trainer


class Progress:
    """Between the steps, which must not wait, and the reporter, which needs numbers."""

    def __init__(self, trainer: Trainer, reporter: Reporter) -> None:
        self._trainer = trainer
        self._reporter = reporter
        self._late = LateReader(trainer.context.device)
        self._recorded = Tally()
        """What the modules recorded up to the step that is held."""

    def after(self, outcome: StepOutcome) -> None:
        """Takes the newest step and reports the one before it. Raises NumericsProblem when that one was refused."""
        self._handle(self._late.push(outcome))
        if self._reporter.due(outcome.iteration):
            self._recorded = self._trainer.tally.cut()

    def pass_over(self, loader: TrainLoader, state: TrainState) -> None:
        """An iteration whose samples are left out: no step, no checkpoint, no evaluation."""
        self.catch_up()
        num_samples = loader.pass_over()
        state.skip(num_samples)
        self._reporter.passed_over(state.iteration, num_samples)
        self.restart_clock()

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
            self._report(reading)
        if not reading.proceed:
            raise NumericsProblem(
                f"iteration {reading.iteration}: loss {reading.loss}, gradient norm {reading.norms['all']}: not "
                f"finite, so the update was refused and the weights are those of iteration "
                f"{reading.iteration - 1}; see metrics.jsonl for what led there, and lower --lr or --clip-grad"
            )

    def _report(self, reading: StepReading) -> None:
        metrics, self._recorded = self._recorded.take(self._trainer.context), Tally()
        zeros = reading.figures.get("num_zeros")
        report = self._reporter.summary(
            metrics,
            num_zeros=None if zeros is None else int(zeros),
            params_norm=reading.figures.get("params_norm"),
        )
        self._reporter.step(report)
