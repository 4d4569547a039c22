"""Token dispatchers outside of a layer: combine inverts dispatch; row order, communication volume, host reads."""

import sys
import threading
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.config.moe import CapacityConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.config.transport import (
    ALLGATHER,
    COPIES,
    DEEPEP,
    HIERARCHICAL,
    HYBRIDEP,
    LOCAL,
    NCCL,
    SYMMETRIC,
    PushConfig,
)
from megatron_moe.kernels.kernel_set import OPS, KernelSet
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.moe.moe_layer import new_expert_comm
from megatron_moe.moe.token_dispatcher import symmetric
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens, ExpertComm, expert_of_each_row, index_rows
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.streams import Streams
from tests.helpers.ranks import on_threads
from tests.helpers.thinned import thinned
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.moe.parallel.folded import moe_config, name_of, parallel
from tests.moe.parallel.traffic import counted_traffic
from tests.moe.routings import dense, draw, sparse

EXPERTS, WIDTH = 8, 3
REFERENCE = reference.bundle()
NATIVE = select_kernels(KernelConfig(kernel_backend="torch_native"), torch.device("cpu"), torch.float32)
FLEX = (SYMMETRIC, COPIES, DEEPEP, HYBRIDEP, HIERARCHICAL)
KINDS = (ALLGATHER, NCCL, *FLEX)
FOLDS = (
    parallel(2, ep=2), parallel(2, etp=2), parallel(4, etp=2, ep=2), parallel(8, ep=4, etp=2, order="ep-tp-cp-dp-pp")
)  # fmt: skip
MORE_FOLDS = (parallel(4, ep=4), parallel(8, ep=4, etp=2), parallel(8, ep=8), parallel(8, ep=2, etp=4))
HOSTS = (
    parallel(2, ep=2, ranks_per_host=1),
    parallel(4, ep=4, ranks_per_host=2),
    parallel(4, ep=4, ranks_per_host=1),
    parallel(4, ep=4, ranks_per_host=3),  # hosts have different numbers of the group's ranks
    parallel(4, etp=2, ep=2, ranks_per_host=2),
    parallel(4, etp=2, ep=2, ranks_per_host=1),  # the shards of an expert are on different hosts
    parallel(8, ep=8, ranks_per_host=4),
    parallel(8, ep=4, etp=2, ranks_per_host=4),
    parallel(8, ep=4, ranks_per_host=6),  # the first group is on one host, the second on two
)
"""Layouts whose expert groups span several hosts."""
EVERY_DISPATCHER = pytest.mark.parametrize(
    ("kind", "fold"),
    [
        (LOCAL, parallel(1)),
        *product(KINDS, FOLDS),
        *thinned(list(product(KINDS, MORE_FOLDS)), 4),
        *((HIERARCHICAL, fold) for fold in HOSTS),
    ],
    ids=lambda value: name_of(value) if isinstance(value, ParallelConfig) else value.name,
)
BOTH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
CASES = {
    "spread": lambda rank: [[0, 3], [1, 7], [5, 2], [6, 4]],
    "ranks differ": lambda rank: [[(rank + t) % EXPERTS, (rank + 3 * t + 1) % EXPERTS] for t in range(4)],
    "all to one expert": lambda rank: [[5, -1]] * 4,
    "one rank sends, to one expert": lambda rank: [[6, -1] if rank == 0 else [-1, -1]] * 4,
    "nothing at all": lambda rank: [[-1, -1]] * 4,
    "some dropped": lambda rank: [[0, -1], [-1, -1], [-1, 7], [(rank + 2) % EXPERTS, (rank + 3) % EXPERTS]],
    "no tokens": lambda rank: [],
    "one token": lambda rank: [[rank % EXPERTS, 7 - rank % EXPERTS] if rank % 4 < 3 else [7, -1]],
}


def new(kind: Any, ctx: ParallelContext, num_experts: int = EXPERTS, kernels: Any = REFERENCE) -> Any:
    return ExpertComm(ctx, kernels, kind, num_experts).new_dispatcher()


def scaled(rows: DispatchedTokens, share: float) -> DispatchedTokens:
    """Replaces the experts: multiplies every row by its probability and by `share`, and sets unused rows to NaN.

    With expert tensor parallelism, each rank of an etp group computes a share of the output.
    """
    weighed = rows.data * rows.probs_R[:, None] * share
    held = torch.arange(len(weighed)) < rows.offsets_e[-1]
    garbage = torch.where(held[:, None], weighed, torch.nan)
    return replace(rows, data=garbage)


def there_and_back(dispatcher: Any, tokens: Tensor, routing: Any, share: float) -> tuple[DispatchedTokens, Tensor]:
    rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, routing))
    back = dispatcher.finish_combine(dispatcher.start_combine(scaled(rows, share), handle))
    return rows, back


def served(ids: list[list[int]]) -> Tensor:
    """Returns the fraction [T, 1] of each token's choices that are not dropped."""
    return torch.tensor([[sum(e >= 0 for e in row) / len(row)] for row in ids], dtype=torch.float64).view(-1, 1)


@EVERY_DISPATCHER
@pytest.mark.parametrize("make", [sparse, dense])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("capacity", [None, 4])
def test_combine_undoes_dispatch_forward_and_backward(fold, kind, make, case, capacity) -> None:
    if kind in FLEX and make is dense:
        return

    def rank(ctx: ParallelContext) -> None:
        ids = CASES[case](ctx.rank)
        tokens = draw(len(ids), WIDTH, seed=ctx.rank).requires_grad_()
        routing = make(ids, num_experts=EXPERTS, capacity=capacity)
        chosen = routing.ids_TK >= 0 if routing.map_TE is None else routing.map_TE
        routing.probs.requires_grad_()
        rows, back = there_and_back(new(kind, ctx), tokens, routing, 1 / fold.etp)
        assert len(rows.data) == len(rows.probs_R) == rows.bound >= rows.offsets_e[-1]
        FP64_REF.check(back, tokens.detach() * served(ids), "tokens")
        grad = draw(len(ids), WIDTH, seed=10 + ctx.rank)
        back.backward(grad)
        FP64_REF.check(tokens.grad, grad * served(ids), "gradient of tokens")
        expected = torch.where(chosen, (tokens.detach() * grad).sum(1, keepdim=True), 0)
        FP64_REF.check(routing.probs.grad, expected, "gradient of probabilities")

    on_threads(fold, rank)


@pytest.mark.parametrize(
    ("kind", "fold"),
    [
        *product((NCCL, HIERARCHICAL), (parallel(4, ep=4), parallel(4, etp=2, ep=2))),
        *((HIERARCHICAL, fold) for fold in HOSTS if fold.world_size == 4),
    ],
    ids=lambda value: name_of(value) if isinstance(value, ParallelConfig) else value.name,
)
@pytest.mark.parametrize("num_tokens", [[0, 3, 1, 5], [0, 0, 0, 2], [4, 0, 0, 0]], ids=str)
def test_dispatchers_that_read_sizes_accept_different_token_counts_per_rank(kind, fold, num_tokens) -> None:
    def rank(ctx: ParallelContext) -> None:
        ids = [[(t + ctx.rank) % EXPERTS, (3 * t + ctx.rank + 1) % EXPERTS] for t in range(num_tokens[ctx.rank])]
        ids = [row if row[0] != row[1] else [row[0], -1] for row in ids]
        tokens = draw(len(ids), WIDTH, seed=ctx.rank).requires_grad_()
        routing = sparse(ids, num_experts=EXPERTS)
        _, back = there_and_back(new(kind, ctx), tokens, routing, 1 / fold.etp)
        FP64_REF.check(back, tokens.detach() * served(ids), "tokens")
        back.backward(torch.ones_like(back))
        FP64_REF.check(tokens.grad, served(ids).expand(-1, WIDTH), "gradient of tokens")

    on_threads(fold, rank)


@EVERY_DISPATCHER
@pytest.mark.parametrize("capacity", [None, 4])
def test_each_expert_receives_its_tokens_of_all_ranks_once_and_in_order(fold, kind, capacity) -> None:
    """Each token contains its rank and position; rows from one source rank are in the order of positions."""

    def rank(ctx: ParallelContext) -> tuple[int, int, list[list[list[float]]]]:
        ids = CASES["ranks differ"](ctx.rank)
        tokens = torch.tensor([[float(ctx.rank), float(t), 1.0] for t in range(len(ids))], dtype=torch.float64)
        dispatcher = new(kind, ctx)
        routing = sparse(ids, num_experts=EXPERTS, capacity=capacity)
        rows, _ = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, routing))
        starts = [0, *rows.offsets_e.tolist()]
        groups = [rows.data[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]
        return ctx.group("ep").rank, ctx.group("edp").rank, groups

    results = on_threads(fold, rank)
    num_local = EXPERTS // fold.ep
    members = {place: [r for r, result in enumerate(results) if result[1] == place] for place in range(fold.edp)}
    for ep_rank, edp_rank, groups in results:
        for local, rows in enumerate(groups):
            expert = ep_rank * num_local + local
            held = [row for row in rows if row[2] == 1.0]
            expected = [
                [float(r), float(t), 1.0]
                for r in members[edp_rank]
                for t, row in enumerate(CASES["ranks differ"](r))
                if expert in row
            ]
            assert sorted(held) == sorted(expected), f"expert {expert}"
            for r in members[edp_rank]:
                places = [row[1] for row in held if row[0] == r]
                assert places == sorted(places), f"expert {expert}: order of rank {r}"
            if capacity is not None and kind is not HYBRIDEP:
                assert len(rows) == capacity * fold.ep * fold.etp


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(ALLGATHER, 1 + 6 * 2.0**-10), (NCCL, 1 + 6 * 2.0**-10), (SYMMETRIC, 1.0), (HIERARCHICAL, 1.0)],
    ids=lambda value: getattr(value, "name", None),
)
def test_bf16_rows_of_one_token_are_summed_in_fp32_across_ranks(kind, expected) -> None:
    """Partial sums are 1 + 3 * 2^-10 on one rank and 3 * 2^-10 on the other.

    Transports that send partial sums in bf16 round the first one to 1 before the last addition, so their total is 1.
    """
    values = torch.tensor([1.0, 3 * 2.0**-10, 3 * 2.0**-10, 0.0]).bfloat16()

    def rank(ctx: ParallelContext) -> Tensor:
        routing = sparse([[0, 1, 2, 3]], torch.ones(1, 4, dtype=torch.float64), num_experts=4)
        dispatcher = new(kind, ctx, 4)
        rows, handle = dispatcher.finish_dispatch(
            dispatcher.start_dispatch(torch.ones(1, 1, dtype=torch.bfloat16), routing)
        )
        mine = values[2 * ctx.group("ep").rank :][:2].repeat_interleave(rows.offsets_e[0])
        data = torch.zeros_like(rows.data)
        data[: len(mine), 0] = mine
        pending = dispatcher.start_combine(replace(rows, data=data), handle)
        return dispatcher.finish_combine(pending)

    for out in on_threads(parallel(2, ep=2), rank):
        EXACT.check(out, torch.tensor([[expected]]).bfloat16())


@pytest.mark.parametrize(
    ("ranks_per_host", "expected"),
    [(None, 1 + 3 * 2.0**-9), (1, 1 + 3 * 2.0**-9), (2, 1.0)],
    ids=["one host", "four hosts", "two hosts"],
)
def test_partial_sums_are_added_in_fp32_and_sent_in_bf16_once_per_host(ranks_per_host, expected) -> None:
    """The first rank adds 1 and each of three other ranks 2^-9, which a sum in bf16, one rank at a time, would lose.

    Two hosts of two ranks send bf16(1 + 2^-9) = 1 and 2^-8, whose sum also rounds to 1.
    """

    def rank(ctx: ParallelContext) -> Tensor:
        routing = sparse([[0, 1, 2, 3]], torch.ones(1, 4, dtype=torch.float64), num_experts=4)
        dispatcher = new(HIERARCHICAL, ctx, 4)
        tokens = torch.ones(1, 1, dtype=torch.bfloat16)
        rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, routing))
        value = 1.0 if ctx.rank == 0 else 2.0**-9
        pending = dispatcher.start_combine(replace(rows, data=torch.full_like(rows.data, value)), handle)
        return dispatcher.finish_combine(pending)

    for out in on_threads(parallel(4, ep=4, ranks_per_host=ranks_per_host), rank):
        EXACT.check(out, torch.tensor([[expected]]).bfloat16())


def test_local_combine_sums_bf16_rows_in_fp32() -> None:
    dispatcher = new(LOCAL, ParallelContext.single())
    routing = sparse([list(range(8))], torch.ones(1, 8, dtype=torch.float64), num_experts=8)
    tokens = torch.ones(1, 1, dtype=torch.bfloat16)
    rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, routing))
    data = torch.full((8, 1), 2.0**-9, dtype=torch.bfloat16)
    data[0] = 1.0
    out = dispatcher.finish_combine(dispatcher.start_combine(replace(rows, data=data), handle))
    EXACT.check(out, torch.tensor([[1 + 7 * 2.0**-9]]).bfloat16())


@pytest.mark.parametrize(
    ("kind", "fold"),
    [
        (LOCAL, parallel(1)),
        (ALLGATHER, parallel(4, ep=2, etp=2)),
        (NCCL, parallel(4, ep=2, etp=2)),
        (HIERARCHICAL, parallel(4, ep=4, ranks_per_host=2)),
    ],
    ids=lambda value: name_of(value) if isinstance(value, ParallelConfig) else value.name,
)
@pytest.mark.parametrize("case", CASES)
def test_torch_native_kernels_combine_to_the_dispatched_tokens(kind, fold, case) -> None:
    def rank(ctx: ParallelContext) -> None:
        ids = CASES[case](ctx.rank)
        tokens = draw(len(ids), WIDTH, seed=ctx.rank).requires_grad_()
        routing = sparse(ids, num_experts=EXPERTS)
        _, back = there_and_back(new(kind, ctx, kernels=NATIVE), tokens, routing, 1 / fold.etp)
        FP64_REF.check(back, tokens.detach() * served(ids), "tokens")

    on_threads(fold, rank)


IDS = [[2, 0], [2, -1], [-1, -1], [0, 2]]
PROBS = torch.tensor([[0.7, 0.3], [0.9, 9.0], [9.0, 9.0], [0.2, 0.8]], dtype=torch.float64)


@pytest.mark.parametrize("make", [sparse, dense])
@pytest.mark.parametrize(
    ("capacity", "tokens", "offsets"),
    [(None, [0, 3, 0, 1, 3], [2, 2, 5, 5]), (3, [0, 3, -1, -1, -1, -1, 0, 1, 3, -1, -1, -1], [3, 6, 9, 12])],
)
def test_rows_are_sorted_by_expert_with_their_probability(make, capacity, tokens, offsets) -> None:
    index, probs = index_rows(make(IDS, PROBS, num_experts=4, capacity=capacity), REFERENCE)
    EXACT.check(index.token_R[: len(tokens)], tokens, "tokens")
    EXACT.check(index.offsets_E, offsets, "offsets")
    used = index.token_R >= 0
    EXACT.check(probs[used], torch.tensor([0.3, 0.2, 0.7, 0.9, 0.8], dtype=torch.float64), "probabilities")
    assert not probs[~used].any() and not used[len(tokens) :].any()


@pytest.mark.parametrize(("capacity", "num_rows"), [(None, 8), (3, 12)])
@pytest.mark.parametrize("ids", [[[-1, -1]] * 4, [[0, 1]] * 4], ids=["all dropped", "none dropped"])
def test_number_of_rows_does_not_depend_on_the_routing(ids, capacity, num_rows) -> None:
    index, _ = index_rows(sparse(ids, num_experts=4, capacity=capacity), REFERENCE)
    assert len(index.token_R) == num_rows


def test_expert_of_rows_is_the_number_of_experts_after_the_last_offset() -> None:
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    EXACT.check(expert_of_each_row(offsets, 7), [1, 1, 3, 3, 3, 4, 4])
    EXACT.check(expert_of_each_row(offsets, 0), torch.zeros(0, dtype=torch.int64))


ELEMENTS = 4 * 2 * WIDTH
"""Number of elements that one rank dispatches: four tokens with two experts each, in rows of `WIDTH` elements."""


def traffic_of(fold: ParallelConfig, kind: Any, capacity: int | None) -> list[Counter]:
    """Counts the collectives of dispatch, combine and their backward by (op, group size, elements) on each rank."""

    def rank(ctx: ParallelContext) -> None:
        tokens = draw(4, WIDTH, seed=ctx.rank).requires_grad_()
        routing = sparse(CASES["spread"](0), num_experts=EXPERTS, capacity=capacity)
        routing.probs_TK.requires_grad_()
        _, back = there_and_back(new(kind, ctx), tokens, routing, 1.0)
        back.sum().backward()

    with counted_traffic() as traffic:
        on_threads(fold, rank)
    return traffic.of_ranks(fold.world_size)


def test_all_to_all_sends_every_row_once_each_way_and_gathers_counts() -> None:
    for sent in traffic_of(parallel(4, ep=4), NCCL, None):
        assert sent == Counter(
            {
                ("all_gather", 4, EXPERTS): 1,
                ("all_to_all", 4, ELEMENTS): 4,  # forward and backward of dispatch and combine
                ("all_to_all", 4, 8): 2,  # probabilities and their gradient
            }
        )


def test_hierarchical_exchange_sends_a_token_once_per_host_and_counts_once() -> None:
    """A rank sends 6 copies of its tokens to hosts: two of its four tokens have experts on one host, two on both.

    Each rank then forwards 8 copies within its host. The choices of a token are sent as int32 elements: 2 ids, and 2
    probabilities of 8 bytes each.
    """
    for sent in traffic_of(parallel(4, ep=4, ranks_per_host=2), HIERARCHICAL, None):
        assert sent == Counter(
            {
                ("all_gather", 4, 2 + 4 + 4): 1,  # numbers of tokens for each host and rank, and of rows for each rank
                ("all_to_all", 2, 6 * (2 + 2 * 2)): 1,
                ("all_to_all", 2, 8 * (2 + 2 * 2)): 1,
                ("all_to_all", 2, 6 * WIDTH): 4,  # forward and backward of dispatch and combine
                ("all_to_all", 2, 8 * WIDTH): 4,
                ("all_to_all", 2, 6 * 2): 1,  # gradients of probabilities
                ("all_to_all", 2, 8 * 2): 1,
            }
        )


def test_hierarchical_exchange_has_one_stage_on_one_host() -> None:
    """Each of the four tokens has experts on two ranks, so a rank sends 8 copies."""
    for sent in traffic_of(parallel(4, ep=4), HIERARCHICAL, None):
        assert sent == Counter(
            {
                ("all_gather", 4, 1 + 4 + 4): 1,
                ("all_to_all", 4, 8 * (2 + 2 * 2)): 1,
                ("all_to_all", 4, 8 * WIDTH): 4,
                ("all_to_all", 4, 8 * 2): 1,
            }
        )


def test_sizes_are_exchanged_before_tokens_are_sorted_and_before_any_token_is_sent() -> None:
    order: dict[int, list[str]] = defaultdict(list)

    def sort_rows(*args: Any) -> Any:
        order[dist.get_rank()].append("sort")
        return reference.sort_rows(*args)

    kernels = KernelSet.of({op: getattr(REFERENCE, op) for op in OPS} | {"sort_rows": sort_rows}, REFERENCE.choices)

    def rank(ctx: ParallelContext) -> None:
        dispatcher = new(HIERARCHICAL, ctx, kernels=kernels)
        read = dispatcher.comm.transport.read_sizes

        def noting(route: Any) -> Any:
            order[ctx.rank].append("read")
            return read(route)

        dispatcher.comm.transport.read_sizes = noting
        dispatcher.start_dispatch(draw(4, WIDTH), sparse(CASES["spread"](0), num_experts=EXPERTS))

    with counted_traffic(lambda op: order[dist.get_rank()].append(op)):
        on_threads(parallel(4, ep=4, ranks_per_host=2), rank)
    assert len(order) == 4
    for steps in order.values():
        assert steps[:5] == ["all_gather", "sort", "read", "all_to_all", "all_to_all"]


def test_padded_all_to_all_sends_every_expert_its_capacity_and_no_counts() -> None:
    for sent in traffic_of(parallel(4, ep=4), NCCL, 3):
        rows = EXPERTS * 3
        assert sent == Counter({("all_to_all", 4, rows * WIDTH): 4, ("all_to_all", 4, rows): 2})


def test_all_to_all_gathers_rows_over_etp_before_the_experts_and_reduce_scatters_them_after() -> None:
    """Every expert receives one row from each rank.

    With 8 experts, EP 2 and ETP 2, the all-to-all sends 8 rows to each rank, and the all-gather over etp doubles them.
    """
    for sent in traffic_of(parallel(4, ep=2, etp=2), NCCL, None):
        assert sent == Counter(
            {
                ("all_gather", 4, EXPERTS): 1,
                ("all_to_all", 2, ELEMENTS): 4,
                ("all_to_all", 2, 8): 2,
                ("all_gather", 2, 8 * WIDTH): 2,  # dispatch, and the backward of combine
                ("reduce_scatter", 2, 16 * WIDTH): 2,
                ("all_gather", 2, 8): 1,
                ("reduce_scatter", 2, 16): 1,
            }
        )


@pytest.mark.parametrize("capacity", [None, 3])
@pytest.mark.parametrize("fold", [parallel(4, ep=4), parallel(4, ep=2, etp=2)], ids=name_of)
def test_all_gather_sends_tokens_ids_and_probabilities_and_reduce_scatters_sums(fold, capacity) -> None:
    for sent in traffic_of(fold, ALLGATHER, capacity):
        assert sent == Counter(
            {
                ("all_gather", 4, 4 * WIDTH): 2,  # dispatch, and the backward of combine
                ("reduce_scatter", 4, 16 * WIDTH): 2,
                ("all_gather", 4, 8): 2,  # ids and probabilities
                ("reduce_scatter", 4, 32): 1,
            }
        )


def test_dispatchers_read_split_sizes_on_the_host_once(monkeypatch) -> None:
    """Host reads inside the in-memory process group, which only tests use, are not counted."""
    reads: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if "/megatron_moe/" in sys._getframe(1).f_code.co_filename:
                reads.append(name)
            return original(*args, **kwargs)

        return call

    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "nonzero", "cpu"):
        monkeypatch.setattr(Tensor, name, counting(name))

    def rank(ctx: ParallelContext, kind: Any, capacity: int | None) -> None:
        dispatcher = new(kind, ctx)
        routing = sparse(CASES["spread"](0), num_experts=EXPERTS, capacity=capacity)
        rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(draw(4, WIDTH), routing))
        dispatcher.finish_combine(dispatcher.start_combine(rows, handle))

    kinds = (NCCL, HIERARCHICAL, ALLGATHER, LOCAL)
    for kind, capacity, ep in product(kinds, (None, 3), (1, 2)):
        if (kind is LOCAL) == (ep == 1):
            reads.clear()
            on_threads(parallel(ep, ep=ep), lambda ctx, k=kind, c=capacity: rank(ctx, k, c))
            padded_read = kind is NCCL and capacity is not None
            expected = ep * (0 if padded_read else kind.host_reads)
            assert len(reads) == expected, f"{kind.name} with capacity {capacity}: {len(reads)} reads"


def test_groups_on_several_hosts_use_the_hierarchical_exchange() -> None:
    """Expert choice and experts padded to capacity use other exchanges, because their sizes are known in advance."""
    dense_router = {"balancing": ("expert_choice",)}
    padded = CapacityConfig(factor=1.0, pad=True)
    expected = {
        ("alltoall", "sparse"): HIERARCHICAL,
        ("flex", "sparse"): HIERARCHICAL,
        ("allgather", "sparse"): ALLGATHER,
        ("alltoall", "dense"): NCCL,
        ("alltoall", "padded"): NCCL,
        ("flex", "padded"): HIERARCHICAL,
    }

    def rank(ctx: ParallelContext) -> dict[tuple[str, str], type]:
        found = {}
        for name, routing in expected:
            changes = {"dense": {"router": dense_router}, "padded": {"capacity": padded}}.get(routing, {})
            config = moe_config(dispatcher=name, **changes)
            found[name, routing] = new_expert_comm(config, ctx, REFERENCE).kind
        return found

    fold = parallel(4, ep=4, ranks_per_host=2)
    assert on_threads(fold, rank) == [expected] * 4
    for comm in on_threads(fold, lambda ctx: new_expert_comm(moe_config(), ctx, REFERENCE)):
        assert comm.note and "4 expert ranks, with 2 on a host" in comm.note
    assert on_threads(parallel(4, ep=2, ranks_per_host=2), rank)[0]["alltoall", "sparse"] is NCCL


def test_config_selects_the_dispatcher_and_one_rank_uses_the_local_one() -> None:
    def rank(ctx: ParallelContext) -> list[type]:
        kinds = ("allgather", "alltoall", "flex")
        return [new_expert_comm(moe_config(dispatcher=kind), ctx, REFERENCE).kind for kind in kinds]

    assert on_threads(parallel(2, ep=2), rank)[0] == [ALLGATHER, NCCL, SYMMETRIC]
    assert on_threads(parallel(2), rank)[0] == [LOCAL] * 3


class RecordingStreams(Streams):
    """Streams that log every recorded event and every wait for an event."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def record(self) -> Any:
        self.log.append("event")
        return "event"

    def wait(self, event: Any) -> None:
        self.log.append("wait")


@pytest.mark.parametrize("num_sms", [None, 8])
def test_multiprocessors_are_reserved_while_exchanges_are_in_progress(num_sms, monkeypatch) -> None:
    """SMs stay reserved for overlapping exchanges until the last of them has finished."""
    logs: dict[int, list[Any]] = {0: [], 1: []}
    here = threading.local()
    monkeypatch.setattr(symmetric, "make_streams", lambda *args, **named: RecordingStreams(here.log))
    monkeypatch.setattr(symmetric, "reserve_sms", lambda number, device: here.log.append(number))
    monkeypatch.setattr(symmetric, "release_sms", lambda: here.log.append("end"))

    def rank(ctx: ParallelContext) -> None:
        here.log = log = logs[ctx.rank]
        comm = ExpertComm(ctx, REFERENCE, SYMMETRIC, EXPERTS, options=PushConfig(num_sms=num_sms))
        first, second = (comm.new_dispatcher() for _ in range(2))
        routing, tokens = sparse([[0, 7]], num_experts=EXPERTS), draw(1, WIDTH, seed=ctx.rank)
        rows, handle = first.finish_dispatch(first.start_dispatch(tokens, routing))
        del log[3 if num_sms else 1 :]
        combine = first.start_combine(rows, handle)
        dispatch = second.start_dispatch(tokens, routing)
        log.append("both")
        first.finish_combine(combine)
        log.append("one")
        second.finish_dispatch(dispatch)

    on_threads(parallel(2, ep=2), rank)
    start, finish = ["event", 8, "wait"] if num_sms else ["event"], ["event", "wait"]
    assert logs[0] == logs[1] == [*start * 3, "both", *finish, "one", "end", *finish]
