"""Gather of expert rows from tokens inside fc1, and overflow counts in `ExpertComm`."""

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.moe.experts import Experts
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.step_results import largest_overflows
from tests.helpers.bounded_dispatcher import bounded_comm, gather_in_fc1
from tests.helpers.modules import standalone_resources
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import FP64_LAYOUT
from tests.moe.parallel.folded import (
    EXPERTS,
    HIDDEN,
    KERNELS,
    Data,
    moe_config,
    name_of,
    on_one_rank,
    over_ranks,
    parallel,
)
from tests.moe.routings import draw, sparse

CASES = {
    "grouped": {},
    "one by one": {"grouped": False},
    "bias": {"bias": True},
    "probabilities on the input": {"router": {"topk": 1}, "probs_on_input": True},
    "probabilities on the output": {"probs_on_output": True},
    "latent and shared": {"latent": True, "shared": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fold", [parallel(1), parallel(2, ep=2), parallel(4, ep=2, etp=2)], ids=name_of)
def test_gathered_rows_equal_permuted_rows(fold, case) -> None:
    config, data = moe_config(dispatcher="allgather", **CASES[case]), Data.random(fold.dp)
    expected, actual = on_one_rank(config, data), over_ranks(config, fold, data, gather_in_fc1)
    FP64_LAYOUT.check_all(actual.tensors, expected.tensors, case)


def test_the_first_matrix_saves_each_token_once() -> None:
    config, ids = moe_config(ffn_hidden_size=5).experts, [[t % EXPERTS, (t + 3) % EXPERTS] for t in range(6)]
    ctx = ParallelContext.single()
    dispatcher = bounded_comm(ctx, KERNELS, EXPERTS).new_dispatcher()
    tokens = draw(len(ids), HIDDEN).requires_grad_()
    rows, _ = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, sparse(ids, num_experts=EXPERTS)))
    assert rows.data is tokens and len(rows.probs_R) == 12
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        out = Experts(config, standalone_resources(ctx, KERNELS))(rows)
    assert out.index is None and len(out.data) == 12
    assert (6, HIDDEN) in saved and (12, HIDDEN) not in saved


def test_overflow_on_one_pipeline_stage_is_visible_on_all_stages() -> None:
    def rank(ctx: ParallelContext) -> float:
        comm = bounded_comm(ctx, KERNELS, EXPERTS)
        comm.overflow.fill_(0.25 * ctx.rank)
        return float(largest_overflows(ctx, comm, None)["overflow"])

    assert on_threads(ParallelConfig(world_size=2, pp=2), rank) == [0.25, 0.25]


@pytest.mark.parametrize("max_rows", [24, 23])
def test_overflow_on_one_rank_is_visible_on_all_ranks_until_the_next_step(max_rows: int) -> None:
    def rank(ctx: ParallelContext) -> list[bool]:
        comm = bounded_comm(ctx, KERNELS, EXPERTS)
        full, other = comm.new_dispatcher(), comm.new_dispatcher()
        full.max_rows = max_rows
        found = []
        for dispatcher in (full, other):
            comm.begin_step()
            for each in (dispatcher, other):
                routing = sparse([[0, 1]] * 6, num_experts=EXPERTS)  # all rows are on the first rank
                rows, _ = each.finish_dispatch(each.start_dispatch(draw(6, HIDDEN), routing))
                comm.record_overflow(rows)
            found.append(bool(largest_overflows(ctx, comm, None)["overflow"] > 0))
        return found

    assert on_threads(parallel(2, ep=2), rank) == [[24 > max_rows, False]] * 2
