"""Why a step was refused: the same microbatches once more on the same weights, with every module watched.

The verdict keeps a bad step from the weights, so that the step can be repeated as it was. All ranks repeat it together.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_moe.data.loader import TrainLoader
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.train.reading import StepReading
from megatron_moe.train.step import KeptStep, Trainer
from megatron_moe.watch.numerics import Finding, FirstBadModule, bad_gradient, bad_weights

REPORT = "crash/nonfinite-{iteration:07d}.json"
_RANKING = ("weight", "activation", "gradient of activation", "gradient")
"""What comes first caused what comes later."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank found."""

    rank: int
    stage: int
    """Its place in the pipeline."""
    findings: tuple[Finding, ...] = ()
    samples: tuple[tuple[int, ...], ...] = ()
    """Ids of the samples of every microbatch of the step, as in the data's order."""
    bad_samples: tuple[int, ...] = ()
    """Those of microbatches whose loss is not finite."""


def diagnose(trainer: Trainer, reading: StepReading, loader: TrainLoader, *, repeat: bool) -> list[RankReport]:
    """What every rank knows of a refused step; every rank calls it.

    Args:
        repeat: also runs the step once more to find modules, parameters and experts. The weights must still be those
            that the step began with. Leaves nothing usable in the gradient buffers.
    """
    kept = next(step for step in trainer.recent if step.iteration == reading.iteration)
    context, order = trainer.context, loader.samples_at(kept.consumed_samples)
    findings, bad_places = _repeat(trainer, kept) if repeat else ((), set())
    report = RankReport(
        rank=context.rank,
        stage=context.group("pp").rank,
        findings=findings,
        samples=order,
        bad_samples=tuple(sample for index, samples in enumerate(order) if index in bad_places for sample in samples),
    )
    # world: some kilobytes per rank, once
    return gather_objects(report, context.group("world"))


def sentence(reports: Sequence[RankReport]) -> str:
    """The cause in a few words, as far as it is known; begins with "; "."""
    found = [(finding, report) for report in reports for finding in report.findings]
    parts = []
    if found:
        first, report = min(found, key=lambda pair: (_RANKING.index(pair[0].kind), _depth(*pair)))
        parts.append(f"first not finite: {first}, on rank {report.rank}")
    samples = sorted({sample for report in reports for sample in report.bad_samples})
    if samples:
        parts.append(f"in samples {', '.join(map(str, samples[:16]))}{', ...' if len(samples) > 16 else ''}")
    return "; " + ", ".join(parts) if parts else ""


def write_report(run_dir: Path, reading: StepReading, reports: Sequence[RankReport]) -> Path | None:
    """All of it as JSON in the run folder's crash/; None where that cannot be written."""
    path = run_dir / REPORT.format(iteration=reading.iteration)
    numbers = {"loss": reading.loss, **{f"norm {name}": value for name, value in reading.norms.items()}}
    content = {
        "iteration": reading.iteration,
        "numbers": {name: repr(value) for name, value in numbers.items()},
        "ranks": [asdict(report) for report in reports],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}-{os.getpid()}")
        aside.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(aside, path)
    except OSError:
        return None
    return path


def _depth(finding: Finding, report: RankReport) -> int:
    """Forwards the first stage is the cause, backwards the last one."""
    return -report.stage if finding.kind.startswith("gradient") else report.stage


def _repeat(trainer: Trainer, kept: KeptStep) -> tuple[tuple[Finding, ...], set[int]]:
    """What is not finite on this rank, and which of its microbatches have a bad loss."""
    bad_places: set[int] = set()
    weights = tuple(bad_weights(trainer.model))
    with FirstBadModule(trainer.model) as watched:
        losses = trainer.repeat(kept)
    bad_places.update(index for index, loss in losses.items() if not bool(torch.isfinite(loss)))
    slots = list(trainer.buffers.slots)
    gradients = [found for slot in slots if (found := bad_gradient(slot.name, slot.parameter, slot.main_grad))]
    modules = [found for found in (watched.forward, watched.backward) if found is not None]
    return (*weights, *modules, *gradients), bad_places
