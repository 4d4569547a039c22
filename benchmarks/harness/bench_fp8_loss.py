"""Compares the loss of FP8 and bf16 training of two small models on text, on one GPU.

    python benchmarks/harness/bench_fp8_loss.py [--iterations 1000] [--output-dir benchmarks]

All runs train at the same time, on the corpus of `bash scripts/quickstart.sh`. The runs of a model differ only in the
GEMM format, except one bf16 run with another seed (initial weights and order of the data), which shows by how much
losses differ anyway. Writes `<date>-<machine>-fp8-loss.md` with a plot. Losses are compared as means over windows.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # started as a script, from any folder

from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode, RunError  # noqa: E402
from megatron_moe.logs.metrics_file import read_metrics  # noqa: E402

MODELS = {
    "Moonlight-like": "--recipe m8 --num-layers 4 --moe-layer-freq [0]+[1]*3 --ffn-hidden-size 1024",
    "Qwen3-like": "--recipe q6 --num-layers 4",
}
"""Attention and router of a recipe, at the sizes of `SIZES`."""
SIZES = (
    "--hidden-size 512 --num-attention-heads 8 --moe-ffn-hidden-size 256 --num-experts 32 --moe-router-topk 4 "
    "--seq-length 512 --micro-batch-size 16 --global-batch-size 16 --moe-expert-wgrad-interval 1 "
    "--no-moe-router-force-load-balancing --no-mock-data --split 100,0,0 --tokenizer-type SentencePieceTokenizer "
    "--vocab-size 4096 --lr 1e-3 --min-lr 1e-4 --lr-warmup-fraction 0.05 --log-interval 1 --no-save-optim"
)
FP8 = "--fp8-format e4m3 --fp8-recipe blockwise"
VARIANTS = {
    "bf16": "",
    "bf16, another seed": "--seed 7",
    "FP8": FP8,
    "FP8, weight gradients in bf16": f"{FP8} --no-fp8-wgrad",
}
"""Flags; the first variant is the reference."""
WINDOW = 100
"""Iterations of a mean."""


@dataclass(frozen=True)
class Curve:
    """Loss per iteration of one run."""

    model: str
    variant: str
    losses: Sequence[float]

    def means(self) -> list[float]:
        """Mean loss of each full window."""
        whole = len(self.losses) // WINDOW * WINDOW
        return [sum(self.losses[i : i + WINDOW]) / WINDOW for i in range(0, whole, WINDOW)]


def gaps(curve: Curve, reference: Curve) -> list[float]:
    """Relative difference of the mean loss per window."""
    return [mean / expected - 1 for mean, expected in zip(curve.means(), reference.means(), strict=True)]


def command(model: str, variant: str, run: Path, options: argparse.Namespace) -> list[str]:
    text = ["--tokenizer-model", str(options.tokenizer_model), "--data-path", str(options.data_path)]
    flags = f"{MODELS[model]} {SIZES} {VARIANTS[variant]} --train-iters {options.iterations} --fresh".split()
    return [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *flags, *text, "--run-dir", str(run)]


def train(options: argparse.Namespace) -> list[Curve]:
    """Runs all variants of all models at the same time."""
    started = []
    for model in MODELS:
        for variant in VARIANTS:
            run = options.runs / f"{model}, {variant}".replace(", ", "-").replace(" ", "-").lower()
            run.mkdir(parents=True, exist_ok=True)
            with (run / "output.txt").open("w") as output:
                words = command(model, variant, run, options)
                started.append((model, variant, run, subprocess.Popen(words, stdout=output, stderr=output)))
    failed = [run for _, _, run, process in started if process.wait() != 0]
    if failed:
        raise EnvironmentProblem(f"{failed[0]}: {(failed[0] / 'output.txt').read_text().strip()[-800:]}")
    return [
        Curve(model, variant, [row["lm loss"] for row in read_metrics(run / "metrics.jsonl") if "lm loss" in row])
        for model, variant, run, _ in started
    ]


def by_model(curves: Sequence[Curve]) -> Mapping[str, list[Curve]]:
    return {model: [curve for curve in curves if curve.model == model] for model in MODELS}


def report(curves: Sequence[Curve], machine: str, picture: str, iterations: int) -> str:
    """Benchmark document."""
    lines = [
        f"# Loss of FP8 and bf16 training on one {machine}",
        "",
        f"{date.today()}, torch {torch.__version__}, `python benchmarks/harness/bench_fp8_loss.py --iterations "
        f"{iterations}`. Small models on the sources of the Python standard library; the flags are in the harness.",
        f"Loss: mean of the last {WINDOW} iterations. Gaps are relative to the first bf16 run, of means over {WINDOW} "
        "iterations, without the first window.",
        "",
        "| model | run | loss | gap at the end | largest gap |",
        "|---|---|---|---|---|",
    ]
    for reference, *others in by_model(curves).values():
        lines.append(f"| {reference.model} | {reference.variant} | {reference.means()[-1]:.4f} | | |")
        for curve in others:
            found = gaps(curve, reference)[1:]
            largest = max(found, key=abs)
            figures = (f"{curve.means()[-1]:.4f}", f"{found[-1]:+.3%}", f"{largest:+.3%}")
            lines.append(f"| {' | '.join((curve.model, curve.variant, *figures))} |")
    return "\n".join([*lines, "", f"![loss curves]({picture})"]) + "\n"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Plots the means, and below them the gaps to the first run of the model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = by_model(curves)
    figure, axes = pyplot.subplots(2, len(models), figsize=(11, 6), height_ratios=(2, 1), sharex=True, squeeze=False)
    for column, (model, runs) in enumerate(models.items()):
        above, below = axes[0][column], axes[1][column]
        for number, curve in enumerate(runs):
            ends = [WINDOW * (window + 1) for window in range(len(curve.means()))]
            above.plot(ends, curve.means(), label=curve.variant, linewidth=3.0 - 0.5 * number, color=f"C{number}")
            if number:
                below.plot(ends[1:], [100 * gap for gap in gaps(curve, runs[0])[1:]], color=f"C{number}", marker=".")
        above.set_title(model)
        above.set_ylabel("loss per token (nats)")
        above.legend()
        below.set_ylabel(f"gap to {runs[0].variant} (%)")
        below.set_xlabel("iteration")
        for each in (above, below):
            each.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench_fp8_loss"), help="where the run folders go")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    parser.add_argument("--data-path", type=Path, default=Path("data/quickstart/corpus_text_document"))
    parser.add_argument("--tokenizer-model", type=Path, default=Path("data/quickstart/tokenizer.model"))
    options = parser.parse_args(argv)
    try:
        if not torch.cuda.is_available():
            raise EnvironmentProblem("torch sees no GPU here, and FP8 GEMMs need one.")
        curves = train(options)
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    machine = torch.cuda.get_device_name().replace("NVIDIA ", "")
    stem = f"{date.today()}-{machine.lower().replace(' ', '-')}-fp8-loss"
    options.output_dir.mkdir(parents=True, exist_ok=True)
    draw(curves, options.output_dir / f"{stem}.png")
    text = report(curves, machine, f"{stem}.png", options.iterations)
    (options.output_dir / f"{stem}.md").write_text(text)
    print(text)
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
