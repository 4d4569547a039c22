"""Cases of `benchmarks/harness/time_kernels.py` for routing, rows and experts, with random routing."""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.kernel_case import Draw, KernelCase
from megatron_moe.config.memory import PagedStashConfig
from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels.ops import GroupedPart, Kernels
from megatron_moe.kernels.pages import Pages, make_pages
from megatron_moe.kernels.reference import backend as reference

FP32, INT32, INT64 = 4, 4, 8
"""Bytes per element of logits, scores and probabilities (fp32), of page indices (int32), and of ids and row indices
(int64)."""


def moe_cases(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    yield from routing(args, draw)
    yield from rows_of_experts(args, draw)
    yield from pages(args, draw)
    yield from grouped_gemms(args, draw)


def routing(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    tokens, hidden, experts, choices = args.tokens, args.hidden, args.experts, args.tokens * args.topk
    x, gate, logits_TE = draw(tokens, hidden), draw(experts, hidden), draw(tokens, experts, dtype=torch.float32)
    scores = tokens * experts
    yield KernelCase(
        "router_logits",
        lambda k, x, w: k.router_logits(x, w, torch.float32),
        (x, gate),
        # reads both inputs in forward and backward, writes their gradients and the logits, and reads the gradient of
        # the logits
        draw.moved(3 * (tokens + experts) * hidden) + 2 * FP32 * scores / 1e9,
        6 * tokens * experts * hidden / 1e12,
    )
    router = RouterConfig(hidden_size=hidden, num_experts=experts, topk=args.topk)
    # reads the logits twice and writes their gradient; writes ids and probabilities, and reads ids and the gradients of
    # probabilities
    size = (3 * FP32 * scores + 2 * (INT64 + FP32) * choices) / 1e9
    yield KernelCase("route", lambda k, logits: k.route(logits, None, router).probs_TK, (logits_TE,), size)
    yield KernelCase("route with losses", partial(with_losses, router), (logits_TE,), size)
    ids_TK = reference.route(logits_TE, None, router).ids_TK
    yield KernelCase("count_tokens", lambda k: k.count_tokens(ids_TK, experts), (), INT64 * (choices + experts) / 1e9)
    # reads ids; writes tokens, choices, rows and offsets
    size = (4 * INT64 * choices + INT32 * experts) / 1e9
    yield KernelCase("sort_rows", lambda k: k.sort_rows(ids_TK, experts, None).token_R, (), size)


def with_losses(router: RouterConfig, kernels: Kernels, logits_TE: Tensor) -> tuple[Tensor, ...]:
    """Routes and returns the probabilities, and the sums from which a balancing loss and a z loss are computed."""
    routed = kernels.route(logits_TE, None, router, balance_sets=1, z=True)
    assert routed.balance is not None and routed.z_sum is not None
    return routed.probs_TK, routed.balance.scores_GE, routed.z_sum


def rows_of_experts(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    tokens, hidden, rows = args.tokens, args.hidden, args.tokens * args.topk
    index = reference.sort_rows(choices_of(args, draw), args.experts, None)
    size = draw.moved(2 * (tokens + rows) * hidden) + 2 * INT64 * rows / 1e9  # each copy also reads the destination
    yield KernelCase("permute", lambda k, x: k.permute(x, index), (draw(tokens, hidden),), size)
    yield KernelCase("unpermute", lambda k, r: k.unpermute(r, index, tokens), (draw(rows, hidden),), size)
    probs_TK = draw(tokens, args.topk, dtype=torch.float32)
    size = 2 * (2 * FP32 + INT64) * rows / 1e9
    yield KernelCase("gather_probs", lambda k, p: k.gather_probs(p, index), (probs_TK,), size)


def pages(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    """Page operations on a stash that the rows fill completely."""
    rows_RW = draw.fixed(args.tokens * args.topk, args.hidden)
    valid = torch.tensor(len(rows_RW), dtype=torch.int32, device=draw.device)
    kept, taken = stash(rows_RW, draw), stash(rows_RW, draw)
    table = reference.pack_rows(rows_RW, valid, kept)
    reference.pack_rows(rows_RW, valid, taken)
    size, of_table = draw.moved(2 * rows_RW.numel()), INT32 * len(table) / 1e9
    pages = stash(rows_RW, draw)
    yield KernelCase(
        "pack_rows and free_pages",
        lambda k: k.free_pages(k.pack_rows(rows_RW, valid, pages), pages),
        (),
        size + 4 * of_table,
        alongside=("free_pages",),
    )
    yield KernelCase("unpack_rows", lambda k: k.unpack_rows(table, len(rows_RW), kept), (), size + of_table)
    # the free list is a ring buffer, so freeing the same pages again costs the same
    yield KernelCase("free_pages", lambda k: k.free_pages(table, taken), (), 2 * of_table)


def stash(rows_RW: Tensor, draw: Draw) -> Pages:
    size = PagedStashConfig.moe_paged_stash_page_size
    return make_pages(-(-len(rows_RW) // size), size, rows_RW.shape[1], dtype=draw.dtype, device=draw.device)


def grouped_gemms(args: argparse.Namespace, draw: Draw) -> Iterator[KernelCase]:
    """Cases of the experts' fc1 GEMMs. Plain torch multiplies expert by expert. torch.compile compiles torch's grouped
    GEMM if that supports the dtype (bf16), because a loop over 128 experts would become 128 kernels."""
    source = "torch_native" if draw.dtype is torch.bfloat16 else reference.NAME
    rows, hidden, wide = args.tokens * args.topk, args.hidden, 2 * args.ffn
    stack = draw.fixed(args.experts, wide, hidden)
    parts = [grouped_part(args, draw) for _ in range(2)]
    teraflop = 2 * rows * hidden * wide / 1e12
    size = draw.moved(rows * (hidden + wide) + stack.data.numel())
    given, x, ends_E = parts[0]
    product = partial(KernelCase, gigabytes=size, teraflop=teraflop, compiled=source)
    yield product("grouped_forward", lambda k: k.grouped_forward(x, stack, ends_E))
    yield product("grouped_input_grad", lambda k: k.grouped_input_grad(given, stack, ends_E))
    out = torch.zeros(stack.data.shape, device=draw.device)
    for number in (1, 2):
        for accumulate in (False, True):

            def run(k: Kernels, number: int = number, accumulate: bool = accumulate) -> None:
                k.grouped_weight_grad(parts[:number], out, accumulate)

            yield KernelCase(
                f"grouped_weight_grad (parts: {number}, {'added to' if accumulate else 'stored in'} fp32)",
                run,
                (),
                draw.moved(number * rows * (hidden + wide)) + (2 if accumulate else 1) * FP32 * out.numel() / 1e9,
                number * teraflop,
                compiled=source,
            )


def grouped_part(args: argparse.Namespace, draw: Draw) -> GroupedPart:
    """Creates the operands of one microbatch: gradients, rows and offsets."""
    rows = args.tokens * args.topk
    counts_E = draw.ids(args.experts, rows).bincount(minlength=args.experts)  # multinomial distribution of the rows
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return GroupedPart(draw.fixed(rows, 2 * args.ffn), draw.fixed(rows, args.hidden), ends_E)


def choices_of(args: argparse.Namespace, draw: Draw) -> Tensor:
    """Creates ids_TK with distinct ids for each token."""
    return torch.rand(args.tokens, args.experts, device=draw.device).topk(args.topk).indices
