"""Runs a recipe for a few steps on a GPU and prints where the step goes.

    python tools/profile_step.py [--warmup 4] [--steps 10] [--output-dir FOLDER] -- --config my.yaml

What stands behind `--` is the command line of pretrain_moe.py. Prints the median step time, TFLOP/s by Megatron's
formula, peak memory, and the milliseconds of every kind of kernel. With `--output-dir` the table, a chart and the
chronological trace (for chrome://tracing or Perfetto) are written there. Nothing of the run is saved.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from arguments.read import read_plan
from megatron_moe import build
from megatron_moe.data.loader import TrainLoader
from megatron_moe.data.tokenizer import vocab_size_of
from megatron_moe.logs.kernel_times import KernelEvent, Share, shares_of_kernels, shares_of_kinds
from megatron_moe.specs.count_flops import flops_per_step
from megatron_moe.specs.exitcodes import EnvironmentProblem, RunError
from megatron_moe.specs.run import RunPlan
from megatron_moe.train.state import TrainState
from megatron_moe.train.step import StepOutcome, Trainer


@dataclass(frozen=True)
class Profile:
    """What was measured of one run."""

    step_ms: tuple[float, ...]
    """Of every timed step."""
    tflops: float
    """Per second and GPU, by Megatron's formula, at the median step."""
    tokens_per_second: float
    peak_mib: float
    """Largest allocation after warm-up."""
    losses: tuple[float, ...]
    kinds: tuple[Share, ...]
    kernels: tuple[Share, ...]

    @property
    def median_ms(self) -> float:
        return sorted(self.step_ms)[len(self.step_ms) // 2]


class Run:
    """A run of pretrain_moe.py without its logs and checkpoints.

    `quick`: weights start from random numbers of the device instead of the run's own, which are drawn on the CPU.
    """

    def __init__(self, plan: RunPlan, *, quick: bool = False) -> None:
        self.plan = plan
        self.context = build.build_context(plan)
        kernels = build.build_kernels(plan, self.context)
        model = build.build_model(plan, self.context, kernels, initial=not quick)
        if quick:
            draw_on_device(model, plan.model.init.std)
        self.trainer: Trainer = build.build_trainer(plan, self.context, model, kernels)
        loader = build.build_train_loader(plan, self.context, build.build_data(plan, self.context))
        assert loader is not None, "a run without training has no step to profile"
        self.loader: TrainLoader = loader
        self.state = TrainState()
        self.kernel_table = kernels.table()
        self.num_samples = 0
        """Of the last step, over all ranks."""

    def step(self) -> StepOutcome:
        outcome = self.trainer.step(self.loader.next_step(), self.state)
        self.num_samples = outcome.num_samples
        self.state.advance(outcome.num_samples, self.plan)
        return outcome

    def close(self) -> None:
        self.loader.close()
        self.context.stop()


@torch.no_grad()
def draw_on_device(model: torch.nn.Module, std: float) -> None:
    """Matrices normal, vectors one."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.normal_(std=std) if parameter.dim() > 1 else parameter.fill_(1.0)


def timed_steps(run: Run, num_steps: int) -> tuple[list[float], list[float]]:
    """(milliseconds, loss) of each step. The host waits at the end alone."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    losses = []
    marks[0].record()
    for mark in marks[1:]:
        losses.append(run.step().loss)
        mark.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False)]
    return times, [loss.item() for loss in losses]


def traced_steps(run: Run, num_steps: int, trace: Path | None) -> list[KernelEvent]:
    """The kernels of a few steps."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            run.step()
        torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return [
        KernelEvent(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]


def profile(plan: RunPlan, *, warmup: int, steps: int, traced: int, trace: Path | None, quick: bool) -> Profile:
    """Warms up, times `steps` steps, and then traces a few more."""
    run = Run(plan, quick=quick)
    print(run.kernel_table, flush=True)
    timed_steps(run, warmup)
    torch.cuda.reset_peak_memory_stats()
    times, losses = timed_steps(run, steps)
    peak = torch.cuda.max_memory_allocated() / 2**20
    events = traced_steps(run, traced, trace)
    run.close()
    seconds = sorted(times)[len(times) // 2] / 1e3
    samples, world = run.num_samples, plan.parallel.world_size
    flops = flops_per_step(plan.model, samples, plan.data.seq_length)
    return Profile(
        step_ms=tuple(times),
        tflops=flops / seconds / world / 1e12,
        tokens_per_second=samples * plan.data.seq_length / seconds,
        peak_mib=peak,
        losses=tuple(losses),
        kinds=tuple(shares_of_kinds(events, traced)),
        kernels=tuple(shares_of_kernels(events, traced)),
    )


def report(result: Profile, num_kernels: int = 30) -> str:
    """The table for people."""
    times = sorted(result.step_ms)
    lines = [
        f"step {result.median_ms:.1f} ms (of {len(times)}: {times[0]:.1f} to {times[-1]:.1f}), "
        f"{result.tflops:.1f} TFLOP/s/GPU, {result.tokens_per_second:,.0f} tokens/s, "
        f"peak {result.peak_mib:,.0f} MiB, loss {result.losses[0]:.4f} to {result.losses[-1]:.4f}",
        "",
        *_table("kind", result.kinds),
        "",
        *_table("kernel", result.kernels[:num_kernels]),
    ]
    return "\n".join(lines)


def _table(title: str, shares: Sequence[Share]) -> list[str]:
    rows = [f"| {share.milliseconds:8.2f} | {share.calls:7.1f} | {share.name[:110]} |" for share in shares]
    return [f"| ms/step | calls | {title} |", "|---|---|---|", *rows]


def draw(result: Profile, path: Path) -> None:
    """One bar per kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = [share for share in result.kinds if share.milliseconds > 0][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(shares) + 1))
    axes.barh([share.name for share in shares], [share.milliseconds for share in shares])
    axes.set_xlabel(f"ms per step (step {result.median_ms:.1f} ms, {result.tflops:.0f} TFLOP/s/GPU)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    own, theirs = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--traced-steps", type=int, default=2)
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("--quick-init", action="store_true", help="draw weights on the device: losses are not a run's")
    options = parser.parse_args(own)
    try:
        if not torch.cuda.is_available():
            raise EnvironmentProblem("torch sees no GPU here, and the kernels of a GPU are what this tool times.")
        plan = read_plan(theirs, os.environ, vocab_size_of=vocab_size_of)
        os.environ.update(plan.environment)
        folder: Path | None = options.output_dir
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        trace = folder / "trace.json" if folder else None
        result = profile(
            plan,
            warmup=options.warmup,
            steps=options.steps,
            traced=options.traced_steps,
            trace=trace,
            quick=options.quick_init,
        )
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    print(report(result))
    if folder is not None:
        (folder / "profile.txt").write_text(report(result, num_kernels=200) + "\n")
        (folder / "profile.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
        draw(result, folder / "profile.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
