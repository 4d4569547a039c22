"""Compares the losses of parallel layouts on the GPUs of a host with those of a run on one device.

    python benchmarks/harness/bench_nccl_parity.py --num-gpus 2 --data data/quickstart

Runs the cover of `tests/gpu/test_parity_nccl.py` for 2 or 4 ranks, then the quickstart recipe under several layouts, in
fp64 and in fp32, and compares their losses with a single-device run on the same microbatches. Writes
`<date>-<device>-<ranks>-nccl-parity.md`. Exit code 6 means that losses differ. `--device cpu` runs only the recipe, on
gloo.
"""

import argparse
import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.logs.metrics_file import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
GLOBAL_BATCH = 8
FP64_RTOL = 1e-9  # maximum relative difference of a loss in fp64
TIMEOUT_S = 180  # timeout of the runs of the recipe
EP, TP, PP, CP = (f"--{axis}-parallel-size" for axis in ("expert-model", "tensor-model", "pipeline-model", "context"))
ALLTOALL = ("--moe-token-dispatcher-type", "alltoall", "--moe-alltoall-backend", "nccl")
TP2 = (TP, "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1")


@dataclass(frozen=True)
class Layout:
    """Parallel layout of the recipe over all ranks, or over one rank."""

    name: str
    flags: tuple[str, ...]
    ranks: int


def layouts_of(ranks: int) -> list[Layout]:
    """Lists the single-device reference, then the layouts that are compared with it."""
    spread = {
        2: {
            "EP2, ZeRO-1": (EP, "2", *ALLTOALL, "--use-distributed-optimizer"),
            "TP2 EP2": (*TP2, EP, "2", *ALLTOALL),
            "PP2": (PP, "2"),
            "CP2 EP2": (CP, "2", EP, "2", *ALLTOALL),
        },
        4: {
            "EP4, ZeRO-1": (EP, "4", *ALLTOALL, "--use-distributed-optimizer"),
            "TP2 EP4": (*TP2, EP, "4", *ALLTOALL),
            "PP2 EP2": (PP, "2", EP, "2", *ALLTOALL),
            "CP2 EP4": (CP, "2", EP, "4", *ALLTOALL),
        },
    }
    return [Layout("one device", (), 1)] + [Layout(name, flags, ranks) for name, flags in spread[ranks].items()]


@dataclass(frozen=True)
class LayoutRun:
    """A layout in one number format."""

    layout: Layout
    precision: str
    folder: Path
    iterations: int
    argv: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class LayoutResult:
    """Losses and step time of a run."""

    losses: dict[int, float]
    validation: float
    milliseconds: float
    """Median step time."""


def runs_of(ranks: int, options: argparse.Namespace) -> list[LayoutRun]:
    """Lists every layout twice: in fp64 for a few steps and in fp32 for many steps."""
    data = options.data.resolve()
    common = ["--recipe", "quickstart", "--tokenizer-model", str(data / "tokenizer.model")]
    common += ["--num-layers", "4", "--moe-layer-freq", "([0]*1+[1]*3)"]  # two stages of equal size
    common += ["--data-path", str(data / "corpus_text_document"), "--device", options.device, "--fresh"]
    common += ["--log-interval", "1", "--lr-decay-iters", "400", "--global-batch-size", str(GLOBAL_BATCH)]
    common += ["--micro-batch-size", str(GLOBAL_BATCH // ranks), "--distributed-timeout-minutes", "1"]
    formats = {
        "fp64": (10, ["--fp64", "--kernel-backend", "reference", "--moe-router-dtype", "fp64"]),
        "fp32": (options.iterations, []),
    }
    found: list[LayoutRun] = []
    for precision, (iterations, flags) in formats.items():
        for layout in layouts_of(ranks):
            folder = options.runs.resolve() / f"{ranks}_{precision}_{layout.name}".replace(",", "").replace(" ", "_")
            argv = (*common, *flags, "--train-iters", str(iterations), *layout.flags, "--run-dir", str(folder))
            found.append(LayoutRun(layout, precision, folder, iterations, argv, options.port + len(found)))
    return found


def run_rank(rank: int, runs: list[LayoutRun], output: Path) -> None:
    """Runs one rank of all runs in sequence, with its output in a file."""
    torch.set_num_threads(1)
    program = runpy.run_path(str(REPOSITORY / "pretrain_moe.py"))["main"]
    out, errors = contextlib.redirect_stdout, contextlib.redirect_stderr
    with output.open("w", buffering=1) as stream, out(stream), errors(stream):
        for run in runs:
            who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.layout.ranks}
            where = {"LOCAL_WORLD_SIZE": run.layout.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": run.port}
            launched = {name: str(value) for name, value in (who | where).items()} if run.layout.ranks > 1 else {}
            code = program(run.argv, {**os.environ, **launched})
            if code:
                sys.exit(code)


def run_all(runs: list[LayoutRun], ranks: int, folder: Path) -> list[str]:
    """Runs all layouts, single-device runs concurrently with the others; returns messages about failed processes."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [(rank, [run for run in runs if run.layout.ranks > 1]) for rank in range(ranks)]
    parts.append((0, [run for run in runs if run.layout.ranks == 1]))
    spawn = multiprocessing.get_context("spawn")
    outputs = [folder / f"output-{number}.txt" for number in range(len(parts))]
    processes = [
        spawn.Process(target=run_rank, args=(*part, output)) for part, output in zip(parts, outputs, strict=True)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    problems = []
    for process, output in zip(processes, outputs, strict=True):
        if process.exitcode != 0:
            ended = "did not end" if process.exitcode is None else f"ended with exit code {process.exitcode}"
            problems.append(f"{output.name} {ended}: ...{output.read_text()[-1500:]}")
        process.kill()
    return problems


def result_of(run: LayoutRun) -> LayoutResult | None:
    """Reads the result of a run; None if the run did not finish."""
    path = run.folder / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    losses = {row["iteration"]: row["lm loss"] for row in rows if "lm loss" in row}
    validation = [row["lm loss validation"] for row in rows if "lm loss validation" in row]
    times = sorted(row["iteration-time"] * 1e3 for row in rows if "iteration-time" in row and row["iteration"] > 2)
    if len(losses) < run.iterations or not validation:
        return None
    return LayoutResult(losses, validation[-1], times[len(times) // 2])


def largest_difference(result: LayoutResult, one: LayoutResult, last: int) -> float:
    """Largest difference of the training losses up to iteration `last`, relative to `one`."""
    return max(abs(result.losses[i] - loss) / loss for i, loss in one.losses.items() if i <= last)


def layout_table(runs: list[LayoutRun]) -> tuple[list[str], bool]:
    """Formats the runs in one number format as Markdown rows. Returns (rows, whether all runs agree)."""
    iterations, precision = runs[0].iterations, runs[0].precision
    rows = [
        f"| {precision}, {iterations} iterations | last training loss | last validation loss | largest relative "
        f"difference to one device: iterations 1-10 | 1-{iterations} | validation | ms per step |",
        "|---|---|---|---|---|---|---|",
    ]
    results = [result_of(run) for run in runs]
    one, good = results[0], all(results)
    for run, result in zip(runs, results, strict=True):
        if result is None or one is None:
            rows.append(f"| {run.layout.name} | did not finish | | | | | |")
            continue
        valid = abs(result.validation - one.validation) / one.validation
        early, late = largest_difference(result, one, 10), largest_difference(result, one, iterations)
        good &= precision != "fp64" or max(late, valid) <= FP64_RTOL
        rows.append(
            f"| {run.layout.name} | {result.losses[iterations]:.6f} | {result.validation:.6f} | {early:.1e} "
            f"| {late:.1e} | {valid:.1e} | {result.milliseconds:.0f} |"
        )
    return rows, good


def run_cover(ranks: int, report: Path, seconds: float) -> tuple[list[str], bool]:
    """Runs the parity tests. Returns (rows of a Markdown table, whether all tests passed)."""
    command = ["timeout", "--signal=INT", f"{seconds:g}", sys.executable, "-m", "pytest", "-q", "-m", f"gpu{ranks}"]
    command += ["tests/gpu/test_parity_nccl.py", "-o", "junit_family=xunit1", f"--junitxml={report.resolve()}"]
    report.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=REPOSITORY, check=False)
    if not report.exists():
        return ["The test run did not finish."], False
    rows = ["| test | cells | passed | largest relative error by quantity | seconds |", "|---|---|---|---|---|"]
    cases = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        cases[str(case.get("name")).partition("[")[0].removeprefix("test_").replace("_", " ")].append(case)
    for name, found in cases.items():
        largest: dict[str, float] = {}
        for each in found:
            for entry in each.iter("property"):
                what = str(entry.get("name"))
                largest[what] = max(largest.get(what, 0.0), float(entry.get("value") or "nan"))
        errors = ", ".join(f"{what} {error:.1e}" for what, error in sorted(largest.items()))
        passed = sum(case.find("failure") is None and case.find("error") is None for case in found)
        seconds = sum(float(case.get("time") or 0) for case in found)
        rows.append(f"| {name} | {len(found)} | {passed} | {errors} | {seconds:.0f} |")
    return rows, done.returncode == 0


def run_layouts(ranks: int, options: argparse.Namespace) -> tuple[list[str], bool]:
    """Trains the recipe with every layout. Returns (Markdown lines, whether all layouts agree)."""
    runs = runs_of(ranks, options)
    problems = run_all(runs, ranks, options.runs)
    lines, good = [], not problems
    for precision in ("fp64", "fp32"):
        rows, right = layout_table([run for run in runs if run.precision == precision])
        lines += [*rows, ""]
        good &= right
    lines += [f"`{run.layout.name}`: `{' '.join(run.layout.flags)}`" for run in runs[1 : len(runs) // 2]]
    return lines + problems, good


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-gpus", type=int, choices=(2, 4), required=True)
    parser.add_argument(
        "--data", type=Path, default=Path("data/quickstart"), help="folder with the corpus of the quickstart"
    )
    parser.add_argument("--iterations", type=int, default=100, help="iterations of the fp32 runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--port", type=int, default=29600, help="first of the ports that the runs use, one per run")
    parser.add_argument(
        "--cover-seconds", type=float, default=600.0, help="seconds after which the parity tests are stopped"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/bench_nccl_parity"), help="folder for the run folders")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    options = parser.parse_args(argv)
    ranks, on_gpu = options.num_gpus, options.device == "cuda"
    machine = torch.cuda.get_device_name().replace("NVIDIA ", "") if on_gpu else "CPU"
    options.output_dir.mkdir(parents=True, exist_ok=True)
    report = options.output_dir / f"cover-{ranks}.xml"
    cover, equal = run_cover(ranks, report, options.cover_seconds) if on_gpu else ([], True)
    layouts, same = run_layouts(ranks, options)
    command = f"python benchmarks/harness/bench_nccl_parity.py {' '.join(argv)}"
    title = f"## {ranks} {machine}, torch {torch.__version__}: `{command}`"
    text = "\n".join([title, "", *cover, "", *layouts, ""])
    (options.output_dir / f"{date.today()}-{machine.lower()}-{ranks}-nccl-parity.md").write_text(text)
    print(text)
    return int(ExitCode.OK if equal and same else ExitCode.NUMERICS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
