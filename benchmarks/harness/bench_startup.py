"""Times commands that do not import torch, or, with --start, the startup of a training run up to its first step.

python benchmarks/harness/bench_startup.py --repeats 5 --output benchmarks/2026-11-21-2-cores-startup.md
python benchmarks/harness/bench_startup.py --start --ranks 2 --output benchmarks/h200-start.md -- --recipe m27 ...

Startup is measured twice: with an empty kernel cache ("cold"), and with the kernels of the first run ("cached"). The
first step is included.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

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
PHASES = {
    "compile kernels": "warmup.kernel_warmup:compile_kernels",
    "warm-up step": "warmup.kernel_warmup:take_step",
    "rendezvous": "build:build_context",
    "select kernels": "build:build_kernels",
    "run folder, environment": "build:build_reporter",
    "build the model": "build:build_model",
    "build the optimizer": "build:build_trainer",
    "open the data": "build:build_data",
    "log the summary": "build:log_run_summary",
    "first step": "train.trainer:Trainer.step",
}
"""Maps each startup phase to the function of megatron_moe in which it runs. Calls inside another phase are not
counted."""
FIRST, LAST = ("launcher", "imports"), ("other", "total")
_WORKER, _BEGIN, _FOLDER = "--measure-this-process", "BENCH_STARTUP_BEGIN", "BENCH_STARTUP_FOLDER"


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


def measure_start(flags: Sequence[str], ranks: int, cache: Path) -> dict[str, float]:
    """Runs pretrain_moe.py in `ranks` processes; returns rank 0's seconds per phase up to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        program = [__file__, _WORKER, *flags, "--run-dir", f"{folder}/run", "--exit-interval", "1"]
        launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = os.environ | {"TRITON_CACHE_DIR": str(cache), _BEGIN: str(time.time()), _FOLDER: folder}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        subprocess.run([sys.executable, *launcher, *program], cwd=ROOT, check=True, env=environment)
        phases: dict[str, float] = json.loads((Path(folder) / "phases.json").read_text())
    return phases


def run_measured(flags: Sequence[str]) -> int:
    """Runs pretrain_moe.py in this process; rank 0 writes the seconds per phase to phases.json after its first step."""
    begin, now = float(os.environ[_BEGIN]), time.time()
    seconds, inside = {"launcher": now - begin}, [False]
    import pretrain_moe

    modules = {name: importlib.import_module(f"megatron_moe.{name.split(':')[0]}") for name in PHASES.values()}
    for name in ("resilience.peer_failure", "train.exit_conditions", "train.training_log"):
        importlib.import_module(f"megatron_moe.{name}")
    seconds["imports"] = time.time() - now

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            if inside[0]:
                return function(*given, **named)
            inside[0], start = True, time.time()
            try:
                return function(*given, **named)
            finally:
                if phase == "first step" and phase not in seconds:
                    synchronize()
                    seconds[phase] = time.time() - start
                    report(seconds, time.time() - begin)
                elif phase != "first step":
                    seconds[phase] = seconds.get(phase, 0.0) + time.time() - start
                inside[0] = False

        return call

    for phase, name in PHASES.items():
        *holders, function = name.split(":")[1].split(".")
        owner = getattr(modules[name], holders[0]) if holders else modules[name]
        setattr(owner, function, timed(phase, getattr(owner, function)))
    return pretrain_moe.main(flags, os.environ)


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def report(seconds: Mapping[str, float], total: float) -> None:
    """Writes phases.json on rank 0. Time outside all phases is reported as "other"."""
    if os.environ.get("RANK", "0") == "0":
        result = {**seconds, "other": total - sum(seconds.values()), "total": total}
        (Path(os.environ[_FOLDER]) / "phases.json").write_text(json.dumps(result))


def start_table(cold: Mapping[str, float], cached: Mapping[str, float]) -> str:
    """Formats the seconds of every startup phase, with a cold and with a filled kernel cache, as a Markdown table."""
    names = (*FIRST, *PHASES, *LAST)
    rows = [f"| {name} | {cold.get(name, 0.0):.1f} | {cached.get(name, 0.0):.1f} |" for name in names]
    return "\n".join(["| phase | cold, s | cached, s |", "|---|---|---|", *rows])


def main(argv: Sequence[str]) -> None:
    if argv[:1] == [_WORKER]:
        sys.exit(run_measured(argv[1:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of every command")
    parser.add_argument("--output", type=Path, help="file for the table")
    parser.add_argument("--question", action="append", help="arguments to measure instead of the default ones")
    parser.add_argument("--start", action="store_true", help="measure the start of a training run")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the training run, started by torchrun")
    parser.add_argument("flags", nargs="*", help="flags of the training run, after --")
    options = parser.parse_args(argv)
    machine = f"{os.cpu_count()} processors, Python {sys.version.split()[0]}"
    if options.start:
        with tempfile.TemporaryDirectory() as cache:
            table = start_table(*(measure_start(options.flags, options.ranks, Path(cache)) for _ in range(2)))
        title, machine = "Start of a run", f"{machine}, {options.ranks} ranks, seconds of rank 0"
        words = ["--start", "--ranks", str(options.ranks), "--", *options.flags]
    else:
        table = "\n".join([HEAD, *(measured(question, options.repeats) for question in options.question or QUESTIONS)])
        title, machine, words = "Answers without torch", f"{machine}, medians of {options.repeats} processes", []
    print(table, flush=True)
    if options.output:
        command = " ".join(["    python benchmarks/harness/bench_startup.py", *words])
        options.output.write_text(f"# {title}\n\n{machine}.\n\n{table}\n\n{command}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
