"""Compares loss curves of the quickstart recipe on the CPU and on a GPU.

    python benchmarks/harness/bench_main_job.py [--iterations 200] [--output-dir benchmarks] [--variants "GPU, fp32"
    "GPU, bf16"]
        [-- --lr 1e-3 ...]

Writes `<date>-<machine>-main-job.md` with a plot. The variants train on the same samples in the same order from the
same weights and differ in device, dtype and kernels; each is compared with the first one. Flags after `--` are added to
every variant. Without a GPU only the CPU variants run, which the report mentions.
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # started as a script, from any folder

from benchmarks.harness.loss_plot import PlottedCurve, draw_losses  # noqa: E402
from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode, RunError  # noqa: E402
from megatron_moe.logs.metrics_file import read_metrics  # noqa: E402
from tools._common import split_at_dashes  # noqa: E402


@dataclass(frozen=True)
class Variant:
    """One way to run the recipe."""

    name: str
    flags: tuple[str, ...]
    needs_gpu: bool


VARIANTS = (
    Variant("CPU, fp32", ("--device", "cpu"), needs_gpu=False),
    Variant("GPU, fp32", ("--device", "cuda"), needs_gpu=True),
    Variant("GPU, bf16", ("--device", "cuda", "--bf16"), needs_gpu=True),
    Variant("GPU, bf16, plain torch", ("--device", "cuda", "--bf16", "--kernel-backend", "reference"), needs_gpu=True),
)


@dataclass(frozen=True)
class VariantResult:
    """Result of one variant."""

    variant: Variant
    command: str
    losses: dict[int, float]
    validation: float
    milliseconds: float
    """Median step time of all logged intervals except the first two."""


def run_variant(variant: Variant, iterations: int, folder: Path, more: Sequence[str] = ()) -> VariantResult:
    """Trains one variant in a separate run folder. `more`: flags added to all variants."""
    run = folder / re.sub(r"\W+", "_", variant.name.lower())
    flags = ["--recipe", "quickstart", "--run-dir", str(run), "--train-iters", str(iterations), "--log-interval", "1"]
    flags += ["--save-interval", str(iterations), "--fresh", *variant.flags, *more]
    command = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise EnvironmentProblem(f"{variant.name}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    rows = read_metrics(run / "metrics.jsonl")
    times = sorted(row["iteration-time"] * 1e3 for row in rows if "iteration-time" in row and row["iteration"] > 2)
    validation = [row["lm loss validation"] for row in rows if "lm loss validation" in row]
    print(f"{variant.name}: {times[len(times) // 2]:.1f} ms per step, validation loss {validation[-1]:.4f}", flush=True)
    return VariantResult(
        variant,
        "python pretrain_moe.py " + " ".join(flags),
        {row["iteration"]: row["lm loss"] for row in rows if "lm loss" in row},
        validation[-1],
        times[len(times) // 2],
    )


def largest_difference(result: VariantResult, reference: VariantResult, end: int) -> tuple[float, int]:
    """Largest relative difference of the loss up to iteration `end`, and the iteration at which it occurs."""
    differences = {i: abs(result.losses[i] - loss) / loss for i, loss in reference.losses.items() if i <= end}
    at = max(differences, key=lambda i: differences[i])
    return differences[at], at


def chosen_variants(names: list[str] | None, has_gpu: bool) -> list[Variant]:
    """Variants with these names in table order; None selects all variants that this machine can run."""
    if names is None:
        return [variant for variant in VARIANTS if has_gpu or not variant.needs_gpu]
    chosen = [variant for variant in VARIANTS if variant.name in names]
    for variant in chosen:
        if variant.needs_gpu and not has_gpu:
            raise EnvironmentProblem(f"--variants '{variant.name}' needs a GPU, and torch sees none here.")
    return chosen


def report(
    results: list[VariantResult], machine: str, picture: str, names: list[str] | None = None, more: Sequence[str] = ()
) -> str:
    """Formats the benchmark's Markdown document. `names`: variants, None for all; `more`: flags added to all."""
    reference = results[0]
    iterations = max(reference.losses)
    flags = [] if names is None else ["--variants", *names]
    flags += ["--", *more] if more else []
    command = shlex.join(["python", "benchmarks/harness/bench_main_job.py", "--iterations", str(iterations), *flags])
    lines = [
        f"# The main job on {machine}",
        "",
        f"{date.today()}, torch {torch.__version__}, `{command}`.",
        "The quickstart recipe (`scripts/recipes/quickstart.yaml`) on the sources of the Python standard library. All",
        "variants start from the same weights and see the same samples. Losses agree up to rounding until rounding",
        "first changes the experts of a token; from then on they are different runs with the same statistics.",
        f"Differences are the largest relative ones of the loss to that of {reference.variant.name}.",
        "",
        "| variant | first loss | last loss | validation loss | iterations 1 to 10 | 1 to 50 | all | ms per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        apart = ["reference", "", ""]
        if result is not reference:
            found = [largest_difference(result, reference, end) for end in (10, 50, iterations)]
            apart = [f"{difference:.1e} (at {at})" for difference, at in found]
        first, last = result.losses[1], result.losses[iterations]
        figures = (f"{first:.4f}", f"{last:.4f}", f"{result.validation:.4f}", *apart, f"{result.milliseconds:.1f}")
        lines.append(f"| {' | '.join((result.variant.name, *figures))} |")
    if names is None and len(results) < len(VARIANTS):
        lines += ["", "This machine has no GPU: the other variants were not run."]
    lines += ["", f"![loss curves]({picture})", "", "Commands:", ""]
    lines += [f"    {result.command}" for result in results]
    return "\n".join(lines) + "\n"


def draw(results: list[VariantResult], path: Path) -> None:
    """Plots all curves and, below them, their relative difference from the first one."""
    reference, curves = results[0], []
    for number, result in enumerate(results):
        relative = {i: max(abs(result.losses[i] - loss) / loss, 1e-9) for i, loss in reference.losses.items()}
        differences = {} if result is reference else relative
        curves.append(PlottedCurve(result.variant.name, f"C{number}", result.losses, differences, width=3.0 - number))
    difference = f"relative to {reference.variant.name}"
    draw_losses({"": curves}, path, loss="loss per token (nats)", difference=difference, log=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench_main_job"), help="folder for the run folders")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    every = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=every, metavar="NAME", help=f"of {every}; default: all")
    own, more = split_at_dashes(argv)
    options = parser.parse_args(own)
    has_gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name().replace("NVIDIA ", "") if has_gpu else "CPU"
    try:
        variants = chosen_variants(options.variants, has_gpu)
        results = [run_variant(variant, options.iterations, options.runs, more) for variant in variants]
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    stem = f"{date.today()}-{machine.lower()}-main-job"
    options.output_dir.mkdir(parents=True, exist_ok=True)
    draw(results, options.output_dir / f"{stem}.png")
    text = report(results, machine, f"{stem}.png", options.variants, more)
    (options.output_dir / f"{stem}.md").write_text(text)
    print(text)
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
