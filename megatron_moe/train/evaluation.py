"""Evaluation on the validation and test sets (`--eval-interval`, `--eval-iters`)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_moe.config.training import LoopConfig
from megatron_moe.data.batch import MicroBatch
from megatron_moe.data.loader import EvalLoader
from megatron_moe.logs.log_line import ValidationReport
from megatron_moe.logs.reporter import Reporter
from megatron_moe.model.gpt import LossOutput, training_objective
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.train.pipeline_stage import Pipeline
from megatron_moe.train.train_state import TrainState


@torch.no_grad()
def evaluate(pipeline: Pipeline, steps: Iterable[Sequence[MicroBatch]]) -> float:
    """Mean `lm loss` over all tokens of all ranks. Synchronises with the device once, at the end.

    `steps`: this rank's microbatches for each pass of the pipeline.
    """
    model, context = pipeline.model, pipeline.context
    totals = torch.zeros(2, device=context.device, dtype=torch.float64)

    def loss_for_backward(output: LossOutput, batch: MicroBatch, index: int) -> Tensor:
        scalar, sums = training_objective(output, batch, mtp=None, per_token=True)
        totals.add_(torch.stack([value.double() for value in sums["lm loss"]]))
        return scalar

    model.eval()
    with nullcontext() if model.expert_comm is None else model.expert_comm.without_row_bound():
        for step in steps:
            contexts = (replace(batch.context, rng=None, metrics=None, training=False) for batch in step)
            pipeline.run(
                [replace(batch, context=mb) for batch, mb in zip(step, contexts, strict=True)], loss_for_backward
            )
    model.train()
    # collective over pp, dp_cp: 16 bytes each
    all_reduce_(totals, context.group("pp"))
    all_reduce_(totals, context.group("dp_cp"))
    return float(totals[0] / totals[1].clamp(min=1))


@dataclass
class Evaluation:
    """Evaluates every data set separately, every `--eval-interval` iterations and at the end of the run."""

    config: LoopConfig
    pipeline: Pipeline
    valid: Mapping[str, EvalLoader]
    """Name of the validation set -> loader."""
    test: EvalLoader | None
    reporter: Reporter
    evaluated: int | None = None
    """Last iteration after which the validation sets were evaluated; None before the first evaluation."""

    def is_due(self, iteration: int) -> bool:
        """True if an evaluation is due after this iteration."""
        interval = self.config.eval_interval
        return bool(self.valid and self.config.eval_iters and interval and iteration % interval == 0)

    def run_if_due(self, state: TrainState) -> None:
        if self.is_due(state.iteration):
            self._evaluate_all(state, where="")

    def run_last(self, state: TrainState) -> None:
        """Evaluates the test set at the end of the run, and the validation sets unless that was done after the last
        iteration. (Megatron-LM would evaluate them again, on other samples.) Results that were recorded before a
        restart are not computed again, unless `--skip-train` requests them."""
        if not self.config.eval_iters:
            return
        if self.evaluated != state.iteration:
            self._evaluate_all(state, where="on validation set")
        if self.test is not None and not self._is_recorded(state, split="test"):
            self._evaluate(state, self.test.steps(), where="on test set", split="test")

    def _evaluate_all(self, state: TrainState, where: str) -> None:
        """Evaluates all validation sets. `where`: field of `ValidationReport`."""
        # The data is selected by the number of evaluations that were due before this iteration, so restarts do not
        # change it.
        number = max(state.iteration - 1, 0) // self.config.eval_interval if self.config.eval_interval else 0
        losses = []
        self.evaluated = state.iteration
        for name, loader in self.valid.items():
            data_set = name if len(self.valid) > 1 else ""
            if not self._is_recorded(state, split="validation", data_set=data_set):
                losses.append(self._evaluate(state, loader.steps(number), where=where, data_set=data_set))
        if losses and len(losses) == len(self.valid):
            mean = sum(losses) / len(losses)
            state.validation_loss = mean if math.isfinite(mean) else None

    def _is_recorded(self, state: TrainState, **fields: str) -> bool:
        """Returns True, and logs a note, if this evaluation was recorded before a restart; always False with
        `--skip-train`. `fields`: split and data set."""
        recorded = not self.config.skip_train and self.reporter.has_validation(state.iteration, **fields)
        if recorded:
            name = "-".join(filter(None, fields.values()))
            self.reporter.note(
                f"the {name} loss of iteration {state.iteration} is in metrics.jsonl already; --skip-train repeats it"
            )
        return recorded

    def _evaluate(self, state: TrainState, steps: Iterable[Sequence[MicroBatch]], **fields: str) -> float:
        """Reports and returns the mean loss on one data set. `fields`: other fields of `ValidationReport`."""
        loss = evaluate(self.pipeline, steps)
        report = ValidationReport(
            iteration=state.iteration, consumed_samples=state.consumed_samples, loss=loss, **fields
        )
        self.reporter.report_validation(report)
        return loss
