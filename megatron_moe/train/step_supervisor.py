"""Supervision of training steps: repeats steps whose expert rows exceeded their buffers, and ends the run on non-finite
values."""

import math
from collections.abc import Sequence
from typing import NoReturn

from megatron_moe.config.exit_codes import NumericsProblem
from megatron_moe.data.loader import TrainLoader
from megatron_moe.logs.log_line import StepResult
from megatron_moe.train.nan_diagnosis import (
    RankReport,
    cause_clause,
    diagnose,
    diagnose_state,
    rerun_verdict,
    write_report,
)
from megatron_moe.train.step_results import StepOutcome, StepResultReader
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer
from megatron_moe.train.training_log import TrainingLog


class StepSupervisor:
    """Launches steps and checks their results one iteration late, so that steps never synchronise with the host."""

    def __init__(self, trainer: Trainer, log: TrainingLog, loader: TrainLoader | None) -> None:
        self._trainer = trainer
        self._log = log
        self._loader = loader
        self._config = trainer.resilience
        self._skipped = 0
        """Number of consecutive rejected steps."""
        self._applied: StepResult | None = None
        """Among the results read so far, that of the newest step whose update was applied."""
        self._new_timeout_s = self._config.distributed_timeout_seconds_after_init
        """Timeout of collectives from the second step on; None if it was already set or is not to be changed."""
        self._reader = StepResultReader(trainer.context.device)

    def step(self, state: TrainState) -> StepOutcome:
        """Trains on the loader's next batches."""
        assert self._loader is not None, "`step` was called without data"
        batches = self._loader.next_step()
        return self._trainer.step(batches, state, self._loader.last_counts)

    def after_step(self, outcome: StepOutcome) -> None:
        """Takes a step's outcome and checks the previous step. After the first step, also sets the final timeout of
        collectives.

        Raises NumericsProblem if the previous step ends the run, and OtherRankProblem if a rank missed an exchange.
        """
        if self._new_timeout_s is not None:
            self._trainer.context.set_timeout(self._new_timeout_s)
            self._new_timeout_s = None
        if self._loader is not None:
            self._log.record_data_time(self._loader.last_seconds)
        self._push(outcome)

    def skip_iteration(self, state: TrainState) -> None:
        """Skips the next iteration: its samples are consumed without a training step, checkpoint or evaluation."""
        assert self._loader is not None, "`skip_iteration` was called after the end of the data"
        self.catch_up()
        num_samples = self._loader.skip_step()
        state.skip(num_samples)
        self._log.log_skipped_iteration(state.iteration, num_samples)
        self.restart_clock()

    def catch_up(self) -> None:
        """Checks the newest step immediately, before a save, an evaluation or the end of the run. Synchronises with the
        device.

        Raises NumericsProblem if the step ends the run, or if an update stored a non-finite value.
        """
        while (result := self._reader.flush()) is not None:
            self._handle(result)
        if not self._trainer.state_is_finite():
            self._raise_bad_state()

    def restart_clock(self) -> None:
        """Excludes the time since the end of the last step from the time of the next step."""
        self._reader.restart_clock()

    def _push(self, outcome: StepOutcome) -> None:
        """Checks the results of the step before `outcome`; repeats both steps if its rows, or their pages in the stash,
        overflowed."""
        previous = self._reader.push(outcome)
        if previous is None or self._handle(previous):
            self._log.end_metric_interval(outcome.iteration)

    def _handle(self, result: StepResult) -> bool:
        """Logs and checks a step. Returns False if it and the step after it were repeated instead."""
        if result.extra_scalars.get("overflow") or result.extra_scalars.get("stash_overflow"):
            self._repeat_from(result)
            return False
        comm = self._trainer.model.expert_comm
        problem = None if comm is None else comm.peer_problem()
        if problem is not None:
            raise problem
        self._log.log_step(result)
        if not result.state_is_finite:
            self._raise_bad_state()
        if result.apply_update:
            self._applied, self._skipped = result, 0
            self._log.log_spikes(result)
        else:
            self._handle_rejected(result)
        return True

    def _repeat_from(self, result: StepResult) -> None:
        """Repeats a step whose expert rows exceeded their bound, or the pages of the stash, and the step after it. The
        first is repeated with a larger bound, or without the stash. The device has applied neither update. Metrics of
        the log interval start again at the repeated step."""
        self._reader.discard_pending()
        self._log.drop_metrics()
        overflow, stash_overflow = (result.extra_scalars.get(name, 0.0) for name in ("overflow", "stash_overflow"))
        steps = self._trainer.prepare_repetition(result.iteration, overflow)
        model, at = self._trainer.model, f"iteration {result.iteration}"
        if overflow:
            assert model.expert_comm is not None
            self._log.note(
                f"{at}: a rank received {overflow:.1%} more expert rows than its bound, so the iteration is repeated "
                f"with --moe-expert-rank-capacity-factor {model.expert_comm.row_capacity_factor:.3g}; start the run "
                "with this value to avoid repetitions"
            )
        if stash_overflow:
            assert model.saved_tensors.stash is not None
            factor = model.saved_tensors.stash.config.moe_paged_stash_buffer_size_factor_cuda
            self._log.note(
                f"{at}: a rank had too few free pages for its expert rows, so the iteration is repeated without the "
                f"paged stash; start the run with --moe-paged-stash-buffer-size-factor-cuda above {factor:g} to avoid "
                "repetitions"
            )
        for step in steps:
            without_stash = bool(stash_overflow) and step is steps[0]
            self._push(self._trainer.step(step.batches, step.state, step.counts, without_stash=without_stash))

    def _handle_rejected(self, result: StepResult) -> None:
        """Reports why an update was rejected. Raises NumericsProblem unless the run skips the step and continues."""
        assert self._loader is not None, "a step without data"
        self._skipped += 1
        finite = math.isfinite(result.loss) and math.isfinite(result.norms["all"])
        stops = (self._config.on_spike if finite else self._config.on_nonfinite) == "stop"
        reports = diagnose(self._trainer, result, self._loader, repeat=stops)
        kind = "a spike" if finite else "not finite"
        what = f"iteration {result.iteration}: loss {result.loss}, gradient norm {result.norms['all']}: {kind}"
        details = self._details(result, reports)
        if stops:
            cause = rerun_verdict(result, reports) if self._config.rerun_mode == "validate_results" else None
            text = (
                f"{what}, so the update was rejected and the weights are those of iteration {result.iteration - 1}"
                f"{cause_clause(reports)}{cause.sentence if cause else ''}{details}; see metrics.jsonl for earlier "
                f"iterations, and lower --lr or --clip-grad"
            )
            raise cause.problem(text) if cause else NumericsProblem(text)
        if self._skipped >= self._config.max_skipped_iterations:
            raise NumericsProblem(
                f"{what}; iterations skipped in a row: {self._skipped} (--max-skipped-iterations "
                f"{self._config.max_skipped_iterations}){details}; lower --lr or --clip-grad, or find the cause with "
                f"{'--on-spike' if finite else '--on-nonfinite'} stop"
            )
        self._log.note(f"{what}; the iteration is skipped, number {self._skipped} in a row{details}")

    def _raise_bad_state(self) -> NoReturn:
        """Raises NumericsProblem about non-finite weights or moments stored by the last update."""
        assert self._applied is not None, "weights or moments are not finite, and no update was applied"
        reports = diagnose_state(self._trainer)
        eps = self._trainer.optimizer.config.adam_eps
        zero = "--adam-eps 0 gives 0 / 0 where a gradient has always been zero: " if eps == 0 else ""
        raise NumericsProblem(
            f"iteration {self._applied.iteration}: its update stored weights or moments that are not finite"
            f"{cause_clause(reports)}; no checkpoint of this state is written{self._details(self._applied, reports)}; "
            f"{zero}continue from the newest checkpoint with a larger --adam-eps (now {eps:g}) or a lower --lr"
        )

    def _details(self, result: StepResult, reports: Sequence[RankReport]) -> str:
        """On the first rank, writes the report of a bad step. Returns a clause with the path of the report, or ""."""
        run_dir = self._trainer.logging.run_dir
        path = write_report(run_dir, result, reports) if run_dir and self._trainer.context.is_first else None
        return f"; details in {path}" if path else ""
