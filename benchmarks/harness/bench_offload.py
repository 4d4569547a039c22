"""Times steps with offloaded modules and compares their cost with the minimum time of the copies.

    python benchmarks/harness/bench_offload.py core_attn "core_attn expert_fc1 moe_act" -- --recipe m8
    --hidden-size 7168 --num-attention-heads 128 --q-lora-rank 1536 --moe-ffn-hidden-size 2048 --num-experts 16
    --moe-router-topk 8 --num-layers 5 --moe-layer-freq "([0]*1+[1]*4)" --micro-batch-size 1

Every argument is a list of --offload-modules; a run without offload comes first. Arguments after `--` go to
pretrain_moe.py. The copies to the host can overlap with the forward, a third of the plain step's computation, and the
copies to the device with the backward. Copy time beyond that must extend the step: the printed limit. The rest of the
cost is that of launches, of memory bandwidth that copies take from kernels, and of copies that start too late.

`--device cpu` after `--` runs the same steps without a GPU, with synchronous copies: a check of bytes, not of times.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.timed_run import Marks, TimedRun, plan_to_run, require_gpu, timed_steps  # noqa: E402
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
    """Peak of device memory in bytes; 0 on the CPU."""
    to_host: float = 0.0
    to_device: float = 0.0


@dataclass(frozen=True)
class Limit:
    """Times in ms of the copies of a step, and of the computation that can overlap with them."""

    to_host: float
    to_device: float
    forward: float
    backward: float

    @property
    def exposed(self) -> float:
        """Minimum time in ms by which the copies extend the step."""
        return max(0.0, self.to_host - self.forward) + max(0.0, self.to_device - self.backward)

    @property
    def fraction(self) -> float:
        """Largest fraction of the bytes whose copies fit into the computation."""
        return min(1.0, self.forward / self.to_host, self.backward / self.to_device) if self.to_host else 1.0

    def __str__(self) -> str:
        terms = (
            f"copies to the host {self.to_host:.2f} ms in {self.forward:.2f} ms of forward, "
            f"to the device {self.to_device:.2f} ms in {self.backward:.2f} ms of backward"
        )
        if not self.exposed:
            return f"{terms}: the host link is no limit"
        return f"{terms}: the host link is the limit; --activation-offload-fraction {self.fraction:.2f} would fit"


def link_bytes_per_ms(device: torch.device, num_bytes: int = _COPIED) -> tuple[float, float]:
    """Measures the host link in bytes per ms, (to the host, to the device), with pinned copies in one direction."""
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return _bandwidth(host, on_device, device), _bandwidth(on_device, host, device)


def _bandwidth(into: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    into.copy_(source, non_blocking=True)
    marks = Marks(device)
    for _ in range(4):
        into.copy_(source, non_blocking=True)
    marks.add()
    return 4 * source.nbytes / marks.milliseconds()[0]


def measure(argv: Sequence[str], steps: int) -> Measured:
    """Runs steps of one command line."""
    run = TimedRun(plan_to_run(argv), quick=True)
    on_gpu = run.context.device.type == "cuda"
    try:
        timed_steps(run, _WARMUP)
        offload = run.trainer.model.saved_tensors.offload
        before = (0, 0) if offload is None else (offload.pool.bytes_to_host, offload.pool.bytes_to_device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times, _ = timed_steps(run, steps)
    finally:
        run.close()
    median, peak = sorted(times)[len(times) // 2], torch.cuda.max_memory_allocated() if on_gpu else 0
    if offload is None:
        return Measured(median, peak)
    moved = (offload.pool.bytes_to_host - before[0], offload.pool.bytes_to_device - before[1])
    return Measured(median, peak, moved[0] / steps, moved[1] / steps)


def limit_of(each: Measured, plain_ms: float, link: tuple[float, float]) -> Limit:
    """Times of the copies of a step and of the computation of the plain step. `link`: see `link_bytes_per_ms`."""
    return Limit(each.to_host / link[0], each.to_device / link[1], plain_ms * _FORWARD, plain_ms * (1 - _FORWARD))


def report(each: Measured, plain: Measured, link: tuple[float, float]) -> str:
    """Formats a run with offload: time, cost over the plain run, the limit, bytes, peak memory, and the terms of the
    limit."""
    limit = limit_of(each, plain.step_ms, link)
    rest = each.step_ms - plain.step_ms - limit.exposed
    return (
        f"{each.step_ms:.2f} ms ({each.step_ms / plain.step_ms - 1:+.1%}), limit +{limit.exposed:.2f} ms "
        f"({limit.exposed / plain.step_ms:+.1%}), rest {rest:+.2f} ms, {each.to_host / 1e9:.2f} GB to the host, "
        f"{each.to_device / 1e9:.2f} GB back, peak {each.peak / MIB:,.0f} MiB\n  {limit}"
    )


def main(argv: list[str]) -> int:
    own, theirs = split_at_dashes(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", help='lists of --offload-modules, such as "expert_fc1 moe_act"')
    parser.add_argument("--steps", type=int, default=8, help="number of timed steps")
    parser.add_argument(
        "--link-bytes", type=int, default=_COPIED, help="bytes of the copies that measure the host link"
    )
    options = parser.parse_args(own)
    try:
        on_cpu = plan_to_run(theirs).device == "cpu"
        if not on_cpu:
            require_gpu("copies to pinned memory are")
        link = link_bytes_per_ms(torch.device("cpu" if on_cpu else "cuda"), options.link_bytes)
        print(f"host link: {link[0] / 1e6:.1f} GB/s to the host, {link[1] / 1e6:.1f} GB/s to the device")
        plain = measure(theirs, options.steps)
        print(f"no offload: {plain.step_ms:.2f} ms, peak {plain.peak / MIB:,.0f} MiB", flush=True)
        for modules in options.modules:
            gc.collect()
            if not on_cpu:
                torch.cuda.empty_cache()
            flags = ["--fine-grained-activation-offloading", "--offload-modules", *modules.split()]
            print(modules, report(measure([*theirs, *flags], options.steps), plain, link), sep=": ", flush=True)
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
