"""Expected rows of experts, with their padding, against rows counted for random routing."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.config.moe import CapacityConfig, MoEConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.kernels.reference.routing import sort_rows
from megatron_moe.moe.routing_methods import within_capacity
from tests.helpers.tiny_models import moe_config
from tests.helpers.tolerances import SIMULATED_ROUTING

TOKENS, EXPERTS, TOPK = 96, 8, 2
REPEATS = 2000


def counted(config: MoEConfig, ep: int) -> tuple[float, float]:
    """Mean number of rows with a token, and of rows of the GEMMs, on the first of `ep` ranks, over random routings.
    Those of the first routings are compared with the rows that a dispatcher sorts."""
    generator, local, capacity = torch.Generator().manual_seed(3), EXPERTS // ep, config.capacity
    ids = torch.rand(REPEATS, ep, TOKENS, EXPERTS, generator=generator).topk(TOPK, dim=-1).indices
    counts = torch.nn.functional.one_hot(ids.flatten(2), EXPERTS).sum(2)[..., :local]
    limit, rows_per_expert = TOKENS, None
    if capacity is not None:
        limit = config.router.expert_capacity(TOKENS, capacity.factor)
        rows_per_expert = limit * ep if capacity.pad else None
    kept = counts.clamp(max=limit).sum(1)
    rows = kept if rows_per_expert is None else torch.full_like(kept, rows_per_expert)
    rows = (rows + config.row_alignment - 1) // config.row_alignment * config.row_alignment
    for which in range(5):
        for rank in range(ep):
            each, probs = ids[which, rank], torch.rand(TOKENS, TOPK, generator=generator)
            within = within_capacity(each, probs, torch.bincount(each.flatten(), minlength=EXPERTS), limit, "probs")
            each.masked_fill_(~within, -1)
        index = sort_rows(ids[which].flatten(0, 1), local, rows_per_expert, config.row_alignment)
        assert int(index.offsets_E[-1]) == int(rows[which].sum())
        assert int((index.choice_R >= 0).sum()) == int(kept[which].sum())
    return float(kept.sum()) / REPEATS, float(rows.sum()) / REPEATS


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {"row_alignment": 16},
        {"row_alignment": 128},
        {"capacity": CapacityConfig(factor=1.0, pad=True)},
        {"capacity": CapacityConfig(factor=1.25, pad=True), "row_alignment": 16},
        {"capacity": CapacityConfig(factor=1.0)},
        {"capacity": CapacityConfig(factor=1.1), "row_alignment": 16},
    ],
    ids=str,
)
def test_expected_rows_equal_counted_rows(changes, ep):
    config = replace(moe_config(), dispatcher="alltoall", **changes)
    rows = config.expected_rows(ParallelConfig(ep=ep, world_size=ep), TOKENS)
    routed, computed = counted(config, ep)
    SIMULATED_ROUTING.check(rows.routed, routed, "rows with a token")
    SIMULATED_ROUTING.check(rows.computed, computed, "computed rows")
    assert rows.allocated >= rows.computed >= rows.routed


def test_every_token_may_select_every_expert():
    config = replace(moe_config(), row_alignment=16, router=replace(moe_config().router, topk=EXPERTS))
    rows = config.expected_rows(ParallelConfig(), TOKENS + 1)
    assert (rows.routed, rows.computed) == (EXPERTS * (TOKENS + 1), EXPERTS * (TOKENS + 16))


def test_buffers_of_symmetric_memory_hold_any_routing():
    parallel = ParallelConfig(ep=4, world_size=4, shares_memory=True)
    config = replace(moe_config(), dispatcher="flex")
    rows = config.expected_rows(parallel, TOKENS)
    assert rows.computed == rows.routed == TOKENS * TOPK
    assert rows.allocated == 4 * TOKENS * min(TOPK, EXPERTS // 4)
    bounded = replace(config, expert_rank_capacity_factor=1.5).expected_rows(parallel, TOKENS)
    assert bounded.allocated == 1.5 * TOKENS * TOPK


def test_hybridep_does_not_compute_rows_without_a_token():
    parallel = ParallelConfig(ep=4, world_size=4)
    config = replace(moe_config(), dispatcher="flex", capacity=CapacityConfig(factor=1.5, pad=True))
    symmetric = config.expected_rows(parallel, TOKENS)
    hybridep = replace(config, transport_backend="hybridep").expected_rows(parallel, TOKENS)
    assert symmetric.computed == symmetric.allocated == hybridep.allocated == 4 * 2 * 36
    assert hybridep.computed == hybridep.routed == symmetric.routed < symmetric.computed
