"""Diagnosis of rejected steps: repeats the step with hooks on every module to locate non-finite tensors.

The update of a rejected step is not applied, so the repetition uses the same weights and microbatches.
"""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from megatron_moe.data.files import open_atomically
from megatron_moe.data.loader import TrainLoader
from megatron_moe.kernels.ops import all_finite
from megatron_moe.logs.log_line import StepResult
from megatron_moe.optim.grad_buffers import GradBuffers, MainGrad
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.resilience.numerics_guard import Finding, FirstNonfiniteModule, nonfinite_gradient, nonfinite_weights
from megatron_moe.resilience.rerun import RerunResult, RerunVerdict, compare_rerun
from megatron_moe.train.trainer import RetainedStep, Trainer

REPORT = "crash/nonfinite-{iteration:07d}.json"
_RANKING = ("weight", "moment", "activation", "gradient of activation", "gradient")
"""Values of `Finding.kind`, sorted so that causes precede effects."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Non-finite tensors and suspicious samples that one rank found after a failed step."""

    rank: int
    stage: int
    """Pipeline rank of this rank."""
    findings: tuple[Finding, ...] = ()
    samples: tuple[tuple[int, ...], ...] = ()
    """Sample ids of the step, one tuple per microbatch of this rank."""
    bad_samples: tuple[int, ...] = ()
    """Sample ids of the microbatches with a non-finite loss."""
    rerun: RerunResult | None = None
    """This rank's losses in the step and in its repetition; None if the step was not repeated."""
    rerun_values: dict[str, float] = field(default_factory=dict)
    """Global values of the repeated step: "loss" and "norm all" (global gradient norm)."""
    earlier: dict[str, str] | None = None
    """Loss and norms that a previous launch reported for this iteration; None without a report and on ranks above 0."""


def diagnose(trainer: Trainer, result: StepResult, loader: TrainLoader, *, repeat: bool) -> list[RankReport]:
    """Reports of all ranks about a rejected step. Collective.

    Args:
        repeat: repeats the step to locate modules, parameters and experts. Requires the weights from before the step
            and overwrites the gradient buffers.
    """
    kept = next(step for step in trainer.recent if step.iteration == result.iteration)
    context, order = trainer.context, loader.samples_at(kept.state.consumed_samples)
    report = RankReport(rank=context.rank, stage=context.group("pp").rank, samples=order)
    if repeat:
        report = _repeated(trainer, kept, report)
    run_dir = trainer.logging.run_dir
    if run_dir is not None and context.is_first:
        report = replace(report, earlier=_numbers_of(run_dir / REPORT.format(iteration=result.iteration)))
    # collective over world: a few kB per rank, only in this diagnosis
    return gather_objects(report, context.group("world"))


def diagnose_state(trainer: Trainer) -> list[RankReport]:
    """Reports of all ranks about non-finite weights and moments after an update. Collective."""
    context = trainer.context
    moments = (
        Finding(kind="moment", name=f"{state.kind} of {state.name}")
        for state in trainer.optimizer.named_state()
        if state.kind != "master" and not bool(all_finite(state.data))
    )
    with trainer.optimizer.unquantized_weights():
        findings = (*nonfinite_weights(trainer.model), *moments)
    report = RankReport(rank=context.rank, stage=context.group("pp").rank, findings=findings)
    # collective over world: a few kB per rank, only in this diagnosis
    return gather_objects(report, context.group("world"))


def rerun_verdict(result: StepResult, reports: Sequence[RankReport]) -> RerunVerdict:
    """Compares the step with its repetition, and concludes whether the hardware is at fault. Identical on every
    rank."""
    ranks = [report.rerun for report in reports if report.rerun is not None]
    return compare_rerun(step_values(result), reports[0].rerun_values, ranks, reports[0].earlier)


def step_values(result: StepResult) -> dict[str, float]:
    """Loss and gradient norms of a step, by name."""
    return {"loss": result.loss, **{f"norm {name}": value for name, value in result.norms.items()}}


def cause_clause(reports: Sequence[RankReport]) -> str:
    """Clause about the cause, starting with "; "; empty if the cause is unknown."""
    parts = []
    found = [(finding, report) for report in reports for finding in report.findings]
    if found:
        first, report = min(found, key=lambda pair: _causality(*pair))
        parts.append(f"first not finite: {first}, on rank {report.rank}")
    samples = sorted({sample for report in reports for sample in report.bad_samples})
    if samples:
        parts.append(f"in samples {', '.join(map(str, samples[:16]))}{', ...' if len(samples) > 16 else ''}")
    return "; " + ", ".join(parts) if parts else ""


def _causality(finding: Finding, report: RankReport) -> tuple[int, int]:
    """Sort key that puts causes first: by kind, then by pipeline stage (ascending, but descending for gradients)."""
    stage = -report.stage if finding.kind.startswith("gradient") else report.stage
    return _RANKING.index(finding.kind), stage


def write_report(run_dir: Path, result: StepResult, reports: Sequence[RankReport]) -> Path | None:
    """Writes the reports as JSON to the run folder's crash/; returns the path, or None if writing failed."""
    path = run_dir / REPORT.format(iteration=result.iteration)
    content = {
        "iteration": result.iteration,
        "numbers": {name: repr(value) for name, value in step_values(result).items()},
        "ranks": [asdict(report) for report in reports],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomically(path) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")
    except OSError:
        return None
    return path


def _repeated(trainer: Trainer, kept: RetainedStep, report: RankReport) -> RankReport:
    """Repeats the step; returns `report` with the results: non-finite tensors, bad samples, and losses."""
    trainer.optimizer.finish_gather()
    with trainer.optimizer.unquantized_weights():
        weights = tuple(nonfinite_weights(trainer.model))
    with FirstNonfiniteModule(trainer.model) as watched, _nonfinite_gradients(trainer.buffers) as gradients:
        repeated = trainer.repeat(kept.batches, kept.iteration)
    bad_microbatches = {index for index, loss in repeated.losses.items() if not bool(torch.isfinite(loss))}
    modules = [found for found in (watched.forward, watched.backward) if found is not None]
    host, device = socket.gethostname(), str(trainer.context.device)
    return replace(
        report,
        findings=(*weights, *modules, *gradients.values()),
        bad_samples=tuple(sample for index in sorted(bad_microbatches) for sample in report.samples[index]),
        rerun=RerunResult(trainer.context.rank, host, device, kept.local[0].item(), repeated.local[0].item()),
        rerun_values={"loss": repeated.loss.item(), "norm all": trainer.rerun_grad_norm(repeated).item()},
    )


@contextmanager
def _nonfinite_gradients(buffers: GradBuffers) -> Iterator[dict[str, Finding]]:
    """Context that checks every gradient when it is added, and yields the findings by parameter name. After the
    backward, the memory of sharded gradients contains reduced gradients of other layers."""
    found: dict[str, Finding] = {}
    callbacks = [(each, each.on_arrival) for each in buffers.main_grads]

    def check(each: MainGrad, count: Callable[[int], object], number: int) -> None:
        finding = nonfinite_gradient(each.name, each.parameter, each.main_grad)
        if finding is not None:
            found[each.name] = finding
        count(number)

    for each, count in callbacks:
        each.on_arrival = partial(check, each, count)
    try:
        yield found
    finally:
        for each, count in callbacks:
            each.on_arrival = count


def _numbers_of(path: Path) -> dict[str, str] | None:
    """Values by name in the report of a previous launch; None if it is missing or unreadable."""
    try:
        found = json.loads(path.read_text())["numbers"]
        return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
