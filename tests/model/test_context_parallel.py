"""Core attention over a sequence split over ranks equals that of one rank, outputs and gradients."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.kernel_set import OPS, KernelSet
from megatron_moe.kernels.ops import AttentionBlock, AttentionInputs, PositionSpan
from megatron_moe.kernels.reference.attention_blocks import visible_between
from megatron_moe.model.core_attention import core_attention, visible_rows
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import SequencePart, Split, split_positions
from megatron_moe.parallel.rng import RNGKey
from tests.helpers.ranks import on_threads
from tests.helpers.split_attention import KERNELS, SEQ, Case, check_equal, split, whole
from tests.helpers.tiny_models import make_mb, randn
from tests.helpers.tolerances import EXACT, FP32_MODEL, FP64_LAYOUT, FP64_REF

EXCHANGES = ("p2p", "allgather", "a2a")
CASES = {
    "grouped queries": Case(),
    "latent, unequal widths": Case(groups=4, width=7, value_width=3),
    "one group": Case(groups=1),
    "window": Case(core=(("window", (4, 0)),)),
    "window of itself": Case(core=(("window", (0, 0)),)),
    "window on both sides": Case(core=(("window", (3, 2)), ("causal", False))),
    "open to the left": Case(core=(("window", (-1, 5)), ("causal", False))),
    "not causal": Case(core=(("causal", False),)),
    "sinks": Case(sinks=True),
    "off by one": Case(core=(("off_by_one", True),)),
    "documents": Case(segments=(0,) * 1 + (1,) * 9 + (2,) * 3 + (3,) * 11),
    "documents, window, sinks": Case(
        sinks=True, segments=(0,) * 10 + (1,) * 14, core=(("window", (5, 0)), ("softmax_scale", 0.7))
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("cp", [2, 4])
def test_split_sequences_equal_whole_sequences(cp: int, exchange: str, case: Case) -> None:
    check_equal(case, ParallelConfig(world_size=cp, cp=cp), exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_contiguous_split_equals_whole_sequences(exchange: str) -> None:
    check_equal(CASES["documents, window, sinks"], ParallelConfig(world_size=4, cp=4, cp_split="contiguous"), exchange)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("exchange", ["p2p", "allgather"])
@pytest.mark.parametrize(("cp", "cut"), [(2, "zigzag"), (4, "contiguous")])
def test_copies_from_peers_change_no_bit(cp: int, cut: Split, exchange: str, case: Case) -> None:
    """A reduce-scatter over four ranks sums gradients in another order than copies do."""
    parallel = ParallelConfig(world_size=cp, cp=cp, cp_split=cut)
    copied, sent = (split(case, parallel, exchange, by_copies=by_copies) for by_copies in (True, False))
    equal = sent if exchange == "p2p" or cp == 2 else {"out": sent["out"], "q": sent["q"]}
    EXACT.check_all({name: copied[name] for name in equal}, equal)
    FP64_LAYOUT.check_all(copied, whole(case))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_hierarchical_exchange_equals_whole_sequences(case: Case) -> None:
    check_equal(case, ParallelConfig(world_size=4, cp=4, cp_sub_axes=(2, 2)), "a2a+p2p")


@pytest.mark.parametrize("sub_axes", [(1, 4), (4, 1), (2, 4), (4, 2)])
def test_levels_of_different_size_equal_whole_sequences(sub_axes: tuple[int, int]) -> None:
    cp = sub_axes[0] * sub_axes[1]
    case = Case(sinks=True, segments=(0,) * 20 + (1,) * 12, seq=32)
    check_equal(case, ParallelConfig(world_size=cp, cp=cp, cp_sub_axes=sub_axes), "a2a+p2p")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_three_ranks_with_one_position_per_chunk(exchange: str) -> None:
    check_equal(Case(heads=3, groups=3, seq=6), ParallelConfig(world_size=3, cp=3), exchange)


def test_missing_sequence_part_raises() -> None:
    def on_rank(ctx: ParallelContext) -> None:
        from_nowhere: Any = make_mb(1, 4)
        x = randn(4, 1, 2, 3)
        core_attention(x, x, x, None, CoreAttentionConfig(softmax_scale=1.0), from_nowhere, "site", ctx, KERNELS)

    with pytest.raises(AssertionError, match="TokenMeta.part is not set"):
        on_threads(ParallelConfig(world_size=2, cp=2), on_rank)


def test_heads_that_do_not_divide_raise() -> None:
    with pytest.raises(AssertionError, match="3 heads cannot be divided equally among 2 ranks"):
        split(Case(heads=3, groups=1), ParallelConfig(world_size=2, cp=2), "a2a")


@pytest.mark.parametrize("window", [None, (0, 0), (3, 0), (2, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_visible_rows_are_the_smallest_ranges(causal: bool, window: tuple[int, int] | None) -> None:
    """The ranges contain every visible pair of a query and a key."""
    config = CoreAttentionConfig(softmax_scale=1.0, causal=causal, window=window)
    parts = split_positions("zigzag", SEQ, 3)
    for query in parts:
        for key in parts:
            visible = reference_mask(query, key, config).nonzero()
            if not len(visible):
                assert visible_rows(query, key, config) is None
                continue
            (first_q, first_k), (last_q, last_k) = visible.amin(dim=0).tolist(), visible.amax(dim=0).tolist()
            assert visible_rows(query, key, config) == (slice(first_q, last_q + 1), slice(first_k, last_k + 1))


def reference_mask(query: tuple[range, ...], key: tuple[range, ...], config: CoreAttentionConfig) -> torch.Tensor:
    return visible_between(PositionSpan(chunks=query), PositionSpan(chunks=key), config, torch.device("cpu"))


def test_zigzag_balances_the_work() -> None:
    """Number of query-key pairs per rank under a causal mask, over all steps of the ring."""
    config, cp, seq = CoreAttentionConfig(softmax_scale=1.0), 4, 64
    parts = split_positions("zigzag", seq, cp)
    work = []
    for query in parts:
        seen = [visible_rows(query, key, config) for key in parts]
        work.append(sum((q.stop - q.start) * (k.stop - k.start) for q, k in filter(None, seen)))
    assert len(set(work)) == 1 and work[0] < 0.7 * seq * seq / cp, work


def test_dropout_of_blocks_is_the_same_in_backward() -> None:
    """The gradient of ring attention with dropout equals finite differences, so forward and backward use the same
    mask."""
    config = CoreAttentionConfig(softmax_scale=0.5, dropout=0.5)

    def on_rank(ctx: ParallelContext) -> bool:
        part = SequencePart(split_positions("zigzag", 4, 1), 0)
        mb = make_mb(1, 4, part=part, rng=RNGKey(1, 2, 3))
        q, k, v = (randn(4, 1, 2, 3, seed=seed).requires_grad_() for seed in range(3))

        def attend(q, k, v):
            return core_attention(q, k, v, None, config, mb, "site", ctx, KERNELS)

        dropped = attend(q, k, v)
        kept = KERNELS.attention(AttentionInputs(q, k, v, config))
        assert not torch.equal(dropped, kept)
        return torch.autograd.gradcheck(attend, (q, k, v))

    assert on_threads(ParallelConfig(), on_rank) == [True]


def test_single_block_equals_attention() -> None:
    q, k, v = randn(5, 2, 4, 3, seed=1), randn(5, 2, 2, 3, seed=2), randn(5, 2, 2, 6, seed=3)
    config, everything = CoreAttentionConfig(softmax_scale=0.3), PositionSpan(chunks=(range(5),))
    out, lse = torch.zeros(5, 2, 4, 6).double(), torch.full((5, 2, 4), -torch.inf).double()
    KERNELS.attention_block(AttentionBlock(q, k, v, config, everything, everything), out, lse)
    FP64_REF.check(out, KERNELS.attention(AttentionInputs(q, k, v, config)))
    FP64_REF.check(lse[0], 0.3 * (q[0].unflatten(1, (2, 2)) * k[0][:, :, None]).sum(-1).flatten(1))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bf16_blocks_are_merged_in_fp32(exchange: str) -> None:
    """Two ranks in bf16 are as close to fp64 as one rank, and return bf16."""
    case = CASES["documents, window, sinks"]
    exact, one = whole(case), whole(case, torch.bfloat16)
    two = split(case, ParallelConfig(world_size=2, cp=2), exchange, torch.bfloat16)
    for name, value in two.items():
        assert value.dtype is torch.bfloat16, name
        errors = [float((x[name].double() - exact[name]).abs().max()) for x in (two, one)]
        assert errors[0] <= 2 * errors[1] + 1e-3, (name, errors)


TAKE_TURNS = threading.Lock()
"""Triton's interpreter runs one kernel at a time, and ranks are threads."""
FEW = {"heads": 2, "groups": 1}
ROUNDS = {
    "grouped queries, allgather": (Case(**FEW, width=16, value_width=16), 2, "contiguous", "allgather"),
    "latent, unequal widths, sinks": (Case(2, 2, width=24, value_width=16, sinks=True), 2, "zigzag", "p2p"),
    "window, contiguous": (Case(**FEW, core=(("window", (4, 0)),)), 2, "contiguous", "p2p"),
    "documents, window, sinks": (replace(CASES["documents, window, sinks"], **FEW), 2, "zigzag", "p2p"),
    "four ranks": (Case(**FEW, core=(("off_by_one", True),)), 4, "zigzag", "p2p"),
}
"""(Case, number of ranks, split of the sequence, exchange)."""


def in_turns(op: Callable[..., Any]) -> Callable[..., Any]:
    def alone(*inputs: Any) -> Any:
        with TAKE_TURNS:
            return op(*inputs)

    return alone


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # numpy, of the interpreter
@pytest.mark.parametrize("name", ROUNDS)
def test_triton_blocks_in_a_ring_equal_whole_sequences(name: str) -> None:
    """Blocks by Triton in fp32 against whole attention in fp64."""
    case, cp, cut, exchange = ROUNDS[name]
    ops = {op: getattr(KERNELS, op) for op in OPS}
    ops |= {op: in_turns(getattr(triton_kernels, op)) for op in ("attention_block", "attention_block_grad")}
    parallel = ParallelConfig(world_size=cp, cp=cp, cp_split=cut)
    FP32_MODEL.check_all(split(case, parallel, exchange, torch.float32, KernelSet.of(ops, ())), whole(case))
