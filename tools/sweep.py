"""Runs or submits every combination of some flags' values, each in its own folder, and tabulates them.

    python tools/sweep.py --output runs/sweeps/a --set lr 1e-3 3e-4 --set micro-batch-size 1 2 4 --recipe quickstart
    python tools/sweep.py --output runs/sweeps/b --launcher slurm --nodes 4 --set bf16 on off --config my.yaml

The same command again goes on: finished runs are skipped, others resume from their checkpoints. Combinations that the
checks refuse are told and left out. All other words are flags of pretrain_moe.py.

Exit code 0: all that is legal has finished or was submitted; 2: the checks refuse every combination; else that of the
first run that failed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script, from any folder

from arguments.errors import Finished, FlagErrors  # noqa: E402
from arguments.flags import Registry  # noqa: E402
from arguments.jobs.sweeps import Point, axis_of, points  # noqa: E402
from megatron_moe.config.exit_codes import ExitCode, RunError  # noqa: E402
from megatron_moe.resilience.requeue import read_report  # noqa: E402
from megatron_moe.resilience.run_summary import (  # noqa: E402
    METRICS,
    as_text,
    summarize,
)
from tools import launch  # noqa: E402
from tools._common import run_command, run_main  # noqa: E402

SUBMITTED = "job.submitted"
"""In a run folder: SLURM has taken the job."""


def parser() -> argparse.ArgumentParser:
    parser = launch.parser()
    parser.description = (__doc__ or "").splitlines()[0]
    parser.set_defaults(launcher="torchrun")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the sweep: one run folder per combination"
    )
    parser.add_argument("--set", nargs="+", action="append", default=[], metavar=("FLAG", "VALUE"), dest="axes")
    return parser


def state_of(run_dir: Path) -> str:
    """What the run's own report says; `submitted` when there is none yet of a job that SLURM has taken."""
    report = read_report(run_dir)
    if report is not None:
        return report.state
    return "submitted" if (run_dir / SUBMITTED).exists() else "new"


def start(point: Point, options: argparse.Namespace, flags: list[str]) -> tuple[str, int]:
    """Runs or submits one combination unless that was done; returns a line about it and its exit code.

    Raises FlagErrors: the checks refuse it.
    """
    run_dir = options.output / point.name
    state = state_of(run_dir)
    waits = options.launcher == "slurm" and state in ("submitted", "starting", "running", "saving")
    if state == "finished" or waits:
        return f"skipped, {state}", 0
    options.name = point.name
    job = launch.job_of(options, [*flags, *point.flags, "--run-dir", str(run_dir)], os.environ)
    if options.dry_run:
        if job.waits:
            return f"would not start: {'; '.join(job.waits)}", int(ExitCode.NOT_READY)
        return f"would be started: {' '.join(point.flags)}", 0
    path = launch.write(job, launch.script_of(job, options.launcher), options.launcher)
    if options.launcher == "slurm":
        code = launch.submit(path, job, "slurm")
        if code != 0:
            return "sbatch failed", code
        (run_dir / SUBMITTED).touch()
        return "submitted", 0
    with open(run_dir / "output.txt", "a") as output:
        code = run_command(["bash", str(path)], output)
    return "finished" if code == 0 else f"ended with exit code {code}, see {run_dir / 'output.txt'}", code


def main(argv: Sequence[str]) -> int:
    options, flags = parser().parse_known_args(argv)
    registry = Registry.declared()
    try:
        combinations = points([axis_of(words, registry) for words in options.axes], registry)
        codes: list[int] = []
        for number, point in enumerate(combinations, 1):
            try:
                line, code = start(point, options, flags)
                codes.append(code)
            except FlagErrors as problems:
                line = "refused: " + "; ".join(problem.what for problem in problems.problems)
            print(f"[{number}/{len(combinations)}] {point.name}: {line}", flush=True)
        runs = [point.name for point in combinations if (options.output / point.name / METRICS).exists()]
        if runs:
            print(as_text([summarize(options.output / name, name) for name in runs]))
    except Finished as answer:
        print(answer.text)
        return int(answer.code)
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    return next((code for code in codes if code), 0) if codes else int(ExitCode.CONFIG)


if __name__ == "__main__":
    run_main(main)
