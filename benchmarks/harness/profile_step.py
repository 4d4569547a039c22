"""Profiles a few steps of a recipe on a GPU.

    python benchmarks/harness/profile_step.py [--warmup 4] [--steps 10] [--output-dir FOLDER] [--host-profile] \
        [--without-peers 2] -- --config my.yaml

Arguments after `--` go to pretrain_moe.py. Prints the median step time, TFLOP/s by Megatron's formula, peak memory and
the time of every kind of kernel, and how much communication is exposed. `--output-dir` also writes the table, a chart,
the timeline of one layer with a lane per stream, and the trace (for chrome://tracing or Perfetto); with
`--host-profile`, also Python functions by host time, in a step whose backward runs on the main thread. Under torchrun,
rank 0 reports.
"""

import argparse
import cProfile
import io
import json
import os
import pstats
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.timed_run import (  # noqa: E402
    Board,
    CommunicationTime,
    KernelEvent,
    Reading,
    Share,
    TimedRun,
    communication_times,
    context_without_peers,
    graph_pool_bytes,
    kind_of,
    layer_windows,
    nvidia_smi,
    plan_to_run,
    require_gpu,
    shares_of_kernels,
    shares_of_kinds,
    timed_steps,
    traced_steps,
)
from megatron_moe.config.exit_codes import RunError  # noqa: E402
from megatron_moe.config.run import RunPlan  # noqa: E402
from megatron_moe.cost_model.flops import flops_per_step  # noqa: E402
from tools._common import split_at_dashes  # noqa: E402


@dataclass(frozen=True)
class Profile:
    """Measurements of one run."""

    step_ms: tuple[float, ...]
    """Milliseconds of every timed step."""
    tflops: float
    """TFLOP/s per GPU by Megatron's formula, at the median step."""
    tokens_per_second: float
    peak_mib: float
    """Peak allocation after the warm-up, plus memory of CUDA graph pools."""
    losses: tuple[float, ...]
    """Loss of every step, including the warm-up."""
    loads: tuple[float, ...]
    """Busiest expert over the mean per layer; see `TimedRun.take_loads`."""
    rows: tuple[float, ...]
    """Expert rows of the fullest rank over the mean; see `TimedRun.take_rows`."""
    kinds: tuple[Share, ...]
    """Kernel times by kind; empty without a trace, as is `kernels`."""
    kernels: tuple[Share, ...]
    communication: CommunicationTime | None = None
    """Overlapped and exposed communication time; None without a trace."""
    events: tuple[KernelEvent, ...] = ()
    """Kernels of the traced steps."""
    board: Reading | None = None
    """Median power and clock over the timed steps; None without readings."""
    host: str = ""
    """Python functions by host time; empty if not requested."""

    @property
    def median_ms(self) -> float:
        return sorted(self.step_ms)[len(self.step_ms) // 2]


def profile(
    plan: RunPlan,
    *,
    warmup: int,
    steps: int,
    traced: int,
    trace: Path | None,
    quick: bool,
    host: bool = False,
    peers: bool = True,
) -> Profile:
    """Runs warm-up, timed and traced steps, and with `host` a step under the Python profiler.

    `peers`: False if this process is the only rank of a plan for several; see `context_without_peers`.
    """
    run = TimedRun(plan, quick=quick, context=None if peers else context_without_peers(plan))
    print(run.kernel_table, flush=True)
    try:
        with Board(nvidia_smi(f"GPU-{torch.cuda.get_device_properties(run.context.device).uuid}")) as board:
            _, before = timed_steps(run, warmup)
            run.take_loads(), run.take_rows()
            torch.cuda.reset_peak_memory_stats()
            board.reset()
            times, losses = timed_steps(run, steps)
            reading = board.medians()
        peak, loads = torch.cuda.max_memory_allocated() + graph_pool_bytes(run), run.take_loads()
        events = traced_steps(run, traced, trace) if traced else []
        rows = run.take_rows()
        functions = host_functions(run) if host else ""
    finally:
        run.close()
    seconds = sorted(times)[len(times) // 2] / 1e3
    samples, world = run.num_samples, plan.parallel.world_size
    flops = flops_per_step(plan.model, samples, plan.data.seq_length)
    return Profile(
        step_ms=tuple(times),
        tflops=flops / seconds / world / 1e12,
        tokens_per_second=samples * plan.data.seq_length / seconds,
        peak_mib=peak / 2**20,
        losses=(*before, *losses),
        loads=loads,
        rows=rows,
        kinds=tuple(shares_of_kinds(events, traced)) if traced else (),
        kernels=tuple(shares_of_kernels(events, traced)) if traced else (),
        communication=communication_times(events, traced) if traced else None,
        events=tuple(events),
        board=reading,
        host=functions,
    )


def host_functions(run: TimedRun, number: int = 80) -> str:
    """Profiles a step and formats a table of the Python functions with the most host time."""
    torch.cuda.synchronize()
    text, profiler = io.StringIO(), cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # the profiler records only one thread
        profiler.runcall(run.step)
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(number)
    return text.getvalue()


def report(result: Profile, num_kernels: int = 30) -> str:
    """Formats the summary and the kernel tables as text."""
    times = sorted(result.step_ms)
    lines = [
        f"step {result.median_ms:.1f} ms (of {len(times)}: {times[0]:.1f} to {times[-1]:.1f}), "
        f"{result.tflops:.1f} TFLOP/s/GPU, {result.tokens_per_second:,.0f} tokens/s, "
        f"peak {result.peak_mib:,.0f} MiB, loss {result.losses[0]:.4f} to {result.losses[-1]:.4f}"
        + (f", {result.board}" if result.board else ""),
        *([str(result.communication)] if result.communication else []),
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
    """Draws one bar per kind of kernel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = [share for share in result.kinds if share.milliseconds > 0][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(shares) + 1))
    axes.barh([share.name for share in shares], [share.milliseconds for share in shares])
    axes.set_xlabel(f"ms per step (step {result.median_ms:.1f} ms, {result.tflops:.0f} TFLOP/s/GPU)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_timeline(events: Sequence[KernelEvent], path: Path) -> None:
    """Draws the kernels of a typical layer as bars on one lane per stream, forward and backward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    windows = layer_windows(events)
    if not windows:
        return
    figure, panels = pyplot.subplots(len(windows), figsize=(16, 2.5 * len(windows) + 1), squeeze=False)
    colors: dict[str, tuple[float, float, float, float]] = {}
    for axes, (name, (start, end)) in zip(panels[:, 0], windows.items(), strict=True):
        shown = [event for event in events if event.end > start and event.start < end]
        streams = sorted({event.stream for event in shown})
        for event in shown:
            kind = kind_of(event.name)
            color = colors.setdefault(kind, pyplot.get_cmap("tab20")(len(colors) % 20))
            bar = [(event.start - start, event.duration)]
            axes.broken_barh(bar, (streams.index(event.stream) - 0.4, 0.8), facecolors=[color], edgecolor="black")
        axes.set(xlim=(0, end - start), xlabel=f"{name} of a layer: microseconds", yticks=range(len(streams)))
        axes.set_yticklabels([f"stream {stream}" for stream in streams])
    patches = [Patch(color=color, label=kind) for kind, color in colors.items()]
    figure.legend(handles=patches, loc="upper center", ncols=7)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(path, dpi=110)


def store(result: Profile, folder: Path) -> None:
    """Writes table, JSON and chart to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.txt").write_text(report(result, num_kernels=200) + "\n")
    if result.host:
        (folder / "host.txt").write_text(result.host)
    figures = {name: value for name, value in asdict(result).items() if name not in ("events", "host")}
    (folder / "profile.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(result, folder / "profile.png")
    draw_timeline(result.events, folder / "timeline.png")


def main(argv: list[str]) -> int:
    own, theirs = split_at_dashes(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--traced-steps", type=int, default=2)
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument(
        "--quick-init", action="store_true", help="draw weights on the device; losses then differ from those of a run"
    )
    parser.add_argument("--host-profile", action="store_true", help="measure Python functions in one additional step")
    parser.add_argument(
        "--without-peers",
        type=int,
        metavar="RANKS",
        default=1,
        help="time rank 0 of a run of RANKS ranks, the others of which do not exist: communication takes no time",
    )
    options = parser.parse_args(own)
    reports = int(os.environ.get("RANK", "0")) == 0
    folder: Path | None = options.output_dir if reports else None
    try:
        require_gpu("GPU kernels are")
        plan = plan_to_run(theirs, options.without_peers - 1)
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
            host=options.host_profile,
            peers=options.without_peers == 1,
        )
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    if reports:
        print(report(result))
    if folder is not None:
        store(result, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
