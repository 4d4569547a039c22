"""Times commands that need no torch: help, search, printed configuration, a rejected command line, a dry run.

python benchmarks/harness/bench_startup.py --repeats 5 --output benchmarks/2026-11-21-2-cores-startup.md
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = (
    "--help",
    "--help all",
    "--find aux",
    "--recipe quickstart --print-config",
    "--num-layers 4",
    "--recipe deepseek-v3-h100-1024 --dry-run",
)
HEAD = "| command | processor time | wall time | exit code |\n|---|---|---|---|"


def measured(question: str, repeats: int) -> str:
    """Table row with median times in seconds; each run is a separate process."""
    command = [sys.executable, str(ROOT / "pretrain_moe.py"), *question.split()]
    processor, wall, code = [], [], 0
    for _ in range(repeats):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        code = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - start)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return f"| `{question}` | {statistics.median(processor):.2f} s | {statistics.median(wall):.2f} s | {code} |"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of every command")
    parser.add_argument("--output", type=Path, help="file for the table")
    parser.add_argument("--question", action="append", help="words to measure instead of the usual ones")
    options = parser.parse_args(argv)
    rows = [measured(question, options.repeats) for question in options.question or QUESTIONS]
    table = "\n".join([HEAD, *rows])
    print(table)
    if options.output:
        machine = (
            f"{os.cpu_count()} processors, Python {sys.version.split()[0]}, medians of {options.repeats} processes"
        )
        command = "    python benchmarks/harness/bench_startup.py"
        options.output.write_text(f"# Answers without torch\n\n{machine}.\n\n{table}\n\n{command}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
