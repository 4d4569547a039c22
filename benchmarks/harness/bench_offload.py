"""Times steps with offloaded modules on a GPU and compares their cost with the minimum time of the copies.

    python benchmarks/harness/bench_offload.py core_attn "core_attn expert_fc1 moe_act" -- --recipe m8
    --hidden-size 7168 --num-attention-heads 128 --q-lora-rank 1536 --moe-ffn-hidden-size 2048 --num-experts 16
    --moe-router-topk 8 --num-layers 5 --moe-layer-freq "([0]*1+[1]*4)" --micro-batch-size 1

Every argument is a list of --offload-modules; a run without offload comes first. Arguments after `--` go to
pretrain_moe.py. The copies to the host can overlap with the forward, a third of the plain step's computation, and the
copies to the device with the backward. Copy time beyond that must extend the step (column `limit`).
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.timed_run import TimedRun, plan_to_run, require_gpu, timed_steps  # noqa: E402
from megatron_moe.config.exit_codes import RunError  # noqa: E402
from tools._common import split_at_dashes  # noqa: E402

MIB = 2**20
_WARMUP = 3
_COPIED = 1 << 30
"""Bytes of the copies that measure the host link."""
_FORWARD = 1 / 3
"""Fraction of a step's computation time that the forward takes."""


@dataclass(frozen=True)
class Measured:
    """Median step time in ms, peak memory and bytes that a step copies to the host and to the device."""

    step_ms: float
    peak: int
    to_host: float = 0.0
    to_device: float = 0.0


def link_bytes_per_ms() -> tuple[float, float]:
    """Measures the host link in bytes per ms, (to the host, to the device), with pinned copies in one direction."""
    device = torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    return _bandwidth(host, device), _bandwidth(device, host)


def _bandwidth(into: torch.Tensor, source: torch.Tensor) -> float:
    into.copy_(source, non_blocking=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(4):
        into.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return 4 * _COPIED / start.elapsed_time(end)


def measure(argv: Sequence[str], steps: int) -> Measured:
    """Runs steps of one command line."""
    run = TimedRun(plan_to_run(argv), quick=True)
    try:
        timed_steps(run, _WARMUP)
        offload = run.trainer.model.saved_tensors.offload
        before = (0, 0) if offload is None else (offload.pool.bytes_to_host, offload.pool.bytes_to_device)
        torch.cuda.reset_peak_memory_stats()
        times, _ = timed_steps(run, steps)
    finally:
        run.close()
    median, peak = sorted(times)[len(times) // 2], torch.cuda.max_memory_allocated()
    if offload is None:
        return Measured(median, peak)
    moved = (offload.pool.bytes_to_host - before[0], offload.pool.bytes_to_device - before[1])
    return Measured(median, peak, moved[0] / steps, moved[1] / steps)


def limit_ms(each: Measured, plain_ms: float, link: tuple[float, float]) -> float:
    """Minimum time in ms by which its copies extend a step."""
    out, back = each.to_host / link[0], each.to_device / link[1]
    return max(0.0, out - plain_ms * _FORWARD) + max(0.0, back - plain_ms * (1 - _FORWARD))


def report(each: Measured, plain: Measured, link: tuple[float, float]) -> str:
    """Formats a run with offload: time, cost over the plain run, the limit, bytes and peak memory."""
    limit = limit_ms(each, plain.step_ms, link)
    return (
        f"{each.step_ms:.2f} ms ({each.step_ms / plain.step_ms - 1:+.1%}), limit +{limit:.2f} ms "
        f"({limit / plain.step_ms:+.1%}), {each.to_host / 1e9:.2f} GB to the host, {each.to_device / 1e9:.2f} GB "
        f"back, peak {each.peak / MIB:,.0f} MiB"
    )


def main(argv: list[str]) -> int:
    own, theirs = split_at_dashes(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", help='lists of --offload-modules, such as "expert_fc1 moe_act"')
    parser.add_argument("--steps", type=int, default=8, help="number of timed steps")
    options = parser.parse_args(own)
    try:
        require_gpu("copies to pinned memory are")
        link = link_bytes_per_ms()
        print(f"host link: {link[0] / 1e6:.1f} GB/s to the host, {link[1] / 1e6:.1f} GB/s to the device")
        plain = measure(theirs, options.steps)
        print(f"no offload: {plain.step_ms:.2f} ms, peak {plain.peak / MIB:,.0f} MiB", flush=True)
        for modules in options.modules:
            gc.collect()
            torch.cuda.empty_cache()
            flags = ["--fine-grained-activation-offloading", "--offload-modules", *modules.split()]
            print(modules, report(measure([*theirs, *flags], options.steps), plain, link), sep=": ", flush=True)
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
