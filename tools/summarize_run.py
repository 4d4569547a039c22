"""Tabulates runs: `python tools/summarize_run.py runs/a runs/lr [--format text|csv|markdown]`.

Takes run folders or folders that contain runs. Speeds are medians over a run's reports after the first.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.resilience.run_summary import as_csv, as_markdown, as_text, find_runs, names_of, summarize
from tools._common import reports_errors, run_main, tool_parser, writing


@reports_errors
def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("places", type=Path, nargs="+", help="run folders, or folders with runs below them")
    parser.add_argument("--format", choices=("text", "csv", "markdown"), default="text")
    parser.add_argument("--skip", type=int, default=1, help="initial reports excluded from speeds (default: 1)")
    parser.add_argument("--output", type=Path, help="write the table to this file as well")
    options = parser.parse_args(argv)
    if options.skip < 0:
        parser.error(f"--skip {options.skip} is less than 0")
    runs = find_runs(options.places)
    rows = [summarize(run, name, options.skip) for run, name in zip(runs, names_of(runs), strict=True)]
    table = {"text": as_text, "csv": as_csv, "markdown": as_markdown}[options.format](rows)
    print(table)
    if options.output:
        with writing(options.output):
            options.output.write_text(table + "\n", encoding="utf-8")
    return ExitCode.OK


if __name__ == "__main__":
    run_main(main)
