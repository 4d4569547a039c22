"""Times every kernel op with every backend that can compute it, forward and backward, and prints a Markdown table.

python benchmarks/harness/time_kernels.py --device cpu --dtype fp32
python benchmarks/harness/time_kernels.py --device cuda --dtype bf16 --compile --tokens 8192 --seq 4096 --hidden 2048
--ffn 768
    --experts 128 --topk 8 --vocab 151936 --heads 32 --groups 4 --head-dim 128 --weights 500000000

For the backend that `auto` selects, the table also has the achieved bandwidth or TFLOP/s (whichever is the bottleneck)
and its fraction of the rate of a large copy or GEMM in the same run. Successive runs use the same tensors, so small
ones may be cached. `--compile` also times plain torch under torch.compile, for at most `--compile-seconds` in total. A
cell without a measurement has the reason. Errors other than running out of memory are printed to stderr and set exit
code 1.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.kernel_case import KernelCase, Results
from benchmarks.harness.kernel_cases import cases
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.kernel_set import OPS, KernelSet, Priority
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import BACKENDS, discover_backends, select_kernels, support_of
from megatron_moe.parallel.context import torch_dtype

PAUSE = 20_000_000
"""Duration of the pause in clock cycles, about 10 ms: longer than the host takes to launch seven runs of any case."""
LASTING = 3000.0
"""Milliseconds after which the power limit has reduced the clock of a GPU."""
SLOW = 20.0
"""Duration of a run in milliseconds above which only three runs are timed after the warm-up."""
COMPILED = "compiled"
NO_MEMORY, FAILED, NO_TIME = "out of memory", "failed", "no time"
"""Table cells for cases without a measured time."""
PROBLEMS = (RuntimeError, ValueError, TypeError, AssertionError)
"""Exceptions of backends and torch.compile for unsupported cases; the other cells are still measured."""


@dataclass(frozen=True)
class Ceilings:
    """Bandwidth and FLOP rates that this machine reaches."""

    gigabytes_per_ms: float
    teraflop_per_ms: float
    """Burst rate: a few GEMMs after an idle pause, below the power limit."""
    lasting_teraflop_per_ms: float
    """Sustained rate of GEMMs without pauses, once the GPU has reached its power limit."""


def main(argv: list[str]) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; --device cpu times the ops on the CPU.")
    device, dtype = torch.device(args.device), torch_dtype(args.dtype)
    automatic = {choice.op: choice.backend for choice in select_kernels(KernelConfig(), device, dtype).choices}
    ceilings = measure_ceilings(device, dtype)
    print(
        f"torch {torch.__version__}, {device_name(device)}, {vars(args)}; milliseconds, forward and backward; "
        f"a copy reaches {ceilings.gigabytes_per_ms:.3g} TB/s, a product {1e3 * ceilings.teraflop_per_ms:.4g} TFLOP/s, "
        f"and {1e3 * ceilings.lasting_teraflop_per_ms:.4g} when it is repeated without a pause\n"
    )
    backends = [
        reference.NAME,
        *([COMPILED] if args.compile else []),
        *(each.name for each in discover_backends(BACKENDS) if not each.missing()),
    ]
    print(f"| op | {' | '.join(backends)} | auto takes | achieved | of the ceiling |")
    print("|---" * (len(backends) + 4) + "|", flush=True)
    meter = Meter(device, dtype, args.compile_seconds if args.compile else 0.0)
    for case in cases(args, device, dtype):
        if args.ops and case.op not in args.ops:
            continue
        taken = automatic[case.op]
        times = meter.measure(case, taken)
        cells = [written(times.get(name, "")) for name in backends]
        print(f"| {case.name} | {' | '.join(cells)} | {taken} | {achieved(case, times[taken], ceilings)} |", flush=True)
    return int(meter.failed)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--ops", nargs="+", metavar="OP", choices=OPS, help="measure only the rows of these ops")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compile-seconds", type=float, default=80.0)
    for name, default in (
        ("tokens", 2048), ("seq", 256), ("hidden", 256), ("ffn", 256), ("experts", 8), ("topk", 2), ("vocab", 4096),
        ("heads", 8), ("groups", 4), ("head-dim", 32), ("weights", 5_000_000),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(argv)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    size, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 26, 1024)
    source = torch.rand(size // 4, device=device)
    target, square = torch.empty_like(source), torch.randn(side, side, device=device).to(dtype)
    copy = milliseconds(lambda: target.copy_(source), device)
    product = milliseconds(lambda: square @ square, device)
    lasting = lasting_milliseconds(lambda: square @ square, product, device) if device.type == "cuda" else product
    return Ceilings(2 * size / 1e9 / copy, *(2 * side**3 / 1e12 / each for each in (product, lasting)))


def written(cell: float | str) -> str:
    return cell if isinstance(cell, str) else f"{cell:.3f}"


def achieved(case: KernelCase, cell: float | str, ceilings: Ceilings) -> str:
    """Returns two cells, the rate and its fraction of the maximum, for memory traffic or operations, whichever takes
    longer at best."""
    if isinstance(cell, str):
        return " | "
    moving, computing = case.gigabytes / ceilings.gigabytes_per_ms, case.teraflop / ceilings.teraflop_per_ms
    rate = f"{1e3 * case.teraflop / cell:.0f} TFLOP/s" if computing > moving else f"{case.gigabytes / cell:.2f} TB/s"
    return f"{rate} | {max(moving, computing) / cell:.0%}"


class Meter:
    """Measures cases. An error affects only its own table cell."""

    def __init__(self, device: torch.device, dtype: torch.dtype, compile_seconds: float) -> None:
        self.device, self.dtype = device, dtype
        self.compiles, self.seconds_left = compile_seconds > 0, compile_seconds
        self.failed = False

    def measure(self, case: KernelCase, taken: str) -> dict[str, float | str]:
        """Milliseconds by backend, or the reason why a backend has none."""
        times = {
            name: self.cell(case, partial(case.run, kernels))
            for name, kernels in bundles(case, taken, self.device, self.dtype)
        }
        if self.compiles and case.compiled is not None:
            times[COMPILED] = self.compiled(case, case.compiled) if self.seconds_left > 0 else NO_TIME
        return times

    def compiled(self, case: KernelCase, source: str) -> float | str:
        """Time of the compiled torch code of one backend; empty if the backend does not support the case."""
        # torch.compile stops compiling a function after several recompilations, and it treats all cases as one function
        torch.compiler.reset()
        kernels = dict(bundles(case, source, self.device, self.dtype)).get(source)
        if kernels is None:
            return ""
        began = time.monotonic()
        cell = self.cell(case, torch.compile(partial(case.run, kernels), dynamic=False))
        self.seconds_left -= time.monotonic() - began
        return cell

    def cell(self, case: KernelCase, run: Callable[..., Results]) -> float | str:
        try:
            return milliseconds(both_ways(run, case.inputs), self.device)
        except torch.OutOfMemoryError:
            cell = NO_MEMORY
        except PROBLEMS:
            print(f"{case.name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            self.failed, cell = True, FAILED
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return cell


def bundles(case: KernelCase, taken: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, KernelSet]]:
    """Yields kernel sets: the reference, and the reference with the ops of this case from each backend that supports
    them."""
    yield reference.NAME, reference.bundle()
    for backend in discover_backends(BACKENDS):
        wanted = case.compiled is not None or backend.name == taken
        if wanted and support_of(case.op, backend, device, dtype).fit is not Priority.NO:
            requests = tuple((op, backend.name) for op in (case.op, *case.alongside) if op in backend.provides)
            yield (
                backend.name,
                select_kernels(KernelConfig(kernel_backend=reference.NAME, kernel_per_op=requests), device, dtype),
            )


def both_ways(run: Callable[..., Results], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """Wraps a function to run its forward and backward."""
    if not inputs:
        return run

    def results() -> tuple[Tensor, ...]:
        out = run(*inputs)
        assert out is not None
        return (out,) if isinstance(out, Tensor) else out

    grads = tuple(torch.randn_like(out) for out in results())

    def work() -> None:
        torch.autograd.grad(results(), inputs, grads)

    return work


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of seven runs after a warm-up. On a GPU all runs are queued after a pause and timed by
    events, which excludes launch overhead."""
    work()
    waiting = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    waiting()
    warmups, runs = (0, 3) if host_milliseconds(work, waiting) > SLOW else (1, 7)
    for _ in range(warmups):
        work()
    if device.type != "cuda":
        return median([host_milliseconds(work, waiting) for _ in range(runs)])
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    torch.cuda._sleep(PAUSE)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return median([before.elapsed_time(after) for before, after in pairwise(marks)])


def lasting_milliseconds(work: Callable[[], object], each: float, device: torch.device) -> float:
    """Time of one run at sustained load on a GPU: the last third of `LASTING` ms without pauses.

    `each`: time of a single run.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    runs = max(int(LASTING / 3 / each), 1)
    for third in range(3):
        if third == 2:
            marks[0].record()
        for _ in range(runs):
            work()
    marks[1].record()
    torch.cuda.synchronize(device)
    return marks[0].elapsed_time(marks[1]) / runs


def host_milliseconds(work: Callable[[], object], waiting: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    waiting()
    return 1e3 * (time.perf_counter() - began)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
