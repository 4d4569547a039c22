"""The local dispatcher: what is dispatched with weights that sum to 1 comes back as it was, and so do gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels import reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens, ExpertComm, Routing
from megatron_moe.moe.token_dispatcher.local import LocalDispatcher, LocalHandle
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.moe.routings import dense, draw, sparse

REFERENCE = reference.bundle()
NATIVE = select_kernels(KernelConfig(kernel_backend="torch_native"), torch.device("cpu"), torch.float32)
CASES = (
    ("spread", [[0, 3], [1, 2], [3, 0], [2, 1], [0, 1]]),
    ("all to one expert", [[2, -1]] * 5),
    ("two experts get all", [[3, 1]] * 5),
    ("one token", [[1, 0]]),
    ("no tokens", []),
    ("some choices dropped", [[0, -1], [-1, -1], [3, 0], [-1, 2], [1, 3]]),
    ("everything dropped", [[-1, -1]] * 3),
)
EVERY_CASE = pytest.mark.parametrize("ids", [ids for _, ids in CASES], ids=[name for name, _ in CASES])
EVERY_FORM = pytest.mark.parametrize("make", [sparse, dense])
EVERY_CAPACITY = pytest.mark.parametrize("capacity", [None, 5, 7])


def dispatch(tokens: Tensor, routing: Routing, kernels=REFERENCE) -> tuple[DispatchedTokens, LocalHandle]:
    dispatcher = LocalDispatcher(4, ExpertComm(ParallelContext.single(), kernels, LocalDispatcher))
    return dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, routing))


def combine(rows: DispatchedTokens, handle: LocalHandle, kernels=REFERENCE) -> Tensor:
    dispatcher = LocalDispatcher(4, ExpertComm(ParallelContext.single(), kernels, LocalDispatcher))
    return dispatcher.finish_combine(dispatcher.start_combine(rows, handle))


def weigh(rows: DispatchedTokens) -> DispatchedTokens:
    """Experts that do nothing but apply the probability, and leave garbage where nothing is held."""
    weighed = rows.data * rows.probs_R[:, None]
    garbage = torch.where(rows.probs_R[:, None] == 0, torch.nan, weighed)
    return replace(rows, data=garbage)


def share_served(ids: list[list[int]]) -> Tensor:
    """[T, 1]: the part of every token's choices that is not dropped."""
    return torch.tensor([[sum(e >= 0 for e in row) / len(row)] for row in ids], dtype=torch.float64).view(-1, 1)


@pytest.mark.parametrize("kernels", [REFERENCE, NATIVE], ids=["reference", "torch_native"])
@EVERY_CASE
@EVERY_FORM
@EVERY_CAPACITY
def test_combine_undoes_dispatch_forward_and_backward_up_to_what_was_dropped(ids, make, capacity, kernels) -> None:
    tokens = draw(len(ids), 3).requires_grad_()
    rows, handle = dispatch(tokens, make(ids, num_experts=4, capacity=capacity), kernels)
    back = combine(weigh(rows), handle, kernels)
    share = share_served(ids)
    FP64_REF.check(back, tokens.detach() * share, "tokens")
    grad = draw(len(ids), 3, seed=1)
    back.backward(grad)
    FP64_REF.check(tokens.grad, grad * share, "gradient of tokens")


@EVERY_CASE
@EVERY_FORM
@EVERY_CAPACITY
def test_the_gradient_of_a_probability_is_the_token_times_the_incoming_gradient(ids, make, capacity) -> None:
    tokens, grad = draw(len(ids), 3), draw(len(ids), 3, seed=1)
    routing = make(ids, num_experts=4, capacity=capacity)
    probs = routing.probs_TK if routing.probs_TE is None else routing.probs_TE
    chosen = routing.ids_TK >= 0 if routing.map_TE is None else routing.map_TE
    probs.requires_grad_()
    rows, handle = dispatch(tokens, routing)
    combine(weigh(rows), handle).backward(grad)
    FP64_REF.check(probs.grad, torch.where(chosen, (tokens * grad).sum(1, keepdim=True), 0))


@EVERY_CASE
@EVERY_FORM
def test_each_expert_sees_its_tokens_in_order(ids, make) -> None:
    tokens = draw(len(ids), 3)
    rows, _ = dispatch(tokens, make(ids, num_experts=4))
    start = 0
    for expert, end in enumerate(rows.offsets_e.tolist()):
        mine = [t for t, row in enumerate(ids) if expert in row]
        EXACT.check(rows.data[start:end], tokens[mine], f"expert {expert}")
        start = end
    assert not rows.probs_R[start:].any() and len(rows.probs_R) == rows.bound


def test_rows_that_hold_nothing_are_zeros_and_weigh_nothing() -> None:
    rows, handle = dispatch(draw(3, 2) + 5, sparse([[0, -1], [-1, -1], [0, 1]], num_experts=3, capacity=4))
    empty = handle.index.token_R < 0
    assert empty.tolist() == [False, False, True, True, False] + [True] * 7
    EXACT.check(rows.data[empty], torch.zeros(9, 2, dtype=torch.float64))
    EXACT.check(rows.probs_R[empty], torch.zeros(9, dtype=torch.float64))


def test_the_host_reads_nothing_and_nothing_can_overflow() -> None:
    rows, _ = dispatch(draw(3, 2), sparse([[0, 1]] * 3, num_experts=3))
    assert LocalDispatcher.host_reads == 0 and rows.overflow is None and rows.bound == 6
    assert rows.offsets_e.dtype is torch.int32


def test_both_forms_of_one_routing_give_the_same_result() -> None:
    ids = [[0, 3], [1, -1], [3, 0], [2, 1]]
    tokens, probs = draw(4, 3), draw(4, 2, seed=1).abs()
    results = []
    for make in (sparse, dense):
        rows, handle = dispatch(tokens, make(ids, probs, num_experts=4))
        results.append(combine(weigh(rows), handle))
    FP64_REF.check(results[0], results[1])


def test_bf16_rows_are_added_up_in_fp32() -> None:
    ids = [list(range(8))]
    routing = sparse(ids, torch.ones(1, 8, dtype=torch.float64), num_experts=8)
    rows, handle = dispatch(torch.ones(1, 1, dtype=torch.bfloat16), routing)
    data = torch.full((8, 1), 2.0**-9, dtype=torch.bfloat16)
    data[0] = 1.0
    out = combine(replace(rows, data=data), handle)
    EXACT.check(out, torch.tensor([[1 + 7 * 2.0**-9]]).bfloat16())
