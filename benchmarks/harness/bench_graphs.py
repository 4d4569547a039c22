"""Times the steps of a recipe on a GPU, eager and with CUDA graphs, and reports the memory of the graphs.

    python benchmarks/harness/bench_graphs.py [--steps 10] none attn,moe full_iteration -- --recipe q6
    --micro-batch-size 1

Every mode is a separate run in this process: `none`, `full_iteration`, or a comma-separated list for
--cuda-graph-modules. Arguments after `--` go to pretrain_moe.py. Weights are initialised on the device.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.timed_run import TimedRun, plan_to_run, require_gpu, timed_steps  # noqa: E402
from megatron_moe.config.exit_codes import RunError  # noqa: E402
from tools._common import split_at_dashes  # noqa: E402

MIB = 2**20
_WARMUP = 4
"""Number of warm-up steps; the last one captures."""


def flags_of(mode: str) -> list[str]:
    """Flags of a mode. Batched weight gradients are disabled if captured modules include experts."""
    flags = ["--cuda-graph-warmup-steps", str(_WARMUP - 1), "--cuda-graph-impl"]
    if mode in ("none", "full_iteration"):
        return [*flags, mode]
    modules = mode.split(",")
    waiting = ["--moe-expert-wgrad-interval", "1"] if {"moe", "moe_preprocess"} & set(modules) else []
    return [*flags, "local", "--cuda-graph-modules", *modules, *waiting]


def measure(argv: Sequence[str], steps: int) -> list[str]:
    """Runs one command line and formats median step time, memory, last loss and graph summary."""
    run = TimedRun(plan_to_run(argv), quick=True)
    try:
        timed_steps(run, _WARMUP)
        torch.cuda.reset_peak_memory_stats()
        times, losses = timed_steps(run, steps)
        recorded = run.trainer.full_iteration or run.trainer.pipeline.graph_instances
    finally:
        run.close()
    times.sort()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    return [
        f"{times[len(times) // 2]:.2f} ms (of {steps}: {times[0]:.2f} to {times[-1]:.2f})",
        f"peak {peak / MIB:,.0f} MiB, reserved {reserved / MIB:,.0f} MiB",
        f"loss {losses[-1]!r}",
        *([recorded.summary() or ""] if recorded is not None else []),
    ]


def main(argv: list[str]) -> int:
    own, theirs = split_at_dashes(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(own)
    try:
        require_gpu("CUDA graphs are")
        for mode in options.modes:
            print(mode, *measure([*theirs, *flags_of(mode)], options.steps), sep=" | ", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
