"""Dispatchers over ranks, apart from the layer: what goes out comes back, in a fixed order, with the stated traffic."""

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels import reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.moe.moe_layer import new_expert_comm
from megatron_moe.moe.token_dispatcher.allgather import AllGatherDispatcher
from megatron_moe.moe.token_dispatcher.alltoall import AllToAllDispatcher
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens, ExpertComm
from megatron_moe.moe.token_dispatcher.local import LocalDispatcher
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.helpers.thinned import thinned
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.moe.parallel.folded import name_of, parallel
from tests.moe.parallel.traffic import counted_traffic
from tests.moe.routings import dense, draw, sparse

EXPERTS, WIDTH = 8, 3
REFERENCE = reference.bundle()
BOTH = pytest.mark.parametrize("kind", [AllGatherDispatcher, AllToAllDispatcher])
FORMS = pytest.mark.parametrize("make", [sparse, dense])
FOLDS = pytest.mark.parametrize(
    "fold",
    [parallel(2, ep=2), parallel(2, etp=2), parallel(4, etp=2, ep=2), parallel(8, ep=4, etp=2, order="ep-tp-cp-dp-pp"),
     *thinned([parallel(4, ep=4), parallel(8, ep=4, etp=2), parallel(8, ep=8), parallel(8, ep=2, etp=4)], 4)],
    ids=name_of,
)  # fmt: skip
CASES = {
    "spread": lambda rank: [[0, 3], [1, 7], [5, 2], [6, 4]],
    "ranks differ": lambda rank: [[(rank + t) % EXPERTS, (rank + 3 * t + 1) % EXPERTS] for t in range(4)],
    "all to one expert": lambda rank: [[5, -1]] * 4,
    "one rank sends, to one expert": lambda rank: [[6, -1] if rank == 0 else [-1, -1]] * 4,
    "nothing at all": lambda rank: [[-1, -1]] * 4,
    "some dropped": lambda rank: [[0, -1], [-1, -1], [-1, 7], [(rank + 2) % EXPERTS, (rank + 3) % EXPERTS]],
    "one token": lambda rank: [[rank % EXPERTS, 7 - rank % EXPERTS] if rank % 4 < 3 else [7, -1]],
}


def comm(ctx: ParallelContext, kind: Any, kernels: Any = REFERENCE) -> ExpertComm:
    return ExpertComm(ctx, kernels, kind)


def weigh(rows: DispatchedTokens, share: float) -> DispatchedTokens:
    """Experts that apply the probability and leave garbage where nothing is held. Over etp each gives a part."""
    weighed = rows.data * rows.probs_R[:, None] * share
    held = torch.arange(len(weighed)) < rows.offsets_e[-1]
    garbage = torch.where(held[:, None], weighed, torch.nan)
    return replace(rows, data=garbage)


def there_and_back(dispatcher: Any, tokens: Tensor, routing: Any, share: float) -> tuple[DispatchedTokens, Tensor]:
    rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, routing))
    back = dispatcher.finish_combine(dispatcher.start_combine(weigh(rows, share), handle))
    return rows, back


def served(ids: list[list[int]]) -> Tensor:
    return torch.tensor([[sum(e >= 0 for e in row) / len(row)] for row in ids], dtype=torch.float64).view(-1, 1)


@FOLDS
@BOTH
@FORMS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("capacity", [None, 4])
def test_combine_undoes_dispatch_forward_and_backward(fold, kind, make, case, capacity) -> None:
    def rank(ctx: ParallelContext) -> None:
        ids = CASES[case](ctx.rank)
        tokens = draw(len(ids), WIDTH, seed=ctx.rank).requires_grad_()
        routing = make(ids, num_experts=EXPERTS, capacity=capacity)
        probs = routing.probs_TK if routing.probs_TE is None else routing.probs_TE
        chosen = routing.ids_TK >= 0 if routing.map_TE is None else routing.map_TE
        probs.requires_grad_()
        rows, back = there_and_back(kind(EXPERTS, comm(ctx, kind)), tokens, routing, 1 / fold.etp)
        assert len(rows.data) == len(rows.probs_R) == rows.bound >= rows.offsets_e[-1]
        FP64_REF.check(back, tokens.detach() * served(ids), "tokens")
        grad = draw(len(ids), WIDTH, seed=10 + ctx.rank)
        back.backward(grad)
        FP64_REF.check(tokens.grad, grad * served(ids), "gradient of tokens")
        expected = torch.where(chosen, (tokens.detach() * grad).sum(1, keepdim=True), 0)
        FP64_REF.check(probs.grad, expected, "gradient of probabilities")

    on_threads(fold, rank)


@pytest.mark.parametrize("fold", [parallel(4, ep=4), parallel(4, etp=2, ep=2)], ids=name_of)
@pytest.mark.parametrize("num_tokens", [[0, 3, 1, 5], [0, 0, 0, 2], [4, 0, 0, 0]], ids=str)
def test_all_to_all_takes_different_numbers_of_tokens_from_ranks_none_too(fold, num_tokens) -> None:
    def rank(ctx: ParallelContext) -> None:
        ids = [[(t + ctx.rank) % EXPERTS, (3 * t + ctx.rank + 1) % EXPERTS] for t in range(num_tokens[ctx.rank])]
        ids = [row if row[0] != row[1] else [row[0], -1] for row in ids]
        tokens = draw(len(ids), WIDTH, seed=ctx.rank).requires_grad_()
        dispatcher = AllToAllDispatcher(EXPERTS, comm(ctx, AllToAllDispatcher))
        _, back = there_and_back(dispatcher, tokens, sparse(ids, num_experts=EXPERTS), 1 / fold.etp)
        FP64_REF.check(back, tokens.detach() * served(ids), "tokens")
        back.backward(torch.ones_like(back))
        FP64_REF.check(tokens.grad, served(ids).expand(-1, WIDTH), "gradient of tokens")

    on_threads(fold, rank)


@FOLDS
@BOTH
@pytest.mark.parametrize("capacity", [None, 4])
def test_each_expert_sees_its_tokens_of_all_ranks_once_and_in_order(fold, kind, capacity) -> None:
    """A token is its rank and its place: order by source, then by place."""

    def rank(ctx: ParallelContext) -> tuple[int, int, list[list[list[float]]]]:
        ids = CASES["ranks differ"](ctx.rank)
        tokens = torch.tensor([[float(ctx.rank), float(t), 1.0] for t in range(len(ids))], dtype=torch.float64)
        dispatcher = kind(EXPERTS, comm(ctx, kind))
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
            if capacity is not None:
                assert len(rows) == capacity * fold.ep * fold.etp


@BOTH
def test_bf16_rows_of_one_token_are_added_up_in_fp32_across_ranks(kind) -> None:
    """1 + 3 * 2^-10 on one rank, 3 * 2^-10 on the other: rounded to bf16 before the last sum, both would be lost."""
    values = torch.tensor([1.0, 3 * 2.0**-10, 3 * 2.0**-10, 0.0]).bfloat16()

    def rank(ctx: ParallelContext) -> Tensor:
        routing = sparse([[0, 1, 2, 3]], torch.ones(1, 4, dtype=torch.float64), num_experts=4)
        dispatcher = kind(4, comm(ctx, kind))
        rows, handle = dispatcher.finish_dispatch(
            dispatcher.start_dispatch(torch.ones(1, 1, dtype=torch.bfloat16), routing)
        )
        mine = values[2 * ctx.group("ep").rank :][:2].repeat_interleave(rows.offsets_e[0])
        data = torch.zeros_like(rows.data)
        data[: len(mine), 0] = mine
        pending = dispatcher.start_combine(replace(rows, data=data), handle)
        return dispatcher.finish_combine(pending)

    for out in on_threads(parallel(2, ep=2), rank):
        EXACT.check(out, torch.tensor([[1 + 6 * 2.0**-10]]).bfloat16())
        assert out.item() > 1


@BOTH
@pytest.mark.parametrize("case", ["ranks differ", "all to one expert", "nothing at all"])
def test_fast_kernels_bring_every_token_back_too(kind, case) -> None:
    native = select_kernels(KernelConfig(kernel_backend="torch_native"), torch.device("cpu"), torch.float32)

    def rank(ctx: ParallelContext) -> None:
        ids = CASES[case](ctx.rank)
        tokens = draw(len(ids), WIDTH, seed=ctx.rank).requires_grad_()
        routing = sparse(ids, num_experts=EXPERTS)
        _, back = there_and_back(kind(EXPERTS, comm(ctx, kind, native)), tokens, routing, 0.5)
        FP64_REF.check(back, tokens.detach() * served(ids), "tokens")

    on_threads(parallel(4, ep=2, etp=2), rank)


# traffic

ELEMENTS = 4 * 2 * WIDTH
"""Of the rows of one rank: four tokens, two experts each."""


def dispatched(fold: ParallelConfig, kind: Any, capacity: int | None) -> list[Counter]:
    """(op, group size, elements given) of every collective of dispatch, combine and their backward, per rank."""

    def rank(ctx: ParallelContext) -> None:
        tokens = draw(4, WIDTH, seed=ctx.rank).requires_grad_()
        routing = sparse(CASES["spread"](0), num_experts=EXPERTS, capacity=capacity)
        routing.probs_TK.requires_grad_()
        _, back = there_and_back(kind(EXPERTS, comm(ctx, kind)), tokens, routing, 1.0)
        back.sum().backward()

    with counted_traffic() as traffic:
        on_threads(fold, rank)
    return traffic.of_ranks(fold.world_size)


def test_all_to_all_sends_every_row_once_each_way_and_gathers_counts() -> None:
    for sent in dispatched(parallel(4, ep=4), AllToAllDispatcher, None):
        assert sent == Counter(
            {
                ("all_gather", 4, EXPERTS): 1,
                ("all_to_all", 4, ELEMENTS): 4,  # dispatch, combine, and each backward
                ("all_to_all", 4, 8): 2,  # probabilities and their gradient
            }
        )


def test_padded_all_to_all_sends_every_expert_its_capacity_and_no_counts() -> None:
    for sent in dispatched(parallel(4, ep=4), AllToAllDispatcher, 3):
        rows = EXPERTS * 3
        assert sent == Counter({("all_to_all", 4, rows * WIDTH): 4, ("all_to_all", 4, rows): 2})


def test_all_to_all_over_etp_gathers_rows_after_and_reduces_them_before() -> None:
    """Every expert gets one row of every rank: 8 experts, 2 ranks of ep and 2 of etp, so 8 rows come over ep."""
    for sent in dispatched(parallel(4, ep=2, etp=2), AllToAllDispatcher, None):
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
def test_all_gather_sends_tokens_ids_and_probabilities_to_all_and_gets_sums_back(fold, capacity) -> None:
    for sent in dispatched(fold, AllGatherDispatcher, capacity):
        assert sent == Counter(
            {
                ("all_gather", 4, 4 * WIDTH): 2,  # dispatch, and the backward of combine
                ("reduce_scatter", 4, 16 * WIDTH): 2,
                ("all_gather", 4, 8): 2,  # ids and probabilities
                ("reduce_scatter", 4, 32): 1,
            }
        )


def test_the_host_reads_once_for_the_splits_of_all_to_all_and_else_never(monkeypatch) -> None:
    """Reads of the in-memory group itself do not count."""
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
        dispatcher = kind(EXPERTS, comm(ctx, kind))
        routing = sparse(CASES["spread"](0), num_experts=EXPERTS, capacity=capacity)
        rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(draw(4, WIDTH), routing))
        dispatcher.finish_combine(dispatcher.start_combine(rows, handle))

    for kind, capacity, expected in (
        (AllToAllDispatcher, None, AllToAllDispatcher.host_reads),
        (AllToAllDispatcher, 3, 0),
        (AllGatherDispatcher, None, AllGatherDispatcher.host_reads),
        (AllGatherDispatcher, 3, 0),
    ):
        reads.clear()
        on_threads(parallel(2, ep=2), lambda ctx, k=kind, c=capacity: rank(ctx, k, c))
        assert len(reads) == 2 * expected, f"{kind.__name__} with capacity {capacity}: {len(reads)} reads of two ranks"


def test_the_spec_chooses_the_dispatcher_and_one_rank_needs_none() -> None:
    def rank(ctx: ParallelContext) -> list[type]:
        return [new_expert_comm(d, ctx, REFERENCE).dispatcher for d in ("allgather", "alltoall")]

    assert on_threads(parallel(2, ep=2), rank)[0] == [AllGatherDispatcher, AllToAllDispatcher]
    assert on_threads(parallel(2), rank)[0] == [LocalDispatcher, LocalDispatcher]
