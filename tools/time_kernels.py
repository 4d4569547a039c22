"""Times every kernel op with every backend that can compute it, forward and backward, and prints a Markdown table.

python tools/time_kernels.py --device cpu --dtype fp32
python tools/time_kernels.py --device cuda --dtype bf16 --compile --tokens 8192 --seq 4096 --hidden 2048 --ffn 768
    --experts 128 --topk 8 --vocab 151936 --heads 32 --groups 4 --head-dim 128 --weights 500000000

Beside the milliseconds of each backend stands what the backend that `auto` takes achieves: bytes that must move, or
floating-point operations, over its time, and the share of what a large copy or matrix product reached in the same run.
`--compile` adds plain torch by torch.compile.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.kernels import reference
from megatron_moe.kernels.bundle import OPS, Bundle, Fit
from megatron_moe.kernels.choose import BACKENDS, choose, discover, judge
from megatron_moe.parallel.context import torch_dtype
from megatron_moe.specs.run import KernelSpec
from tools.kernel_cases import Case, cases

PAUSE = 20_000_000
"""Clock cycles, about 10 ms: longer than the host takes to launch seven runs of anything here."""


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches."""

    gigabytes_per_ms: float
    teraflop_per_ms: float


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    device, dtype = torch.device(args.device), torch_dtype(args.dtype)
    automatic = {choice.op: choice.backend for choice in choose(KernelSpec(), device, dtype).choices}
    ceilings = measure_ceilings(device, dtype)
    print(
        f"torch {torch.__version__}, {device_name(device)}, {vars(args)}; milliseconds, forward and backward; "
        f"a copy reaches {ceilings.gigabytes_per_ms:.3g} TB/s, a product {1e3 * ceilings.teraflop_per_ms:.4g} TFLOP/s\n"
    )
    backends = [
        "reference",
        *(["compiled"] if args.compile else []),
        *(each.name for each in discover(BACKENDS) if not each.missing()),
    ]
    print(f"| op | {' | '.join(backends)} | auto takes | achieved | of the ceiling |")
    print("|---" * (len(backends) + 4) + "|")
    for case in cases(args, device, dtype):
        times = measure(case, device, dtype, compiled=args.compile)
        cells = [f"{times[name]:.3f}" if name in times else "" for name in backends]
        taken = automatic[case.op]
        print(f"| {case.name} | {' | '.join(cells)} | {taken} | {achieved(case, times[taken], ceilings)} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--compile", action="store_true")
    for name, default in (
        ("tokens", 2048), ("seq", 256), ("hidden", 256), ("ffn", 256), ("experts", 8), ("topk", 2), ("vocab", 4096),
        ("heads", 8), ("groups", 4), ("head-dim", 32), ("weights", 5_000_000),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    size, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 26, 1024)
    source = torch.rand(size // 4, device=device)
    target, square = torch.empty_like(source), torch.randn(side, side, device=device).to(dtype)
    copy = milliseconds(lambda: target.copy_(source), device)
    product = milliseconds(lambda: square @ square, device)
    return Ceilings(2 * size / 1e9 / copy, 2 * side**3 / 1e12 / product)


def achieved(case: Case, ms: float, ceilings: Ceilings) -> str:
    """Two cells: the rate, and its share of the ceiling."""
    if case.teraflop:
        return f"{1e3 * case.teraflop / ms:.0f} TFLOP/s | {case.teraflop / ms / ceilings.teraflop_per_ms:.0%}"
    rate = case.gigabytes / ms
    return f"{rate:.2f} TB/s | {rate / ceilings.gigabytes_per_ms:.0%}"


def measure(case: Case, device: torch.device, dtype: torch.dtype, *, compiled: bool) -> dict[str, float]:
    """Milliseconds by backend."""
    times = {}
    for name, kernels in bundles(case.op, device, dtype):
        times[name] = milliseconds(both_ways(partial(case.run, kernels), case.inputs), device)
    if compiled:
        fused = torch.compile(partial(case.run, reference.bundle()), dynamic=False)
        times["compiled"] = milliseconds(both_ways(fused, case.inputs), device)
    return times


def bundles(op: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Bundle]]:
    """The reference, and each backend for this op alone where it can; products go with their gradients."""
    yield reference.NAME, reference.bundle()
    family = next((each for each in ("grouped_", "linear_") if op.startswith(each)), op)
    for backend in discover(BACKENDS):
        together = [name for name in OPS if name.startswith(family) and name in backend.provides]
        if op in together and judge(op, backend, device, dtype).fit is not Fit.NO:
            wishes = tuple((name, backend.name) for name in together)
            yield backend.name, choose(KernelSpec(per_op=wishes), device, dtype)


def both_ways(run: Callable[..., Tensor | None], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """The function and its backward."""
    if not inputs:
        return run

    out = run(*inputs)
    assert out is not None
    grad = torch.randn_like(out)

    def work() -> None:
        torch.autograd.grad(run(*inputs), inputs, grad)  # type: ignore[arg-type]

    return work


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of seven runs after three. On a GPU by its own clock, with all runs queued behind a pause: the time that
    the host takes to launch them does not count."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        return sorted(host_milliseconds(work) for _ in range(7))[3]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    torch.cuda._sleep(PAUSE)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return sorted(before.elapsed_time(after) for before, after in pairwise(marks))[3]


def host_milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
