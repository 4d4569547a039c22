"""What `tools/time_kernels.py` times: one case per kernel op that takes time, at the sizes of a command line."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels import autograd, reference
from megatron_moe.kernels.ops import Kernels
from megatron_moe.specs.attention import CoreAttentionSpec
from megatron_moe.specs.moe import ActivationSpec, RouterSpec


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    """Starts with the op whose backend is varied."""
    run: Callable[..., Tensor | None]
    """From a bundle and the inputs to the result."""
    inputs: tuple[Tensor, ...] = ()
    """Those that want gradients; none: there is no backward."""
    gigabytes: float = 0.0
    """That must move at least, forward and backward."""
    teraflop: float = 0.0
    """Of a product."""

    @property
    def op(self) -> str:
        return self.name.split()[0]


def cases(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(device, dtype)
    yield from norms_and_attention(args, draw)
    yield from elementwise(args, draw)
    yield from routing(args, draw)
    yield from products(args, draw)
    yield from optimizer(args, draw)


class Draw:
    """Random tensors that want gradients."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype, requires_grad=True)

    def moved(self, numel: int) -> float:
        """Gigabytes of so many elements."""
        return numel * self.dtype.itemsize / 1e9


def norms_and_attention(args: argparse.Namespace, draw: Draw) -> Iterator[Case]:
    x, weight, bias = draw(args.tokens, args.hidden), draw(args.hidden), draw(args.hidden)
    # forward reads x and writes the result; backward reads the gradient and x, and writes the gradient of x
    norm = draw.moved(5 * x.numel())
    yield Case("rms_norm", lambda k, x, w: k.rms_norm(x, w, 1e-5, False), (x, weight), norm)
    yield Case("layer_norm", lambda k, x, w, b: k.layer_norm(x, w, b, 1e-5, False), (x, weight, bias), norm)
    batch = args.tokens // args.seq
    q, kv = (draw(args.seq, batch, heads, args.head_dim) for heads in (args.heads, args.groups))
    core = CoreAttentionSpec(softmax_scale=args.head_dim**-0.5)
    # two products forward and five backward, over half of all pairs
    flop = 7 * batch * args.heads * args.seq**2 * args.head_dim
    yield Case(
        "attention (causal)",
        lambda k, q, kv: k.attention(q, kv, kv, core, None, None, None),
        (q, kv),
        teraflop=flop / 1e12,
    )
    angles = draw(args.seq, 1, args.head_dim, dtype=torch.float32).detach()
    yield Case("rope", lambda k, q: k.rope(q, angles, angles, False), (q,), draw.moved(4 * q.numel()))


def elementwise(args: argparse.Namespace, draw: Draw) -> Iterator[Case]:
    rows = args.tokens * args.topk
    wide, probs = draw(rows, 2 * args.ffn), torch.rand(rows, device=draw.device).to(draw.dtype).requires_grad_()
    swiglu = ActivationSpec(kind="silu", gated=True)
    yield Case(
        "activation (SwiGLU * prob)",
        lambda k, x, p: k.activation(x, p, swiglu),
        (wide, probs),
        draw.moved(8 * rows * args.ffn),
    )
    logits_TV, labels_T = draw(args.tokens, args.vocab), torch.randint(args.vocab, (args.tokens,), device=draw.device)
    size = draw.moved(3 * logits_TV.numel())
    yield Case("cross_entropy", lambda k, logits: k.cross_entropy(logits, labels_T), (logits_TV,), size)


def routing(args: argparse.Namespace, draw: Draw) -> Iterator[Case]:
    tokens, hidden, experts, rows = args.tokens, args.hidden, args.experts, args.tokens * args.topk
    x, gate, logits_TE = draw(tokens, hidden), draw(experts, hidden), draw(tokens, experts, dtype=torch.float32)
    yield Case(
        "gate_product",
        lambda k, x, w: k.gate_product(x, w, torch.float32),
        (x, gate),
        teraflop=6 * tokens * experts * hidden / 1e12,
    )
    router = RouterSpec(hidden_size=hidden, num_experts=experts, topk=args.topk)
    yield Case(
        "select_experts",
        lambda k, logits: k.select_experts(logits, None, router, None)[1],
        (logits_TE,),
        12 * tokens * experts / 1e9,
    )
    ids_TK, _ = reference.select_experts(logits_TE, None, router, None)
    yield Case("sort_rows", lambda k: k.sort_rows(ids_TK, experts, None).token_R, (), 32 * rows / 1e9)
    index = reference.sort_rows(ids_TK, experts, None)
    size = draw.moved(2 * (tokens + rows) * hidden)
    yield Case("permute", lambda k, x: k.permute(x, index), (x,), size)
    yield Case("unpermute", lambda k, r: k.unpermute(r, index, tokens), (draw(rows, hidden),), size)


def products(args: argparse.Namespace, draw: Draw) -> Iterator[Case]:
    """With weight gradients added to an fp32 buffer."""
    tokens, hidden, rows, wide = args.tokens, args.hidden, args.tokens * args.topk, 2 * args.ffn
    stack, square = draw(args.experts, wide, hidden), draw(hidden, hidden)
    for weight in (stack, square):
        weight.sink = Sink(torch.zeros_like(weight, dtype=torch.float32))  # type: ignore[attr-defined]
    ends_E = torch.arange(1, args.experts + 1, device=draw.device, dtype=torch.int32) * (rows // args.experts)
    yield Case(
        "grouped_forward and gradients",
        lambda k, r: autograd.grouped_linear(k, r, stack, ends_E),
        (draw(rows, hidden),),
        teraflop=6 * rows * hidden * wide / 1e12,
    )
    yield Case(
        "linear_weight_grad and the other products",
        lambda k, x: autograd.linear(k, x, square),
        (draw(tokens, hidden),),
        teraflop=6 * tokens * hidden**2 / 1e12,
    )


def optimizer(args: argparse.Namespace, draw: Draw) -> Iterator[Case]:
    flat = [torch.rand(args.weights, device=draw.device) for _ in range(4)]
    one, proceed = torch.ones((), device=draw.device), torch.ones((), dtype=torch.bool, device=draw.device)
    settings: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    yield Case("sum_of_squares", lambda k: k.sum_of_squares(flat[0]), (), 4 * args.weights / 1e9)

    def adamw(k: Kernels) -> None:
        k.adamw_(*flat, **settings, step=one.long(), grad_scale=one, proceed=proceed)

    yield Case("adamw_", adamw, (), 28 * args.weights / 1e9)


class Sink:
    """Adds every weight gradient to one buffer."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        compute(self.buffer, True)
