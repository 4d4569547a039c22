"""Times the token dispatchers alone over the GPUs of this host, and checks them against the all-to-all dispatcher.

    python benchmarks/harness/bench_dispatch.py [--gpus 2] [--programs 8 16 32 132] [--output-dir benchmarks]

Writes `<date>-<machine>-dispatch.md`: microseconds of dispatch, combine and their backwards (median of the slowest
rank), and GB/s on the wire of the pushes, counting each token once per remote rank. Tokens and routing are random;
every expert is equally likely.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from megatron_moe.config.parallel import ParallelConfig, ProcessInfo  # noqa: E402
from megatron_moe.config.precision import OperandFormat, low_precision_config  # noqa: E402
from megatron_moe.config.run import KernelConfig  # noqa: E402
from megatron_moe.config.transport import (  # noqa: E402
    ALLGATHER,
    COPIES,
    DEEPEP,
    DEEPEP_SMS,
    NCCL,
    SYMMETRIC,
    ExpertTransport,
    PushConfig,
)
from megatron_moe.kernels.registry import is_installed, select_kernels  # noqa: E402
from megatron_moe.moe.token_dispatcher.base import PLAIN_ROWS, ExpertComm, Routing, RowFormats  # noqa: E402
from megatron_moe.moe.token_dispatcher.flex import quantize_tokens  # noqa: E402
from megatron_moe.parallel.context import ParallelContext  # noqa: E402

WARMUP, REPEATS = 5, 20
BLOCKWISE = low_precision_config("blockwise")
FP8Rows = Literal["after", "before"] | None
SLEEP_CYCLES = 8_000_000
"""Delay of the GPU before timed work, in clock cycles: about 4 ms."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes that determine the token exchange of an MoE layer."""

    name: str
    num_experts: int
    topk: int
    num_tokens: int = 8192
    hidden_size: int = 2048


SHAPES = (LayerShape("E128 K8", 128, 8), LayerShape("E64 K6", 64, 6))
PARTS = ("dispatch", "combine", "combine backward", "dispatch backward")


def random_routing(shape: LayerShape, rank: int, device: torch.device) -> Routing:
    """Selects distinct random experts for every token; all experts are equally likely."""
    draw = torch.Generator(device).manual_seed(rank)
    ids_TK = torch.rand(shape.num_tokens, shape.num_experts, device=device, generator=draw).topk(shape.topk).indices
    probs_TK = torch.rand(shape.num_tokens, shape.topk, device=device, generator=draw)
    counts_E = torch.bincount(ids_TK.flatten(), minlength=shape.num_experts)
    return Routing(num_experts=shape.num_experts, ids_TK=ids_TK, probs_TK=probs_TK.requires_grad_(), counts_E=counts_E)


def remote_copies(shape: LayerShape, routing: Routing, num_ranks: int, rank: int) -> int:
    """Number of (token, remote rank) pairs such that the rank holds an expert of this rank's token."""
    assert routing.ids_TK is not None
    visited_TP = torch.zeros(shape.num_tokens, num_ranks, dtype=torch.bool, device=routing.ids_TK.device)
    visited_TP.scatter_(1, routing.ids_TK // (shape.num_experts // num_ranks), True)
    visited_TP[:, rank] = False
    return int(visited_TP.sum())


@dataclass(frozen=True)
class Timed:
    """Median microseconds of each part of the exchange, and the tensors to compare between dispatchers."""

    microseconds: dict[str, float]
    tensors: dict[str, Tensor]


def start_together(ctx: ParallelContext) -> None:
    """Delays all GPUs while the host queues work, so that launch overhead is not timed, and synchronises them on the
    device, where the ranks leave an all-reduce within microseconds of each other."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    dist.all_reduce(torch.zeros(1, device=ctx.device))


def run_dispatcher(
    kind: ExpertTransport, shape: LayerShape, ctx: ParallelContext, num_sms: int | None = None, fp8: FP8Rows = None
) -> Timed:
    """Times one dispatcher, with the experts replaced by a multiplication by the probability. `fp8`: whether the rows
    of dispatch and of combine's backward are quantised before or after they are sent."""
    kernels = select_kernels(KernelConfig(), ctx.device, torch.bfloat16, BLOCKWISE)
    options = None if kind is COPIES else PushConfig(num_sms=num_sms)
    comm = ExpertComm(ctx, kernels, kind, shape.num_experts, row_capacity_factor=1.25, options=options)
    assert fp8 != "before" or kind.sends_fp8, f"{kind.name} sends no FP8"
    formats = RowFormats(tokens=BLOCKWISE.inputs, grads=BLOCKWISE.grads) if fp8 == "before" else PLAIN_ROWS
    dispatcher = comm.new_dispatcher(formats)

    def quantize(rows_RH: Tensor) -> None:
        if fp8 == "after":
            kernels.quantize_rows(rows_RH, BLOCKWISE.inputs, rowwise=True, columnwise=False)

    routing = random_routing(shape, ctx.rank, ctx.device)
    draw = torch.Generator(ctx.device).manual_seed(100 + ctx.rank)
    size = (shape.num_tokens, shape.hidden_size)
    tokens_TH = torch.randn(size, device=ctx.device, generator=draw).bfloat16().requires_grad_()
    grad_TH = torch.randn(size, device=ctx.device, generator=draw).bfloat16()
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    tensors: dict[str, Tensor] = {}
    for repeat in range(WARMUP + REPEATS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
        assert routing.probs_TK is not None
        tokens_TH.grad = routing.probs_TK.grad = None
        start_together(ctx)
        marks[0].record()
        rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens_TH, routing))
        quantize(rows.data.detach())
        marks[1].record()
        leaf_RH = rows.data.detach().requires_grad_()
        probs_R = rows.probs_R.detach().requires_grad_()
        weighed = replace(rows, data=(leaf_RH * probs_R[:, None].bfloat16()))
        start_together(ctx)
        marks[2].record()
        out_TH = dispatcher.finish_combine(dispatcher.start_combine(weighed, handle))
        marks[3].record()
        start_together(ctx)
        marks[4].record()
        (rows_grad_RH,) = torch.autograd.grad(out_TH, weighed.data, grad_TH, retain_graph=True)
        quantize(rows_grad_RH)
        marks[5].record()
        rows_grad, probs_grad = torch.autograd.grad(weighed.data, (leaf_RH, probs_R), rows_grad_RH)
        start_together(ctx)
        marks[6].record()
        torch.autograd.backward((rows.data, rows.probs_R), (rows_grad, probs_grad))
        marks[7].record()
        torch.cuda.synchronize()
        if repeat >= WARMUP:
            for part, start in zip(PARTS, (0, 2, 4, 6), strict=True):
                times[part].append(1000 * marks[start].elapsed_time(marks[start + 1]))
        tensors = {"out": out_TH.detach(), "tokens": tokens_TH.grad, "probabilities": routing.probs_TK.grad}  # type: ignore[dict-item]
    return Timed({part: statistics.median(values) for part, values in times.items()}, tensors)


def median_time(ctx: ParallelContext, exchange: Callable[[], Any], release: Callable[[Any], None]) -> float:
    """Median microseconds of `exchange`, which all ranks start together. `release` receives its result (not timed)."""
    times = []
    for repeat in range(WARMUP + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_together(ctx)
        start.record()
        work = exchange()
        end.record()
        release(work)
        torch.cuda.synchronize()
        if repeat >= WARMUP:
            times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def push_alone(shape: LayerShape, ctx: ParallelContext, num_sms: int | None, fmt: OperandFormat | None = None) -> float:
    """Median microseconds of the kernel that pushes tokens, including the wait for all ranks. `fmt`: FP8 format of the
    tokens, which are quantised beforehand (not timed)."""
    kernels = select_kernels(KernelConfig(), ctx.device, torch.bfloat16, BLOCKWISE)
    options = PushConfig(num_sms=num_sms)
    comm = ExpertComm(ctx, kernels, SYMMETRIC, shape.num_experts, row_capacity_factor=1.25, options=options)
    dispatcher = comm.new_dispatcher(RowFormats(tokens=fmt))
    routing = random_routing(shape, ctx.rank, ctx.device)
    tokens_TH = torch.randn(shape.num_tokens, shape.hidden_size, device=ctx.device).bfloat16()
    with torch.no_grad():
        pending = dispatcher.start_dispatch(tokens_TH, routing)
        dispatcher.finish_dispatch(pending)
    channel = comm.transport._channel("tokens", False, tokens_TH, pending.exchange, fmt)
    sent = quantize_tokens(kernels, tokens_TH, fmt)

    def push() -> None:
        kernels.push_tokens(sent, pending.exchange.transport_state, None, channel)
        kernels.wait_for_peers(channel)

    return median_time(ctx, push, lambda _: kernels.acknowledge(channel))


def copies_alone(shape: LayerShape, ctx: ParallelContext) -> float:
    """Median microseconds in which copy engines send the tokens, including the wait for all ranks."""
    kernels = select_kernels(KernelConfig(), ctx.device, torch.bfloat16, BLOCKWISE)
    transport = ExpertComm(ctx, kernels, COPIES, shape.num_experts, row_capacity_factor=1.25).transport
    exchange = transport.new_exchange(random_routing(shape, ctx.rank, ctx.device))
    tokens_TH = torch.randn(shape.num_tokens, shape.hidden_size, device=ctx.device).bfloat16()

    def copy() -> Any:
        work = transport.start_send_tokens(tokens_TH, exchange, None, None)
        transport.receive_tokens(work)
        return work

    return median_time(ctx, copy, transport.release)


def slowest(value: float, ctx: ParallelContext) -> float:
    """Maximum of `value` over all ranks."""
    tensor = torch.tensor([value], device=ctx.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def measure(ctx: ParallelContext, programs: list[int], write: Callable[[str], None]) -> None:
    """Writes one table per shape."""
    for shape in SHAPES:
        routing = random_routing(shape, ctx.rank, ctx.device)
        size = remote_copies(shape, routing, ctx.group("ep").size, ctx.rank) * shape.hidden_size * 2
        write(f"\n{shape.name}, {shape.num_tokens} tokens of {shape.hidden_size}, {size / 1e6:.1f} MB per rank\n")
        for num_sms in programs:
            for fmt, sent in ((None, size), (BLOCKWISE.inputs, size * 33 / 64)):
                us = slowest(push_alone(shape, ctx, num_sms, fmt), ctx)
                what = "FP8 push" if fmt else "push"
                write(f"{what} of {num_sms} programs: {us:.0f} us, {sent / us / 1e3:.0f} GB/s on the wire")
        us = slowest(copies_alone(shape, ctx), ctx)
        copied = (ctx.group("ep").size - 1) * shape.num_tokens * shape.hidden_size * 2
        rates = f"{size / us / 1e3:.0f} GB/s of needed tokens, {copied / us / 1e3:.0f} GB/s on the wire"
        write(f"copy engines: {us:.0f} us, {rates}")
        write(f"\n| dispatcher | {' | '.join(PARTS)} | all, us | largest relative error |\n|---|{'---|' * 6}")
        expected = run_dispatcher(NCCL, shape, ctx)
        cases: list[tuple[str, ExpertTransport, int | None, FP8Rows]] = [("all-to-all (NCCL)", NCCL, None, None)]
        cases.append(("all-gather (NCCL)", ALLGATHER, None, None))
        cases += [(f"symmetric, {n} programs", SYMMETRIC, n, None) for n in programs]
        cases.append(("symmetric", SYMMETRIC, None, None))
        cases.append(("symmetric, rows quantised to FP8 after", SYMMETRIC, None, "after"))
        cases.append(("symmetric, sent in FP8", SYMMETRIC, None, "before"))
        cases.append(("copy engines", COPIES, None, None))
        cases.append(("copy engines, sent in FP8", COPIES, None, "before"))
        if is_installed("deep_ep"):
            cases += [(f"DeepEP, {n} SMs", DEEPEP, n, None) for n in (DEEPEP_SMS, 32)]
            cases.append(("DeepEP, sent in FP8", DEEPEP, DEEPEP_SMS, "before"))
        for name, kind, sms, fp8 in cases:
            timed = expected if kind is NCCL else run_dispatcher(kind, shape, ctx, sms, fp8)
            error = max(
                float((timed.tensors[key] - value).abs().max() / value.abs().max())
                for key, value in expected.tensors.items()
            )
            parts = [slowest(timed.microseconds[part], ctx) for part in PARTS]
            figures = " | ".join(f"{part:.0f}" for part in parts)
            write(f"| {name} | {figures} | {sum(parts):.0f} | {slowest(error, ctx):.1e} |")


def rank_main(rank: int, num_gpus: int, port: int, programs: list[int], path: str) -> None:
    launch = ProcessInfo(rank=rank, world_size=num_gpus, local_rank=rank, local_world_size=num_gpus, master_port=port)
    config = ParallelConfig(world_size=num_gpus, ep=num_gpus)
    ctx = ParallelContext.start(config, launch, device="cuda", dtype="bf16")
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        if ctx.is_first:
            print(line, flush=True)
            Path(path).write_text("\n".join(lines) + "\n")

    write(f"# Token dispatchers on {num_gpus} x {torch.cuda.get_device_name()}, {date.today()}")
    write(f"\n`python benchmarks/harness/bench_dispatch.py --gpus {num_gpus}`, torch {torch.__version__}")
    measure(ctx, programs, write)
    ctx.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--programs", type=int, nargs="+", default=[8, 16, 32, 132])
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    parser.add_argument("--port", type=int, default=29555)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; this tool times exchanges between GPUs.")
    machine = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()
    path = arguments.output_dir / f"{date.today()}-{arguments.gpus}x{machine}-dispatch.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    mp.spawn(rank_main, args=(arguments.gpus, arguments.port, arguments.programs, str(path)), nprocs=arguments.gpus)


if __name__ == "__main__":
    main()
