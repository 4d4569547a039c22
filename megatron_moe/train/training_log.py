"""Log of training steps: reports at log intervals, spikes, stragglers and the routing trace."""

from megatron_moe.logs.log_line import StepResult
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.logs.reporter import Reporter
from megatron_moe.resilience.numerics_guard import Spikes
from megatron_moe.resilience.stragglers import Stragglers
from megatron_moe.train.trainer import Trainer


class TrainingLog:
    """Logs the results of steps, which the host reads one iteration late."""

    def __init__(self, trainer: Trainer, reporter: Reporter, stragglers: Stragglers | None = None) -> None:
        self._trainer = trainer
        self._reporter = reporter
        self._stragglers = stragglers
        self._loss_spikes = Spikes("loss") if trainer.resilience.check_for_spiky_loss else None
        self._norm_spikes = Spikes("gradient norm") if trainer.resilience.check_for_large_grads else None
        self._metrics = MetricAccumulator()
        """Metrics for the next report. They include the newest step, whose results have not been read yet."""

    def note(self, line: str) -> None:
        self._reporter.note(line)

    def record_data_time(self, seconds: float) -> None:
        """Records how long the newest step waited for its data."""
        if self._stragglers:
            self._stragglers.record_data_time(seconds)

    def end_metric_interval(self, iteration: int) -> None:
        """Ends the metrics of a log interval if the newest launched step, `iteration`, is its last."""
        if self._reporter.is_due(iteration):
            self._metrics = self._trainer.metrics.take_all()

    def drop_metrics(self) -> None:
        """Drops the metrics of the log interval, because its last steps are repeated."""
        self._metrics = MetricAccumulator()

    def log_step(self, result: StepResult) -> None:
        """Logs a step; writes a report if one is due or the update was rejected. Collective."""
        trace = self._trainer.routing_trace
        failure = None if trace is None else trace.write(result.iteration)
        if failure is not None:
            self.note(failure)
        self._reporter.observe(result)
        if self._stragglers:
            self._stragglers.record_step_time(result.seconds)
        if self._reporter.is_due(result.iteration) or not result.apply_update:
            self._report()

    def log_spikes(self, result: StepResult) -> None:
        """Logs a note if the loss or gradient norm of a step whose update was applied is a spike."""
        for spikes, value in ((self._loss_spikes, result.loss), (self._norm_spikes, result.norms["all"])):
            line = spikes.spike_message(value, result.iteration) if spikes else None
            if line:
                self.note(line)

    def log_skipped_iteration(self, iteration: int, num_samples: int) -> None:
        """Logs an iteration whose samples were skipped by `--iterations-to-skip`."""
        self._reporter.log_skipped_iteration(iteration, num_samples)

    def _report(self) -> None:
        trainer = self._trainer
        metrics, self._metrics = self._metrics.reduce(trainer.context), MetricAccumulator()
        self._reporter.report_steps(metrics)
        line = trainer.repeatability.log_line(trainer.context) if trainer.repeatability else None
        for each in [*([line] if line else []), *(self._stragglers.report() if self._stragglers else [])]:
            self.note(each)
