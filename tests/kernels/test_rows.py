"""Sorting tokens into rows and back: properties of every routing, and cases with explicit results."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.ops import RowIndex
from megatron_moe.kernels.reference import backend as reference
from tests.helpers.tolerances import EXACT, FP64_REF

KERNELS = reference.bundle()


@st.composite
def routings(draw) -> tuple[Tensor, int]:
    """ids [T, K] with distinct experts per token and any number of -1, and the number of experts."""
    num_tokens, num_experts = draw(st.integers(0, 9)), draw(st.integers(1, 6))
    topk = draw(st.integers(1, num_experts))
    rows = []
    for _ in range(num_tokens):
        order = draw(st.permutations(range(num_experts)))[:topk]
        rows.append([e if draw(st.booleans()) else -1 for e in order])
    return torch.tensor(rows, dtype=torch.int64).view(num_tokens, topk), num_experts


def sorted_by_hand(ids: Tensor, num_experts: int) -> list[list[tuple[int, int]]]:
    """(token, choice) of every expert in token order."""
    return [
        [(t, k) for t, row in enumerate(ids.tolist()) for k, e in enumerate(row) if e == x] for x in range(num_experts)
    ]


@given(routings(), st.integers(1, 5))
def test_rows_are_sorted_by_expert_then_by_token_with_aligned_experts(case, align: int) -> None:
    ids, num_experts = case
    index = KERNELS.sort_rows(ids, num_experts, None, align)
    nothing = (-1, 0)
    held = [pairs + [nothing] * (-len(pairs) % align) for pairs in sorted_by_hand(ids, num_experts)]
    flat = [pair for pairs in held for pair in pairs]
    worst = ids.numel() + min(num_experts, ids.numel()) * (align - 1)
    flat += [nothing] * (worst // align * align - len(flat))
    assert index.token_R.tolist() == [t for t, _ in flat]
    assert index.choice_R.tolist() == [-1 if t < 0 else t * ids.shape[1] + k for t, k in flat]
    assert index.offsets_E.tolist() == [sum(len(p) for p in held[: e + 1]) for e in range(num_experts)]
    assert index.offsets_E.dtype is torch.int32
    check_inverse(index, ids)


@given(routings(), st.integers(0, 4), st.integers(1, 3))
def test_capacity_gives_every_expert_equal_rows_in_token_order(case, capacity: int, align: int) -> None:
    ids, num_experts = case
    index = KERNELS.sort_rows(ids, num_experts, capacity, align)
    owned = capacity + -capacity % align
    expected: list[int] = []
    for pairs in sorted_by_hand(ids, num_experts):
        tokens = [t for t, _ in pairs][:capacity]
        expected += tokens + [-1] * (owned - len(tokens))
    assert index.token_R.tolist() == expected
    assert index.offsets_E.tolist() == [owned * (e + 1) for e in range(num_experts)]
    check_inverse(index, ids)


def check_inverse(index: RowIndex, ids: Tensor) -> None:
    """Asserts that `rows_TK` and `choice_R` are inverse mappings."""
    rows = index.rows_TK.flatten().tolist()
    for choice, row in enumerate(rows):
        assert row == -1 or index.choice_R[row] == choice
    for row, choice in enumerate(index.choice_R.tolist()):
        assert choice == -1 or (rows[choice] == row and index.token_R[row] == choice // ids.shape[1])


@given(routings(), st.integers(0, 4) | st.none())
def test_dense_and_sparse_routing_give_equal_rows(case, capacity: int | None) -> None:
    ids, num_experts = case
    sparse = KERNELS.sort_rows(ids, num_experts, capacity)
    dense = KERNELS.sort_rows_dense(dense_map(ids, num_experts), ids.numel(), capacity)
    EXACT.check(dense.token_R, sparse.token_R, "tokens")
    EXACT.check(dense.offsets_E, sparse.offsets_E, "offsets")
    assert dense.rows_TK is None
    experts = torch.where(sparse.choice_R < 0, -1, ids.flatten()[sparse.choice_R]) if ids.numel() else sparse.choice_R
    place = torch.where(sparse.token_R < 0, -1, sparse.token_R * num_experts + experts)
    EXACT.check(dense.choice_R, place, "places in probs_TE")


def dense_map(ids: Tensor, num_experts: int) -> Tensor:
    out = torch.zeros(len(ids), num_experts + 1, dtype=torch.bool)
    return out.scatter_(1, torch.where(ids < 0, num_experts, ids), True)[:, :num_experts]


@given(st.integers(0, 5), st.integers(0, 3), st.integers(0, 20))
def test_dense_routing_pads_and_truncates_rows(tokens, experts, rows) -> None:
    map_TE = torch.rand(tokens, experts + 1, generator=torch.Generator().manual_seed(rows)) < 0.5
    index = KERNELS.sort_rows_dense(map_TE, rows, None)
    wanted = [t for e in range(experts + 1) for t in range(tokens) if map_TE[t, e]]
    assert index.token_R.tolist() == (wanted + [-1] * rows)[:rows]
    assert int(index.offsets_E[-1]) == min(rows, len(wanted))


BACKENDS = pytest.mark.parametrize("ops", [KERNELS, torch_native], ids=["reference", "torch_native"])


@BACKENDS
@given(case=routings(), capacity=st.integers(0, 4) | st.none())
def test_permute_copies_and_unpermute_sums(ops, case, capacity) -> None:
    ids, num_experts = case
    index = KERNELS.sort_rows(ids, num_experts, capacity)
    tokens = torch.arange(len(ids) * 3, dtype=torch.float64).view(-1, 3) + 1
    rows = ops.permute(tokens, index)
    for row, token in enumerate(index.token_R.tolist()):
        expected = torch.zeros(3) if token < 0 else tokens[token]
        EXACT.check(rows[row], expected, f"row {row}")
    rows = torch.where(index.token_R[:, None] < 0, torch.nan, rows)
    served = (index.rows_TK >= 0).sum(dim=1, keepdim=True)
    EXACT.check(ops.unpermute(rows, index, len(ids)), tokens * served, "every token as often as it was served")


@BACKENDS
@pytest.mark.parametrize("capacity", [None, 1, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_gradients_of_permute_unpermute_and_probs(ops, capacity, dense) -> None:
    ids = torch.tensor([[2, 0], [2, -1], [-1, -1], [0, 2], [1, 2]])
    index = KERNELS.sort_rows(ids, 4, capacity)
    if dense:
        index = KERNELS.sort_rows_dense(dense_map(ids, 4), ids.numel(), capacity)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(len(index.token_R), 3, generator=generator, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(5, 4 if dense else 2, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.permute(x, index), (tokens,))
    assert torch.autograd.gradcheck(lambda x: ops.unpermute(x, index, 5), (rows,))
    assert torch.autograd.gradcheck(lambda x: KERNELS.gather_probs(x, index), (probs,))


@BACKENDS
def test_nan_gradients_of_unused_rows_do_not_reach_tokens(ops) -> None:
    ids = torch.tensor([[0], [-1], [1]])
    index = KERNELS.sort_rows(ids, 2, 2)
    tokens, probs = torch.ones(3, 2, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    poison = torch.where(index.token_R < 0, torch.nan, 1.0)
    ops.permute(tokens, index).backward(poison[:, None].expand(-1, 2))
    KERNELS.gather_probs(probs, index).backward(poison)
    EXACT.check(tokens.grad, torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]), "tokens")
    EXACT.check(probs.grad, torch.tensor([[1.0], [0.0], [1.0]]), "probs")


@BACKENDS
def test_bf16_rows_are_summed_in_fp32(ops) -> None:
    ids = torch.arange(8)[None]
    index = KERNELS.sort_rows(ids, 8, None)
    rows = torch.full((8, 1), 2.0**-9, dtype=torch.bfloat16)
    rows[0] = 1.0  # in bf16 1 + 2^-9 is 1 again, seven times
    exact = torch.tensor([[1 + 7 * 2.0**-9]]).bfloat16()
    assert exact.item() != 1.0
    EXACT.check(ops.unpermute(rows, index, 1), exact, "forward")
    token = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    ops.permute(token, index).backward(rows)
    EXACT.check(token.grad, exact, "backward")


def test_probs_are_gathered_with_zeros_in_unused_rows() -> None:
    ids = torch.tensor([[2, 0], [-1, 2]])
    probs = torch.tensor([[0.7, 0.3], [9.0, 0.4]], dtype=torch.float64)
    EXACT.check(KERNELS.gather_probs(probs, KERNELS.sort_rows(ids, 3, None)), [0.3, 0.7, 0.4, 0.0])
    EXACT.check(KERNELS.gather_probs(probs, KERNELS.sort_rows(ids, 3, 2)), [0.3, 0.0, 0.0, 0.0, 0.7, 0.4])
    dense = torch.tensor([[0.3, 0.0, 0.7], [0.0, 0.0, 0.4]], dtype=torch.float64)
    FP64_REF.check(KERNELS.gather_probs(dense, KERNELS.sort_rows_dense(dense > 0, 4, None)), [0.3, 0.7, 0.4, 0.0])
