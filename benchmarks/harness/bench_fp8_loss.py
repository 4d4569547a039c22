"""Compares the loss of low-precision and bf16 training of two small MoE models on text, on one device.

    python benchmarks/harness/bench_fp8_loss.py [--iterations 1000] [--output-dir benchmarks] [-- --lr 1e-3 ...]

Trains on the corpus of `bash scripts/quickstart.sh`. The runs of a model differ only in the GEMM format, except for
bf16 runs that show how much losses vary: two with another rounding of one op, and one with another seed (initial
weights and order of the data). Losses are smoothed exponentially and compared, at equal iterations, with the mean of
the bf16 runs with the same seed.

`<date>-<machine>-fp8-loss.md` and its plot are written again after every run, so that an interrupted benchmark leaves a
report. Runs found complete in `--runs` are not repeated. Flags after `--` are added to every run. Without a GPU the
low-precision recipes are emulated. Exit code 1: a gap exceeds its limit, or a run failed.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # started as a script, from any folder

from benchmarks.harness.loss_plot import PlottedCurve, draw_losses  # noqa: E402
from benchmarks.harness.loss_runs import add_options, failure_of, report_failures  # noqa: E402
from megatron_moe.logs.metrics_file import read_metrics  # noqa: E402
from tools._common import positive, split_at_dashes, tool_parser  # noqa: E402

MODELS = MappingProxyType(
    {
        "Moonlight-like": "--recipe m8 --num-layers 4 --moe-layer-freq [0]+[1]*3 --ffn-hidden-size 1024 "
        "--moe-shared-expert-intermediate-size 512",
        "Qwen3-like": "--recipe q6 --num-layers 4",
    }
)
"""Attention and router of a recipe, at the sizes of `SIZES`."""
SIZES = (
    "--hidden-size 512 --num-attention-heads 8 --moe-ffn-hidden-size 256 --num-experts 32 --moe-router-topk 4 "
    "--seq-length 512 --micro-batch-size 16 --global-batch-size 16 --moe-expert-wgrad-interval 1 "
    "--no-moe-router-force-load-balancing --no-mock-data --split 100,0,0 --tokenizer-type SentencePieceTokenizer "
    "--vocab-size 4096 --lr 3e-4 --min-lr 3e-5 --lr-warmup-fraction 0.05 --log-interval 10 "
    "--tensorboard-log-interval 100 --no-plots --no-save-optim --fresh"
)
BLOCKWISE, NVFP4 = "--fp8-format e4m3 --fp8-recipe blockwise", "--fp4-format e2m1"
EMULATE = "--emulate-low-precision"
_DELAYED = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max"


@dataclass(frozen=True)
class PrecisionVariant:
    """Number format and settings with which a model is trained."""

    name: str
    flags: str = ""
    limit: float | None = None
    """Largest accepted relative gap of the smoothed loss to bf16."""
    is_reference: bool = False
    """Whether the run belongs to the bf16 runs whose mean is the reference."""

    @property
    def is_low_precision(self) -> bool:
        return "-format" in self.flags


VARIANTS = (
    PrecisionVariant("bf16", is_reference=True),
    PrecisionVariant("FP8 blockwise, weight gradients in bf16", f"{BLOCKWISE} --no-fp8-wgrad", 0.0025),
    PrecisionVariant("FP8 blockwise", f"{BLOCKWISE} --fp8-expert-wgrad always", 0.0025),
    PrecisionVariant("bf16, another rounding", "--kernel-per-op activation=reference", is_reference=True),
    PrecisionVariant("bf16, a third rounding", "--kernel-per-op add_rms_norm=reference", is_reference=True),
    PrecisionVariant("bf16, another seed", "--seed 7"),
    PrecisionVariant("NVFP4, emulated", f"{NVFP4} {EMULATE}", 0.015),
    PrecisionVariant("MXFP8, emulated", f"--fp8-format e4m3 --fp8-recipe mxfp8 {EMULATE}", 0.0025),
    PrecisionVariant("FP8 tensorwise, emulated", f"--fp8-format hybrid --fp8-recipe tensorwise {EMULATE}", 0.0025),
    PrecisionVariant("FP8 delayed, emulated", f"{_DELAYED} {EMULATE}", 0.0025),
)
"""Variants, in the order in which their runs start."""
SMOOTHED, SETTLED = 0.1, 0.2
"""Time constant of the smoothing and start of the comparison, as fractions of the iterations."""


@dataclass(frozen=True)
class Curve:
    """Smoothed loss of one run by iteration."""

    model: str
    variant: PrecisionVariant
    losses: Mapping[int, float]
    ms_per_step: float
    """Median step time of the log intervals."""


def read_curve(model: str, variant: PrecisionVariant, run: Path, iterations: int) -> Curve | None:
    """Reads the smoothed loss up to the last logged iteration; None if the run logged no loss.

    A logged loss is a mean over a log interval.
    """
    path = run / "metrics.jsonl"
    rows = [row for row in read_metrics(path) if row.get("lm loss") is not None] if path.exists() else []
    if not rows:
        return None
    keep_per_iteration = 1 - 1 / max(SMOOTHED * iterations, 1)
    average, weight, before, losses = 0.0, 0.0, 0, {}
    for row in rows:
        keep = keep_per_iteration ** (row["iteration"] - before)
        average, weight = keep * average + (1 - keep) * row["lm loss"], keep * weight + 1 - keep
        before = row["iteration"]
        losses[before] = average / weight
    times = sorted(row["iteration-time"] for row in rows)
    return Curve(model, variant, losses, 1e3 * times[len(times) // 2])


def gaps(curve: Curve, references: Sequence[Curve], iterations: int) -> dict[int, float]:
    """Relative difference to the mean smoothed loss of the references by iteration, from `SETTLED` to the end of the
    shortest run."""
    common = set(curve.losses).intersection(*(each.losses for each in references))
    return {
        each: curve.losses[each] / fmean(reference.losses[each] for reference in references) - 1
        for each in sorted(common)
        if each >= SETTLED * iterations
    }


def run_folder(runs: Path, model: str, variant: PrecisionVariant) -> Path:
    return runs / f"{model} {variant.name}".replace(",", "").replace(" ", "-").lower()


def flags_of(model: str, variant: PrecisionVariant, options: argparse.Namespace) -> list[str]:
    """Flags of pretrain_moe.py for a run of any length. `options.more`: flags added to every run."""
    flags = [*MODELS[model].split(), *SIZES.split(), *variant.flags.split()]
    flags += ["--tokenizer-model", str(options.tokenizer_model), "--data-path", str(options.data_path)]
    if not torch.cuda.is_available():
        flags += ["--device", "cpu"]
        flags += [EMULATE] if variant.is_low_precision and EMULATE not in variant.flags else []
    return [*flags, *options.more]


def command(model: str, variant: PrecisionVariant, run: Path, save: Path, options: argparse.Namespace) -> list[str]:
    length = ["--train-iters", str(options.iterations), "--save-interval", str(options.iterations)]
    flags = [*flags_of(model, variant, options), *length, "--run-dir", str(run), "--save", str(save)]
    return [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *flags]


def train(options: argparse.Namespace) -> Iterator[str | None]:
    """Trains the runs that are not complete, `options.parallel` at a time, until `options.time_limit` seconds have
    passed. Yields None after each completed run, and the last output of a run that failed."""
    begin = time.monotonic()
    chosen = [variant for variant in VARIANTS if variant.name in options.variants]
    pending = ((model, variant) for variant in chosen for model in MODELS if not is_complete(model, variant, options))
    running: dict[subprocess.Popen[bytes], Path] = {}
    with tempfile.TemporaryDirectory() as saves:
        try:
            while time.monotonic() - begin < options.time_limit:
                for model, variant in islice(pending, options.parallel - len(running)):
                    run = run_folder(options.runs, model, variant)
                    run.mkdir(parents=True, exist_ok=True)
                    with (run / "output.txt").open("w") as output:
                        words = command(model, variant, run, Path(saves, run.name), options)
                        running[subprocess.Popen(words, stdout=output, stderr=output)] = run
                if not running:
                    return
                for process in [each for each in running if each.poll() is not None]:
                    run = running.pop(process)
                    failed = process.returncode != 0
                    print(
                        f"{run.name}: {'failed' if failed else 'done'} after {time.monotonic() - begin:.0f} s",
                        flush=True,
                    )
                    yield failure_of(run) if failed else None
                time.sleep(0.2)
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.wait()


def is_complete(model: str, variant: PrecisionVariant, options: argparse.Namespace) -> bool:
    curve = read_curve(model, variant, run_folder(options.runs, model, variant), options.iterations)
    return curve is not None and options.iterations in curve.losses


def read_curves(options: argparse.Namespace) -> list[Curve]:
    """Curves of all runs in the run folders."""
    pairs = ((model, variant) for model in MODELS for variant in VARIANTS)
    curves = (read_curve(*pair, run_folder(options.runs, *pair), options.iterations) for pair in pairs)
    return [curve for curve in curves if curve is not None]


def comparisons(curves: Sequence[Curve], iterations: int) -> Iterator[tuple[Curve, dict[int, float]]]:
    """Yields every curve with its gaps to the references of the same model."""
    for curve in curves:
        references = [each for each in curves if each.model == curve.model and each.variant.is_reference]
        yield curve, gaps(curve, references, iterations) if references else {}


def exceeded(curves: Sequence[Curve], iterations: int) -> list[str]:
    """Messages about variants whose loss gap exceeds their limit."""
    return [
        f"{curve.model}, {curve.variant.name}: a gap of {largest:.2%} exceeds {curve.variant.limit:.2%}"
        for curve, found in comparisons(curves, iterations)
        if curve.variant.limit is not None
        and (largest := max(map(abs, found.values()), default=0.0)) > curve.variant.limit
    ]


def report(curves: Sequence[Curve], machine: str, setup: str, picture: str, options: argparse.Namespace) -> str:
    """Formats the benchmark's Markdown document. `setup`: date and version of torch."""
    iterations, more = options.iterations, ["--", *options.more] if options.more else []
    constant, start = round(SMOOTHED * iterations), round(SETTLED * iterations)
    words = ["python", "benchmarks/harness/bench_fp8_loss.py", "--iterations", str(iterations), *more]
    lines = [
        f"# Loss of low-precision and bf16 training on one {machine}",
        "",
        f"{setup}, `{shlex.join(words)}`. Small",
        "models on the sources of the Python standard library; the flags are in the harness. Losses are smoothed",
        f"exponentially, with a time constant of {constant} iterations. Gaps are relative to the mean of the bf16 runs",
        f"with the same seed at the same iteration, from iteration {start} on. Runs share the device, so step times",
        "do not measure speed.",
        "",
        "| model | run | iterations | loss | gap at the end | largest gap | mean gap | limit | ms per step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for curve, by_iteration in comparisons(curves, iterations):
        last, found = max(curve.losses), list(by_iteration.values())
        figures = [f"{each:+.3%}" for each in (found[-1], max(found, key=abs), fmean(found))] if found else [""] * 3
        limit = "" if curve.variant.limit is None else f"{curve.variant.limit:.2%}"
        row = [curve.model, curve.variant.name, str(last), f"{curve.losses[last]:.4f}", *figures, limit]
        lines.append(f"| {' | '.join([*row, f'{curve.ms_per_step:.0f}'])} |")
    problems = [f"- {each}" for each in exceeded(curves, iterations)]
    lines += ["", "Above their limits:", "", *problems] if problems else ["", "No gap exceeds its limit."]
    return "\n".join([*lines, "", f"![loss curves]({picture})"]) + "\n"


def draw(curves: Sequence[Curve], path: Path, iterations: int) -> None:
    """Plots the smoothed losses, and below them the gaps to the references."""
    colors = {variant.name: f"C{number}" for number, variant in enumerate(VARIANTS)}
    columns: dict[str, list[PlottedCurve]] = {}
    for curve, found in comparisons(curves, iterations):
        name, percent = curve.variant.name, {at: 100 * gap for at, gap in found.items()}
        columns.setdefault(curve.model, []).append(PlottedCurve(name, colors[name], curve.losses, percent))
    draw_losses(columns, path, loss="smoothed loss per token (nats)", difference="gap to the mean of bf16 (%)")


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Reads the environment file of a run, which may come from another machine."""
    path = min(options.runs.glob("*/environment.txt"))
    return dict(line.partition(": ")[::2] for line in path.read_text().splitlines())


def write_report(options: argparse.Namespace) -> list[Curve]:
    """Writes document and plot of the runs so far; returns their curves."""
    curves = read_curves(options)
    if curves:
        environment = environment_of(options)
        machine = environment["device"].split(",")[0].removeprefix("NVIDIA ").upper().split()[0]
        stem = f"{environment['time'][:10]}-{machine.lower()}-fp8-loss"
        options.output_dir.mkdir(parents=True, exist_ok=True)
        draw(curves, options.output_dir / f"{stem}.png", options.iterations)
        setup = f"{environment['time'][:10]}, torch {environment['package torch']}"
        text = report(curves, machine, setup, f"{stem}.png", options)
        (options.output_dir / f"{stem}.md").write_text(text)
    return curves


def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    names = [variant.name for variant in VARIANTS]
    add_options(parser, "bench_fp8_loss", iterations=1000)
    parser.add_argument("--parallel", type=positive, default=8, help="number of runs at the same time")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which runs are stopped")
    parser.add_argument("--variants", nargs="+", default=names, choices=names, metavar="NAME", help=f"of {names}")
    own, more = split_at_dashes(argv)
    options = parser.parse_args(own, argparse.Namespace(more=more))
    failures = []
    for failure in train(options):
        failures += [failure] if failure else []
        write_report(options)
    curves = write_report(options)
    return report_failures([*failures, *exceeded(curves, options.iterations)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
