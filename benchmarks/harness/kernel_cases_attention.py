"""Cases of `benchmarks/harness/time_kernels.py` for attention, over whole sequences and between two parts of a
sequence."""

import argparse
from collections.abc import Iterator

import torch

from benchmarks.harness.kernel_case import Draw, KernelCase
from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.linear_attention import CHUNK
from megatron_moe.kernels.ops import AttentionBlock, AttentionInputs, AttentionResult, Kernels, PositionSpan

"""Arguments of an attention block after its tensors, without dropout."""


def attention_cases(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    yield from _whole(args, draw)
    yield from _chosen(args, draw)
    yield from _blocks(args, draw)
    yield from _linear(args, draw)


def _whole(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    batch, heads, width = args.tokens // args.seq, args.heads, args.head_dim
    q = draw(args.seq, batch, heads, width)
    key, value = (draw(args.seq, batch, args.groups, width) for _ in range(2))
    # forward reads three tensors and writes one; backward reads these four and a gradient, and writes three gradients
    gigabytes = draw.moved(6 * q.numel() + 6 * key.numel())
    window = max(args.seq // 32, 1)
    for name, config, seen, compiled in (
        ("attention (causal)", CoreAttentionConfig(softmax_scale=width**-0.5), args.seq, "reference"),
        (
            f"attention (window of {window})",
            CoreAttentionConfig(softmax_scale=width**-0.5, window=(window - 1, 0)),
            window,
            None,
        ),
        ("attention (sinks)", CoreAttentionConfig(softmax_scale=width**-0.5, sinks=True), args.seq, None),
    ):
        pairs = seen * args.seq - seen * (seen - 1) // 2
        flop = 7 * 2 * batch * heads * pairs * width  # two GEMMs in forward, five in backward
        sinks = (draw(heads),) if config.sinks else ()

        def run(k: Kernels, *inputs: torch.Tensor, config: CoreAttentionConfig = config) -> torch.Tensor:
            q, key, value, *sinks = inputs
            return k.attention(AttentionInputs(q, key, value, config, sinks[0] if sinks else None))

        yield KernelCase(name, run, (q, key, value, *sinks), gigabytes, flop / 1e12, compiled=compiled)


def _chosen(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    """Case of attention to half of a sequence's rows, which are 1.5 times as wide as a head."""
    batch, heads, value = args.tokens // args.seq, args.heads, args.head_dim
    width, num_chosen = value + value // 2, max(args.seq // 2, 1)
    q, rows = draw(args.seq, batch, heads, width), draw(args.seq, batch, width)
    ids = torch.rand(args.seq, batch, args.seq, device=draw.device).topk(num_chosen).indices.int()
    # The forward reads q and the rows and writes the output. The backward reads these three tensors and a gradient,
    # and writes two gradients.
    gigabytes = draw.moved(3 * q.numel() + 3 * rows.numel() + 3 * args.seq * batch * heads * value)
    flop = 2 * batch * heads * args.seq * num_chosen * (4 * width + 3 * value)

    def attend(k: Kernels, *inputs: torch.Tensor) -> torch.Tensor:
        q, rows = inputs
        return k.sparse_attention(q, rows, ids, None, value, width**-0.5)[0]

    yield KernelCase("sparse_attention", attend, (q, rows), gigabytes, flop / 1e12, compiled=None)


def _blocks(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    """Cases of a context-parallel ring step: a causal block, and a block in which every query attends to every key.
    Earlier results are read and written in fp32, and so are the gradients to which a block adds."""
    batch, heads, width, device = args.tokens // args.seq, args.heads, args.head_dim, draw.device
    q, grad, out = (draw.fixed(args.seq, batch, heads, width) for _ in range(3))
    key, value = (draw.fixed(args.seq, batch, args.groups, width) for _ in range(2))
    wide = torch.promote_types(torch.float32, draw.dtype)
    found = torch.zeros(args.seq, batch, heads, width, device=device, dtype=wide)
    lse = torch.zeros(batch, heads, args.seq, device=device, dtype=wide).permute(2, 0, 1)
    into = torch.zeros_like(q, dtype=wide), torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    own, earlier = PositionSpan(chunks=(range(args.seq, 2 * args.seq),)), PositionSpan(chunks=(range(args.seq),))
    config = CoreAttentionConfig(softmax_scale=width**-0.5)
    read = draw.moved(q.numel() + 2 * key.numel())
    for name, keys, pairs in (("causal", own, args.seq * (args.seq + 1) // 2), ("all", earlier, args.seq**2)):
        product = 2 * batch * heads * pairs * width / 1e12
        block = AttentionBlock(q, key, value, config, own, keys)

        def forward(k: Kernels, block: AttentionBlock = block) -> None:
            k.attention_block(block, found, lse)

        def backward(k: Kernels, block: AttentionBlock = block) -> None:
            k.attention_block_grad(block, AttentionResult(grad, out, lse), into)

        gigabytes = read + 2 * found.nbytes / 1e9
        yield KernelCase(f"attention_block ({name})", forward, (), gigabytes, 2 * product, compiled=None)
        maxima = torch.full((heads,), -torch.inf, device=device, dtype=wide)

        def largest(k: Kernels, block: AttentionBlock = block, maxima: torch.Tensor = maxima) -> None:
            k.max_logits_(block, lse, maxima.fill_(-torch.inf), -torch.inf)

        gigabytes_of_maxima = draw.moved(q.numel() + key.numel())
        yield KernelCase(f"max_logits_ ({name})", largest, (), gigabytes_of_maxima, product, compiled=None)
        gigabytes = read + draw.moved(2 * q.numel()) + 2 * sum(x.nbytes for x in into) / 1e9
        yield KernelCase(f"attention_block_grad ({name})", backward, (), gigabytes, 5 * product, compiled=None)


def _linear(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    """Cases of linear attention, and of the convolution and gated norm in linear-attention mixers."""
    batch, heads, width = args.tokens // args.seq, args.heads, args.head_dim
    q, key, value, gate = (draw(args.seq, batch, heads, width) for _ in range(4))
    decay, beta = (-draw(args.seq, batch, heads).detach().float().abs() for _ in range(2))
    # forward reads three tensors and writes one; backward reads these four and a gradient, and writes three gradients
    gigabytes = draw.moved(12 * q.numel())
    # matmuls within a chunk and with the state in forward, and twice as many in backward
    flop = 3 * 2 * 4 * args.tokens * heads * width * max(width, CHUNK)
    channels, strength = -draw(args.seq, batch, heads, width).detach().float().abs(), beta.neg().sigmoid()
    for name, rates, written in (
        ("decay", decay, None),
        ("delta rule", decay, strength),
        ("delta rule, decay per channel", channels, strength),
    ):

        def attend(
            k: Kernels, *x: torch.Tensor, rates: torch.Tensor = rates, written: torch.Tensor | None = written
        ) -> torch.Tensor:
            return k.linear_attention(x[0], x[1], x[2], rates, written, None, width**-0.5, 1e-6)

        # decays are read in forward and in backward
        moved = gigabytes + 2 * rates.nbytes / 1e9
        yield KernelCase(f"linear_attention ({name})", attend, (q, key, value), moved, flop / 1e12, compiled=None)
    x, filters = draw(args.seq, batch, heads * width), draw(heads * width, 4)
    gigabytes = draw.moved(5 * x.numel())
    inputs: tuple[torch.Tensor, ...] = (x, filters)
    yield KernelCase("short_conv", lambda k, *x: k.short_conv(*x, None, None), inputs, gigabytes, compiled=None)
    gigabytes = draw.moved(8 * q.numel())
    inputs = (value, gate, draw(width))
    yield KernelCase("gated_rms_norm", lambda k, *x: k.gated_rms_norm(*x, 1e-6, True), inputs, gigabytes, compiled=None)
