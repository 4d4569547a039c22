"""Compares Muon with AdamW on one GPU: loss of a small MoE on text, and times of the symmetric GEMMs.

    python benchmarks/harness/bench_muon.py loss [--iterations 500] [--output-dir benchmarks] [-- --seed 7 ...]
    python benchmarks/harness/bench_muon.py products [--output-dir benchmarks]

`loss` trains the models of `bench_fp8_loss.py` in bf16 on the corpus of `bash scripts/quickstart.sh`, each with several
learning rates of both optimizers, all at the same time. For every run, the table has the iteration at which its
smoothed loss reaches the final loss of the best AdamW run. `products` times `syrk` with several tiles
and as plain torch, at shapes of Moonlight and Kimi-K2.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # started as a script, from any folder

from benchmarks.harness.bench_fp8_loss import MODELS, Curve, PrecisionVariant, command, read_curve, run_folder  # noqa: E402
from benchmarks.harness.bench_mixers import milliseconds  # noqa: E402
from benchmarks.harness.loss_plot import PlottedCurve, draw_losses  # noqa: E402
from benchmarks.harness.loss_runs import add_options, finish, run_together  # noqa: E402
from megatron_moe.kernels.backends.triton.matrices import TILE, multiply_tiles  # noqa: E402
from megatron_moe.kernels.reference.matrices import syrk  # noqa: E402
from tools._common import split_at_dashes, tool_parser  # noqa: E402

COMMON = "--weight-decay 0.1 --adam-beta2 0.95 --lr-decay-style cosine"
MUON = "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2"
"""Moonlight's settings. Updates have the same root mean square as AdamW's, so both use one learning rate."""
RATES = {"AdamW": ("5e-4", "1e-3", "2e-3", "4e-3"), "Muon": ("5e-4", "1e-3", "2e-3", "4e-3")}
VARIANTS = tuple(
    PrecisionVariant(
        f"{name}, {rate}", f"{COMMON} --lr {rate} --min-lr {float(rate) / 10:g} {MUON if name == 'Muon' else ''}"
    )
    for name, rates in RATES.items()
    for rate in rates
)
SHAPES = ((8, 2816, 2048), (8, 2048, 1408), (1, 2048, 2048), (4, 4096, 7168), (4, 7168, 2048))
"""(number of matrices, rows, columns): fc1 and fc2 of Moonlight's experts, an attention matrix, Kimi-K2's experts."""
TILES = (TILE, (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3))


def train(options: argparse.Namespace) -> list[str]:
    """Trains all models with all variants at the same time. Returns the last output of each failed run."""
    runs = {(model, each): run_folder(options.runs, model, each) for model in options.models for each in VARIANTS}
    with tempfile.TemporaryDirectory() as saves:
        return run_together({run: command(*pair, run, Path(saves, run.name), options) for pair, run in runs.items()})


def reached(curve: Curve, loss: float) -> int | None:
    """First iteration at which the smoothed loss is at most `loss`."""
    return next((at for at in sorted(curve.losses) if curve.losses[at] <= loss), None)


def loss_report(curves: Sequence[Curve], options: argparse.Namespace, picture: str, machine: str) -> str:
    lines = [
        f"# Loss of Muon and AdamW on one {machine}",
        "",
        f"{date.today()}, torch {torch.__version__}, `python benchmarks/harness/bench_muon.py loss --iterations",
        f"{options.iterations}`. Small models on the sources of the Python standard library, bf16, smoothed losses.",
        "The last column is the iteration at which a run has the last loss of the best AdamW run.",
        "",
        "| model | optimizer, learning rate | iterations | loss | AdamW's last loss at iteration |",
        "|---|---|---|---|---|",
    ]
    for model in options.models:
        own = [curve for curve in curves if curve.model == model]
        goal = min((_last(curve) for curve in own if curve.variant.name.startswith("AdamW")), default=0.0)
        for curve in own:
            at = reached(curve, goal)
            cells = (model, curve.variant.name, str(max(curve.losses)), f"{_last(curve):.4f}", str(at or "not reached"))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"![loss curves]({picture})"]) + "\n"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Plots the best run of each optimizer and, below, the difference between Muon and AdamW."""
    columns: dict[str, list[PlottedCurve]] = {}
    for model in MODELS:
        best: dict[str, Curve] = {}
        for curve in (each for each in curves if each.model == model):
            name = curve.variant.name.partition(",")[0]
            best[name] = min((curve, best.get(name, curve)), key=_last)
        for name, color in (("AdamW", "C0"), ("Muon", "C1")):
            if name in best:
                losses, base = best[name].losses, best.get("AdamW", best[name]).losses
                gap = {at: losses[at] - base[at] for at in losses if at in base} if name == "Muon" else {}
                columns.setdefault(model, []).append(PlottedCurve(best[name].variant.name, color, losses, gap))
    draw_losses(columns, path, loss="smoothed loss per token (nats)", difference="Muon minus AdamW (nats)")


def _last(curve: Curve) -> float:
    return curve.losses[max(curve.losses)]


def product_rows() -> list[str]:
    """Rows of the table of `products`: milliseconds, and TFLOP/s of this project's kernel, counting the FLOPs of a full
    GEMM."""
    rows = []
    for number, rows_of, columns in SHAPES:
        x = torch.randn(number, rows_of, columns, device="cuda", dtype=torch.bfloat16)
        view = x.mT if rows_of > columns else x
        gram = syrk(view)
        for name, operand, base in (("x x^T", view, None), ("b A + c A A", gram, gram)):
            out, flops = torch.empty_like(gram), 2 * number * len(gram[0]) ** 2 * operand.shape[2]

            def torch_product(operand: torch.Tensor = operand, base: torch.Tensor | None = base) -> object:
                return syrk(operand, base, -1.0, 0.5)

            runs: list[Callable[[], object]] = [torch_product]
            for tile in TILES:
                runs.append(
                    lambda operand=operand, base=base, out=out, tile=tile: multiply_tiles(  # type: ignore[misc]
                        operand, base, -1.0, 0.5, out, tile
                    )
                )
            times = [milliseconds(run) for run in runs]
            cells = [f"{number} x {rows_of} x {columns}", name, *(f"{t:.3f} ({flops / t / 1e9:.0f})" for t in times)]
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    return rows


def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("what", choices=["loss", "products"])
    add_options(parser, "bench_muon", iterations=500)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    own, more = split_at_dashes(argv)
    options = parser.parse_args(own, argparse.Namespace(more=more))
    options.output_dir.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    machine = device.removeprefix("NVIDIA ").split()[0]
    stem, failures = f"{date.today()}-{machine.lower()}-muon-{options.what}", []
    if options.what == "loss":
        failures = train(options)
        pairs = ((model, variant) for model in options.models for variant in VARIANTS)
        found = (read_curve(*pair, run_folder(options.runs, *pair), options.iterations) for pair in pairs)
        curves = [curve for curve in found if curve is not None]
        draw(curves, options.output_dir / f"{stem}.png")
        text = loss_report(curves, options, f"{stem}.png", machine)
    else:
        titles = ["matrices", "product", "torch", *(" x ".join(map(str, tile)) for tile in TILES)]
        text = "\n".join(
            [
                f"# Symmetric products on one {machine}",
                "",
                f"{date.today()}, torch {torch.__version__}, `python benchmarks/harness/bench_muon.py products`. ms,",
                "and in parentheses TFLOP/s as if all tiles were computed. Tiles: rows, columns, depth, warps, stages.",
                "",
                f"| {' | '.join(titles)} |",
                f"|{'---|' * len(titles)}",
                *product_rows(),
            ]
        )
    return finish(options.output_dir / f"{stem}.md", text.rstrip() + "\n", failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
