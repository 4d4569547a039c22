"""Times every kernel op with every backend that can compute it, forward and backward, and prints a Markdown table.

python tools/time_kernels.py --device cpu --dtype fp32
python tools/time_kernels.py --device cuda --dtype bf16 --tokens 16384 --seq 4096 --hidden 2048 --ffn 768 --experts 128
    --topk 8 --vocab 32768 --heads 32 --groups 4 --head-dim 128 --weights 500000000
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_moe.kernels import autograd, reference
from megatron_moe.kernels.bundle import OPS, Bundle, Fit
from megatron_moe.kernels.choose import BACKENDS, choose, discover, judge
from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel.context import torch_dtype
from megatron_moe.specs.attention import CoreAttentionSpec
from megatron_moe.specs.moe import ActivationSpec, RouterSpec
from megatron_moe.specs.run import KernelSpec

Case = tuple[str, Callable[[Kernels], object]]
"""What is timed, and the work. The name starts with the op whose backend is varied."""


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    device, dtype = torch.device(args.device), torch_dtype(args.dtype)
    automatic = {choice.op: choice.backend for choice in choose(KernelSpec(), device, dtype).choices}
    print(f"torch {torch.__version__}, {device_name(device)}, {vars(args)}; milliseconds, forward and backward\n")
    print("| op | reference | torch_native | auto takes |\n|---|---|---|---|")
    for name, work in cases(args, device, dtype):
        op = name.split()[0]
        times = [f"{milliseconds(work, bundle, device):.2f}" if bundle else "" for bundle in bundles(op, device, dtype)]
        print(f"| {name} | {' | '.join(times)} | {automatic[op]} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    for name, default in (
        ("tokens", 2048), ("seq", 256), ("hidden", 256), ("ffn", 256), ("experts", 8), ("topk", 2), ("vocab", 4096),
        ("heads", 8), ("groups", 4), ("head-dim", 32), ("weights", 5_000_000),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def bundles(op: str, device: torch.device, dtype: torch.dtype) -> Iterator[Bundle | None]:
    """The reference, and each backend for this op alone where it can; products go with their gradients."""
    yield reference.bundle()
    together = [name for name in OPS if op.startswith("grouped") and name.startswith("grouped")] or [op]
    for backend in discover(BACKENDS):
        able = judge(op, backend, device, dtype).fit is not Fit.NO
        wishes = tuple((name, backend.name) for name in together)
        yield choose(KernelSpec(backend="reference", per_op=wishes), device, dtype) if able else None


def milliseconds(work: Callable[[Kernels], object], kernels: Kernels, device: torch.device) -> float:
    """Median of seven runs after two."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(9):
        wait()
        start = time.perf_counter()
        work(kernels)
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[2:])[3]


def cases(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """One per op that takes time."""

    def draw(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device, dtype=of, requires_grad=True)

    def both_ways(call: Callable[..., Tensor], *inputs: Tensor) -> None:
        out = call(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    tokens, hidden, batch = args.tokens, args.hidden, args.tokens // args.seq
    rows, experts = tokens * args.topk, args.experts
    x, weight, bias = draw(tokens, hidden), draw(hidden), draw(hidden)
    yield "rms_norm", lambda k: both_ways(lambda x, w: k.rms_norm(x, w, 1e-5, False), x, weight)
    yield "layer_norm", lambda k: both_ways(lambda x, w, b: k.layer_norm(x, w, b, 1e-5, False), x, weight, bias)

    q = draw(args.seq, batch, args.heads, args.head_dim)
    kv = draw(args.seq, batch, args.groups, args.head_dim)
    core = CoreAttentionSpec(softmax_scale=args.head_dim**-0.5)
    yield "attention", lambda k: both_ways(lambda q, kv: k.attention(q, kv, kv, core, None, None, None), q, kv)
    angles = draw(args.seq, 1, args.head_dim, of=torch.float32).detach()
    yield "rope", lambda k: both_ways(lambda q: k.rope(q, angles, angles, False), q)

    wide, probs = draw(rows, 2 * args.ffn), torch.rand(rows, device=device).to(dtype).requires_grad_()
    swiglu = ActivationSpec(kind="silu", gated=True)
    yield "activation (SwiGLU * prob)", lambda k: both_ways(lambda x, p: k.activation(x, p, swiglu), wide, probs)
    logits_TV, labels = draw(tokens, args.vocab), torch.randint(args.vocab, (tokens,), device=device)
    yield "cross_entropy", lambda k: both_ways(lambda x: k.cross_entropy(x, labels), logits_TV)

    router = RouterSpec(hidden_size=hidden, num_experts=experts, topk=args.topk)
    logits_TE = draw(tokens, experts, of=torch.float32)
    ids, _ = reference.select_experts(logits_TE, None, router, None)
    index = reference.sort_rows(ids, experts, None)
    yield "select_experts", lambda k: both_ways(lambda x: k.select_experts(x, None, router, None)[1], logits_TE)
    yield "sort_rows", lambda k: k.sort_rows(ids, experts, None)
    yield "permute", lambda k: both_ways(lambda x: k.permute(x, index), x)
    rows_RH, stack = draw(rows, hidden), draw(experts, 2 * args.ffn, hidden)
    yield "unpermute", lambda k: both_ways(lambda r: k.unpermute(r, index, tokens), rows_RH)

    def grouped(k: Kernels) -> None:
        both_ways(lambda r, w: autograd.grouped_linear(k, r, w, index.offsets_E), rows_RH, stack)

    yield "grouped_forward and gradients", grouped
    buffer, square = torch.zeros(hidden, hidden, device=device), draw(hidden, hidden)
    square.sink = Sink(buffer)  # type: ignore[attr-defined]
    yield "linear_weight_grad (linear, fp32 buffer)", lambda k: autograd.linear(k, x, square).sum().backward()

    flat = [torch.rand(args.weights, device=device) for _ in range(4)]
    one, proceed = torch.ones((), device=device), torch.ones((), dtype=torch.bool, device=device)
    yield "sum_of_squares", lambda k: k.sum_of_squares(flat[0])

    def adamw(k: Kernels) -> None:
        k.adamw_(
            *flat, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
            step=one.long(), grad_scale=one, proceed=proceed,
        )  # fmt: skip

    yield "adamw_", adamw


class Sink:
    """Adds every weight gradient to one buffer."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        compute(self.buffer, True)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
