"""Options, processes and documents of the benchmarks that compare losses of training runs."""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools._common import positive


def add_options(parser: argparse.ArgumentParser, name: str, iterations: int) -> None:
    """Adds the options of training runs on the quickstart's corpus. `name`: benchmark, which names the run folders."""
    parser.add_argument("--iterations", type=positive, default=iterations)
    parser.add_argument("--runs", type=Path, default=Path("runs") / name, help="where the run folders go")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    parser.add_argument("--data-path", type=Path, default=Path("data/quickstart/corpus_text_document"))
    parser.add_argument("--tokenizer-model", type=Path, default=Path("data/quickstart/tokenizer.model"))


def run_together(commands: Mapping[Path, Sequence[str]]) -> list[str]:
    """Starts a command for each run folder, all at the same time. Returns the last output of each failed run."""
    running = []
    for run, words in commands.items():
        run.mkdir(parents=True, exist_ok=True)
        with (run / "output.txt").open("w") as output:
            running.append((run, subprocess.Popen(words, stdout=output, stderr=output)))
    return [failure_of(run) for run, process in running if process.wait() != 0]


def failure_of(run: Path) -> str:
    """Reads the last output of a failed run."""
    return f"{run}: {(run / 'output.txt').read_text().strip()[-800:]}"


def finish(document: Path, text: str, failures: Sequence[str]) -> int:
    """Writes and prints the document of a benchmark and its failures; returns the exit code."""
    document.write_text(text)
    print(text)
    return report_failures(failures)


def report_failures(failures: Sequence[str]) -> int:
    """Prints failures; returns the exit code."""
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0
