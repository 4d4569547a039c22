"""Cases of `benchmarks/harness/time_kernels.py` for norms, RoPE, loss, embedding, linear layers and the optimizer.

Cases of attention are in `kernel_cases_attention.py`, those of routing, rows and experts in `kernel_cases_moe.py`.
Sizes come from the command line.
"""

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch

from benchmarks.harness.kernel_case import Draw, KernelCase
from benchmarks.harness.kernel_cases_attention import attention_cases
from benchmarks.harness.kernel_cases_moe import moe_cases
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.kernels.kernel_set import LOW_PRECISION_OPS
from megatron_moe.kernels.ops import AdamWState, AdamWStep, Kernels, QueryKeyTransform
from megatron_moe.kernels.update_ops import MatrixStep
from megatron_moe.precision.optimizer_state import Format, PackedState

EXCHANGE_OPS = ("mark_ranks", "push_tokens", "push_sums", "sum_partials", "wait_for_peers", "acknowledge")
"""Ops of the flex dispatcher, which exchange rows between ranks."""
NOT_TIMED: Mapping[str, str] = MappingProxyType(
    {
        "linear_forward": "included in the row of linear_weight_grad",
        "linear_input_grad": "included in the row of linear_weight_grad",
        "sort_rows_dense": "computed only by plain torch, for dense maps of tokens to experts",
        **dict.fromkeys(EXCHANGE_OPS, "timed over several GPUs by bench_dispatch.py"),
        **dict.fromkeys(LOW_PRECISION_OPS, "timed by bench_fp8.py"),
    }
)
"""Maps each op without a row to the reason. Of these, only ops of exchanges and of low precision have a kernel of this
project."""

EPS = 1e-5
FP32 = 4
"""Bytes of an element in fp32: angle, moment or gradient."""


def cases(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[KernelCase]:
    draw = Draw(device, dtype)
    yield from norms(args, draw)
    yield from streams(args, draw)
    yield from positions(args, draw)
    yield from attention_cases(args, draw)
    yield from elementwise(args, draw)
    yield from embedding(args, draw)
    yield linear(args, draw)
    yield from moe_cases(args, draw)
    yield from optimizer(args, draw)


def norms(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    """Cases of norms. The forward reads x and writes the result; the backward reads the gradient and x, and writes the
    gradient of x. Weights are read twice and their gradients written once."""
    x, residual = (draw(args.tokens, args.hidden) for _ in range(2))
    weight, bias = (draw(args.hidden) for _ in range(2))
    size, each = x.numel(), weight.numel()
    yield KernelCase(
        "rms_norm", lambda k, x, w: k.rms_norm(x, w, EPS, False), (x, weight), draw.moved(5 * size + 3 * each)
    )
    # The forward also reads the residual and writes the sum. The backward also reads the gradient of the sum; both
    # inputs have the same gradient, which is written once.
    yield KernelCase(
        "add_rms_norm",
        lambda k, r, x, w: k.add_rms_norm(r, x, w, EPS, False),
        (residual, x, weight),
        draw.moved(8 * size + 3 * each),
    )
    yield KernelCase(
        "layer_norm",
        lambda k, x, w, b: k.layer_norm(x, w, b, EPS, False),
        (x, weight, bias),
        draw.moved(5 * size + 5 * each),
    )


def streams(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    """Cases of hyper-connections with n = 4 residual streams. Reading moves the streams four times: forward reads them;
    backward reads them and the gradient of the streams after the connection, and writes their gradient. Writing moves
    them five times: forward reads and writes them; backward reads them and a gradient, and writes a gradient."""
    config = HyperConnectionsConfig(num_streams=4)
    n, num_weights = config.num_streams, config.num_weights
    stream, out = draw(args.tokens, 1, n * args.hidden), draw(args.tokens, 1, args.hidden)
    projection = draw(num_weights, n * args.hidden), draw(3), draw(num_weights)
    post, mix = (draw(args.tokens, *shape, dtype=torch.float32) for shape in ((n,), (n, n)))
    yield KernelCase(
        "hyper_connection_read",
        lambda k, *x: k.hyper_connection_read(*x, config),
        (stream, *projection),
        draw.moved(4 * stream.numel() + 2 * out.numel() + 3 * projection[0].numel()),
        compiled=None,
    )
    yield KernelCase(
        "hyper_connection_sum",
        lambda k: k.hyper_connection_sum(stream.detach(), post.detach()),
        (),
        draw.moved(stream.numel() + out.numel()),
        compiled=None,
    )
    yield KernelCase(
        "hyper_connection_write",
        lambda k, *x: k.hyper_connection_write(*x),
        (stream, out, post, mix),
        draw.moved(5 * stream.numel() + 3 * out.numel()),
        compiled=None,
    )


def positions(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    """Cases of RoPE and of splitting q, k and v. Values are views: forward does not copy them, and backward writes
    their gradients next to those of q and k."""
    batch, heads, groups, width = args.tokens // args.seq, args.heads, args.groups, args.head_dim
    cos, sin = (draw.fixed(args.seq, 1, width, dtype=torch.float32) for _ in range(2))
    angles = FP32 * 2 * cos.numel() / 1e9  # half of cos and of sin is read, in forward and backward
    q = draw(args.seq, batch, heads, width)
    yield KernelCase("rope", lambda k, q: k.rope(q, cos, sin, False), (q,), draw.moved(4 * q.numel()) + angles)

    per_group = heads // groups
    transform = QueryKeyTransform(EPS, False, cos, sin, False, per_group)
    qkv = draw(args.seq, batch, groups, (per_group + 2) * width)
    weights = draw(width), draw(width)
    rotated, values = args.tokens * (heads + groups) * width, args.tokens * groups * width
    size = 4 * rotated + 2 * values
    yield KernelCase(
        "query_key_value (with norms)",
        lambda k, x, q, key: k.query_key_value(x, q, key, transform),
        (qkv, *weights),
        draw.moved(size + rotated + 6 * width) + angles,  # the gradient of a norm reads its input again
    )
    yield KernelCase(
        "query_key_value (without norms)",
        lambda k, x: k.query_key_value(x, None, None, transform),
        (qkv,),
        draw.moved(size) + angles,
    )

    kv, shared = draw(args.seq, batch, heads, 2 * width), draw(args.seq, batch, width // 2)
    keys, own = args.tokens * heads * (width + width // 2), args.tokens * heads * width
    yield KernelCase(
        "latent_key_value",
        lambda k, kv, shared: k.latent_key_value(kv, shared, width),
        (kv, shared),
        # The forward copies the per-head parts and the shared part of the keys. The backward maps gradients of keys
        # and values to gradients of the per-head parts, the shared part and the values.
        draw.moved((own + shared.numel() + keys) + (keys + own) + (2 * own + shared.numel())),
    )


def elementwise(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    rows = args.tokens * args.topk
    wide, probs = draw(rows, 2 * args.ffn), torch.rand(rows, device=draw.device).to(draw.dtype).requires_grad_()
    swiglu = ActivationConfig(kind="silu", gated=True)
    yield KernelCase(
        "activation (SwiGLU * prob)",
        lambda k, x, p: k.activation(x, p, swiglu),
        (wide, probs),
        draw.moved(8 * rows * args.ffn + 3 * rows),
    )
    logits_TV, labels_T = draw(args.tokens, args.vocab), draw.ids(args.vocab, args.tokens)
    size = draw.moved(3 * logits_TV.numel())  # reads the logits in forward and backward, and writes their gradient
    yield KernelCase("cross_entropy", lambda k, logits: k.cross_entropy(logits, labels_T), (logits_TV,), size)


def embedding(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    """Case of the embedding gradient, which reads the gradients, and reads and writes the rows of used ids in fp32."""
    grad_TH = draw.fixed(args.tokens, args.hidden)
    table = torch.zeros(args.vocab, args.hidden, device=draw.device)
    frequencies = 1.0 / torch.arange(1, args.vocab + 1, device=draw.device)
    for name, ids_T in (
        ("ids as likely", draw.ids(args.vocab, args.tokens)),
        ("ids by Zipf's law", frequencies.multinomial(args.tokens, replacement=True)),
    ):
        rows = len(ids_T.unique())

        def run(k: Kernels, ids_T: torch.Tensor = ids_T) -> None:
            k.embedding_grad(grad_TH, ids_T, table, True)

        size = draw.moved(grad_TH.numel()) + (2 * FP32 * rows * args.hidden + ids_T.nbytes) / 1e9
        yield KernelCase(f"embedding_grad ({name})", run, (), size)


def linear(args: argparse.Namespace, draw: Draw) -> KernelCase:
    """Cases of linear layers, with the weight gradient added to an fp32 buffer."""
    tokens, hidden = args.tokens, args.hidden
    x, grad, weight = (draw.fixed(rows, hidden) for rows in (tokens, tokens, hidden))
    out = torch.zeros(hidden, hidden, device=draw.device)

    def run(k: Kernels) -> None:
        k.linear_forward(x, weight, None)
        k.linear_input_grad(grad, weight)
        k.linear_weight_grad(grad, x, out, True)

    return KernelCase(
        "linear_weight_grad and the other products",
        run,
        (),
        draw.moved(6 * tokens * hidden + 2 * hidden**2) + 2 * FP32 * hidden**2 / 1e9,
        6 * tokens * hidden**2 / 1e12,
        alongside=("linear_forward", "linear_input_grad"),
    )


def optimizer(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    size, device = args.weights, draw.device
    flat = [torch.rand(size, device=device) for _ in range(4)]
    move = AdamWStep(
        lr=1e-3,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=torch.ones((), dtype=torch.int64, device=device),
        grad_scale=torch.ones((), device=device),
        apply_update=torch.ones((), dtype=torch.bool, device=device),
        nonfinite=torch.zeros((), dtype=torch.bool, device=device),
    )
    yield KernelCase("sum_of_squares", lambda k: k.sum_of_squares(flat[0]), (), FP32 * size / 1e9)
    # reads master weights, gradient and moments; writes master weights and moments
    yield KernelCase("adamw_", lambda k: k.adamw_(*flat, move), (), 7 * FP32 * size / 1e9)

    def add_shares(k: Kernels) -> None:
        k.sum_contributions_(total, flat[0], received_PN, 1, accumulate=True)

    total, received_PN = torch.zeros(size, device=device), torch.randn(3, size, device=device)
    # reads the contributions of four ranks and the sum, which it also writes
    yield KernelCase("sum_contributions_ (4 ranks)", add_shares, (), 6 * FP32 * size / 1e9)
    grad = flat[0]
    weights = torch.randn(size, device=device).bfloat16()
    zeros = partial(PackedState.zeros, size, dtype=torch.float32, device=device)
    formats: tuple[Format, ...] = ("fp16", "fp8")
    for name in formats:
        states = [zeros("remainder", root=False), zeros(name, root=False), zeros(name, root=True)]

        def run(k: Kernels, states: list[PackedState] = states) -> None:
            k.adamw_packed_(AdamWState(*states), grad, move, weights)

        moved = grad.nbytes + 2 * (weights.nbytes + sum(state.num_bytes for state in states))
        yield KernelCase(f"adamw_packed_ (bf16 and remainders, {name} moments)", run, (), moved / 1e9)
    plain = MatrixStep(
        lr=1e-3, weight_decay=0.1, grad_scale=move.grad_scale, apply_update=move.apply_update, nonfinite=move.nonfinite
    )
    update = torch.zeros(size, device=device, dtype=draw.dtype)
    yield KernelCase(
        "momentum_",
        lambda k: k.momentum_(grad, flat[1], 0.95, plain, draw.dtype, nesterov=True),
        (),
        (3 * FP32 + update.itemsize) * size / 1e9,
    )
    master = PackedState("plain", flat[2])
    yield KernelCase(
        "apply_direction_",
        lambda k: k.apply_direction_(master, update, 0.2, plain, weights),
        (),
        (2 * FP32 + update.itemsize + weights.itemsize) * size / 1e9,
    )
    hidden, ffn = args.hidden, args.ffn
    x = draw.fixed(4, hidden, ffn).mT
    yield KernelCase("syrk", lambda k: k.syrk(x), (), draw.moved(4 * ffn * (hidden + ffn)), 8 * hidden * ffn**2 / 1e12)
