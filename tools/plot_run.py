"""Draws runs on one HTML page: `python tools/plot_run.py runs/a [runs/b ...] [--output page.html]`.

The page has loss, gradient norm, throughput, memory, learning rate, routing entropy, dead experts and the expert load
of every layer over time; for several runs, also differing flags and the difference of their losses. It contains its
pictures and needs no server.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.config.exit_codes import DataProblem, ExitCode
from megatron_moe.logs.run_page import RunRecords, html_page
from tools._common import reports_errors, run_main, tool_parser, writing


@reports_errors
def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument(
        "--output", type=Path, help="file of the page (default: plots/run.html in the first run folder)"
    )
    args = parser.parse_args(argv)
    names = [run.resolve().name for run in args.runs]
    runs = []
    for run, name in zip(args.runs, names, strict=True):
        if not (run / "metrics.jsonl").exists():
            raise DataProblem(f"{run} is not a run folder: it has no metrics.jsonl")
        runs.append(RunRecords.read(run, name if names.count(name) == 1 else str(run)))
        if not runs[-1].records:
            raise DataProblem(f"{run}/metrics.jsonl is empty: the run has not reported a step yet")
    path = args.output or args.runs[0] / "plots" / "run.html"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html_page(runs), encoding="utf-8")
    print(f"wrote {path}")
    return ExitCode.OK


if __name__ == "__main__":
    run_main(main)
