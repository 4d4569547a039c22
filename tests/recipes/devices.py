"""Trains the proxies of all recipes on a GPU and on the CPU from the same weights and stores their differences.

    python -m tests.recipes.devices [--jobs 15] [WORD ...]     only recipes whose names contain one of the words

Both devices compute the same random tokens without dropout, so that only rounding and defects of kernels differ.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from arguments.errors import FlagErrors
from tests.helpers.programs import PROGRAM, run_script
from tests.helpers.reports import store
from tests.recipes.published import Case, failure, models, proxy_digest, published, shipped

STEPS = (
    *("--proxy", "--train-iters", "3", "--no-progress-bar", "--no-plots"),
    *("--use-cpu-initialization", "--attention-dropout", "0", "--hidden-dropout", "0"),
    "--no-moe-router-force-load-balancing",
)
TIMEOUT_S = 300.0
MAX_LOSS_DIFFERENCE, MAX_NORM_DIFFERENCE = 0.002, 0.05
"""Relative differences of the losses and of the gradient norms that are reported."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Three steps of one proxy on both devices."""

    name: str
    failure: str = ""
    """Why one of the runs ended early."""
    loss: float = 0.0
    """Largest relative difference of a loss (language model, multi-token prediction, load balancing)."""
    grad_norm: float = 0.0
    """Largest relative difference of a gradient norm (all, dense, experts, router)."""

    @property
    def agrees(self) -> bool:
        return not self.failure and self.loss <= MAX_LOSS_DIFFERENCE and self.grad_norm <= MAX_NORM_DIFFERENCE


def distinct(cases: Iterable[Case]) -> list[Case]:
    """Returns the cases whose proxies on one rank differ, without those whose flags are rejected."""
    found: dict[str, Case] = {}
    for case in cases:
        try:
            found.setdefault(proxy_digest(case, STEPS, num_ranks=1), case)
        except FlagErrors:
            continue
    return list(found.values())


def compare(case: Case, devices: tuple[str, str] = ("cuda", "cpu")) -> Comparison:
    """Trains the proxy on both devices."""
    steps = []
    for device in devices:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            words = (PROGRAM, *case.words, *STEPS, "--device", device, "--run-dir", run)
            try:
                done = run_script(*words, cwd=Path(folder), timeout=TIMEOUT_S, OMP_NUM_THREADS="1")
            except subprocess.TimeoutExpired:
                return Comparison(name=case.name, failure=f"{device}: still running at the time limit")
            if done.returncode:
                return Comparison(name=case.name, failure=f"{device}: {failure(done)}")
            steps.append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    return difference(case.name, *steps)


def difference(name: str, gpu: Sequence[Mapping[str, float]], cpu: Sequence[Mapping[str, float]]) -> Comparison:
    """Compares the metrics of all steps. Raises ValueError if the devices logged different numbers of steps."""
    losses, norms = [0.0], [0.0]
    for ours, theirs in zip(gpu, cpu, strict=True):
        for key, value in theirs.items():
            if "loss" in key:
                losses.append(_relative(ours[key], value))
            elif key.startswith("grad-norm"):
                norms.append(_relative(ours[key], value))
    return Comparison(name=name, loss=max(losses), grad_norm=max(norms))


def _relative(ours: float, theirs: float) -> float:
    """Returns the relative difference; infinity if it is undefined because a value is not finite."""
    difference = abs(ours - theirs) / max(abs(theirs), 1e-3)
    return difference if math.isfinite(difference) else math.inf


def table(rows: Sequence[Comparison], device: str) -> str:
    """Returns a Markdown table of all comparisons after a summary."""
    agree = sum(row.agrees for row in rows)
    head = [
        f"# Proxies of all recipes on {device} and on the CPU",
        "",
        f"`python -m tests.recipes.devices`: three steps of {len(rows)} different proxies on one rank, on both devices "
        f"from the same weights. {agree} agree: losses within {MAX_LOSS_DIFFERENCE:.1%}, gradient norms within "
        f"{MAX_NORM_DIFFERENCE:.0%}. Largest relative differences of all steps; the gradient norm is that of all "
        "parameters, of dense ones, experts or routers.",
        "",
        "| recipe | losses | gradient norms |",
        "|---|---|---|",
    ]
    cells = [
        f"| {row.name.replace('|', '/')} | {row.failure or f'{row.loss:.1e} | {row.grad_norm:.1e}'} |" for row in rows
    ]
    return "\n".join([*head, *cells]) + "\n"


def main() -> int:
    """Returns 1 if a proxy fails or its devices disagree."""
    parser = argparse.ArgumentParser(description="Proxies of all recipes on one GPU and on the CPU.")
    parser.add_argument("words", nargs="*", help="only recipes whose names contain one of these words")
    parser.add_argument("--jobs", type=int, default=15, help="number of processes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    words = arguments.words or [""]
    cases = [case for case in (*shipped(), *published(), *models()) if any(word in case.name for word in words)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(compare, distinct(cases)))
    gpu = torch.cuda.get_device_name().replace("NVIDIA ", "")
    print(store("recipes", table(rows, gpu), gpu.lower().replace(" ", "-")))
    for row in rows:
        if not row.agrees:
            print(row, file=sys.stderr)
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
