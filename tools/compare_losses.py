"""Compares the loss curves of two runs: `python tools/compare_losses.py runs/a runs/b [--plot out.png] [--rtol 1e-12]`.

Reads `metrics.jsonl` of both run folders and prints their common steps, the first step that differs by more than the
tolerance, and the result. Exit code 0: equal within the tolerance; 6: different; 4: a curve cannot be read.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.config.exit_codes import DataProblem, ExitCode
from megatron_moe.logs.metrics_file import read_metrics
from tools._common import reports_errors, run_main, tool_parser, writing

ROWS = 12
"""Maximum number of steps in the table."""


@dataclass(frozen=True)
class LossComparison:
    """Values of two curves at their common iterations."""

    iterations: list[int]
    first: list[float]
    second: list[float]

    def relative(self) -> list[float]:
        """Relative difference |second - first| / |first| at every iteration; |second| where `first` is 0."""
        return [abs(b - a) / abs(a) if a else abs(b) for a, b in zip(self.first, self.second, strict=True)]

    def first_difference(self, rtol: float) -> int | None:
        """First iteration that differs by more than `rtol`, otherwise None. NaN differs from every value, even from
        NaN."""
        pairs = zip(self.iterations, self.relative(), strict=True)
        return next((iteration for iteration, difference in pairs if not difference <= rtol), None)


def read_curve(run: Path, key: str) -> dict[int, float]:
    """Reads one metric of a run folder: iteration -> value; NaN for a value that is not finite."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise DataProblem(f"{path} does not exist; give a run folder that holds metrics.jsonl")
    rows = [row for row in read_metrics(path) if key in row]
    # metrics.jsonl stores values that are not finite as null
    curve = {row["iteration"]: nan if row[key] is None else row[key] for row in rows}
    invalid = [value for value in curve.values() if not isinstance(value, int | float)]
    if invalid:
        raise DataProblem(
            f"{path} has {key!r} values that are not numbers, such as {invalid[0]!r:.40}; give another --key"
        )
    if not curve:
        raise DataProblem(f"{path} has no record of {key!r}; give another --key")
    return curve


def table(comparison: LossComparison, names: tuple[str, str]) -> str:
    """Text table of at most `ROWS` evenly spaced iterations."""
    last = len(comparison.iterations) - 1
    lines = [f"{'iteration':>10}  {names[0][-24:]:>24}  {names[1][-24:]:>24}  {'relative':>10}"]
    columns = comparison.iterations, comparison.first, comparison.second, comparison.relative()
    for i in sorted({round(place * last / (ROWS - 1)) for place in range(ROWS)}):
        iteration, a, b, relative = (column[i] for column in columns)
        lines.append(f"{iteration:>10}  {a:>24.12g}  {b:>24.12g}  {relative:>10.2e}")
    return "\n".join(lines)


def plot(comparison: LossComparison, names: tuple[str, str], key: str, path: Path) -> None:
    """Writes a PNG with both curves and, below them, their relative difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), height_ratios=(3, 1), sharex=True)
    above.plot(comparison.iterations, comparison.first, label=names[0], linewidth=2.5, alpha=0.6)
    above.plot(comparison.iterations, comparison.second, label=names[1], linewidth=1.0, color="black")
    above.set_ylabel(key)
    above.legend()
    below.semilogy(comparison.iterations, [max(r, 1e-17) for r in comparison.relative()], color="black", linewidth=1)
    below.set_ylabel("relative difference")
    below.set_xlabel("iteration")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


@reports_errors
def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--key", default="lm loss", help="metric to compare (default: lm loss)")
    parser.add_argument(
        "--rtol", type=float, default=0.0, help="maximum relative difference at which values count as equal"
    )
    parser.add_argument("--names", nargs=2, help="labels of the two curves")
    parser.add_argument("--plot", type=Path, help="write both curves to this PNG")
    options = parser.parse_args(argv)
    if options.plot and options.plot.suffix != ".png":
        parser.error(f"--plot {options.plot} is not a .png")
    if not options.rtol >= 0:
        parser.error(f"--rtol {options.rtol:g} must be at least 0")
    names = tuple(options.names) if options.names else (str(options.first), str(options.second))
    first, second = read_curve(options.first, options.key), read_curve(options.second, options.key)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise DataProblem("the two runs have no iteration in common; they were logged at different intervals")
    comparison = LossComparison(common, [first[i] for i in common], [second[i] for i in common])
    print(table(comparison, names))
    if options.plot:
        with writing(options.plot):
            plot(comparison, names, options.key, options.plot)
    at = comparison.first_difference(options.rtol)
    largest = max(comparison.relative())
    if at is None:
        print(f"equal within {options.rtol:g} over {len(comparison.iterations)} iterations (largest {largest:.2e})")
        return ExitCode.OK
    print(f"differ by more than {options.rtol:g} from iteration {at} on (largest {largest:.2e})")
    return ExitCode.NUMERICS


if __name__ == "__main__":
    run_main(main)
