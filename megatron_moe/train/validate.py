"""When the run evaluates itself, on what, and how the result is reported."""

import math

from megatron_moe.data.loader import EvalLoader
from megatron_moe.logs.line import ValidationReport
from megatron_moe.logs.reporter import Reporter
from megatron_moe.specs.run import RunPlan
from megatron_moe.train.evaluate import evaluate
from megatron_moe.train.stage import Pipeline
from megatron_moe.train.state import TrainState

TEST = "test"


class Validation:
    """Evaluates every `--eval-interval` iterations and at the end of the run, each data set by itself."""

    def __init__(
        self,
        plan: RunPlan,
        pipeline: Pipeline,
        loaders: dict[str, EvalLoader],
        reporter: Reporter,
    ) -> None:
        """`loaders`: by the name of the data set; "test" is read at the end only."""
        self._spec = plan.loop
        self._pipeline = pipeline
        dp = pipeline.context.group("dp").size
        self._num_microbatches = plan.batch.global_size // (plan.batch.micro * dp)
        self._valid = {name: loader for name, loader in loaders.items() if name != TEST}
        self._test = loaders.get(TEST)
        self._reporter = reporter

    def due(self, iteration: int) -> bool:
        """An evaluation follows this iteration."""
        interval = self._spec.eval_interval
        return bool(self._valid and self._spec.eval_iters and interval and iteration % interval == 0)

    def run_if_due(self, state: TrainState) -> None:
        if self.due(state.iteration):
            self._evaluate_all(state, self._num_until(state) - 1, where="")

    def final(self, state: TrainState) -> None:
        """The last evaluation, on the validation and the test set."""
        if not self._spec.eval_iters:
            return
        self._evaluate_all(state, self._num_until(state), where="on validation set")
        if self._test is not None:
            loss = evaluate(self._pipeline, self._test.batches(), self._num_microbatches)
            self._report(state, TEST, loss, "on test set", TEST)

    def _num_until(self, state: TrainState) -> int:
        """Evaluations that fell due so far; it follows from the iteration, so a restart changes nothing."""
        return state.iteration // self._spec.eval_interval if self._spec.eval_interval else 0

    def _evaluate_all(self, state: TrainState, number: int, where: str) -> None:
        """Evaluation `number`, which counts from 0, reads that stretch of the data."""
        losses = []
        for name, loader in self._valid.items():
            loss = evaluate(self._pipeline, loader.batches(number), self._num_microbatches)
            losses.append(loss)
            self._report(state, name if len(self._valid) > 1 else "", loss, where, "validation")
        mean = sum(losses) / len(losses) if losses else math.nan
        state.validation_loss = mean if math.isfinite(mean) else None

    def _report(self, state: TrainState, data_set: str, loss: float, where: str, split: str) -> None:
        self._reporter.validation(
            ValidationReport(
                iteration=state.iteration,
                consumed_samples=state.consumed_samples,
                losses={"lm loss": loss},
                where=where,
                data_set=data_set if split != TEST else "",
                split=split,
            )
        )
