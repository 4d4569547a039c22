"""Placements computed in constant time equal those found by enumerating ranks."""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from time import process_time

import pytest

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.cost_model.hardware import GPU, GPUS
from megatron_moe.cost_model.placement import Placement, Placements
from megatron_moe.parallel.grid import Grid, all_groups

H100, GB200 = GPUS["h100"], GPUS["gb200"]


def counted(groups: Sequence[Sequence[int]], gpu: GPU, world_size: int) -> Placement:
    """Placement found by enumerating groups."""
    domain_ranks, size = gpu.domain_ranks(world_size), len(groups[0])
    nodes = [len({rank // gpu.per_node for rank in group}) for group in groups]
    domains = [Counter(rank // domain_ranks for rank in group) for group in groups]
    pairs = sum(count * (count - 1) for found in domains for count in found.values())
    near = pairs / (world_size * (size - 1)) if size > 1 else 1.0
    lengths = [len(found) for found in domains]
    return Placement(
        size=size, node_span=(min(nodes), max(nodes)), domain_span=(min(lengths), max(lengths)), share_in_domain=near
    )


@pytest.mark.parametrize("gpu", [H100, GB200], ids=lambda gpu: gpu.kind)
@pytest.mark.parametrize(
    "sizes", [(2, 4, 16), (3, 5, 7), (6, 1, 20), (10, 3, 12), (9, 8, 2), (1, 72, 1), (5, 100, 3), (12, 2, 18)]
)
def test_placements_equal_those_of_enumerated_ranks(gpu, sizes):
    for order in set(permutations(sizes)):
        grid = Grid(tuple(zip("abc", order, strict=True)))
        for members in ("a", "b", "c", "ab", "ac", "bc", "abc"):
            expected = counted(grid.groups(members), gpu, grid.world_size)
            assert Placements(gpu).placement_of(grid, members) == expected, (order, members)


def test_groups_of_a_layout_are_placed_on_nodes_and_racks():
    config = ParallelConfig(tp=2, pp=4, ep=64, world_size=256, sequence_parallel=True)
    on_h100, on_gb200 = Placements(H100).placements_of_groups(config), Placements(GB200).placements_of_groups(config)
    groups = all_groups(config)
    assert on_h100 == {name: counted(groups[name], H100, 256) for name in on_h100}
    assert str(on_h100["tp"]) == str(on_gb200["tp"]) == "inside a node"
    assert str(on_h100["ep"]) == "over 8 NVLink domains, 8 nodes"
    assert str(on_gb200["ep"]) == "inside an NVLink domain, 16 nodes"
    assert str(on_gb200["pp"]) == "over 4 NVLink domains, 4 nodes"
    assert on_h100["ep"].share_in_domain == pytest.approx(7 / 63)


def test_a_hundred_million_ranks_take_less_than_a_second():
    config = ParallelConfig(tp=2, pp=4, ep=64, world_size=10**8 - 10**8 % 512, sequence_parallel=True)
    started = process_time()
    found = Placements(GB200).placements_of_groups(config)
    assert process_time() - started < 1
    assert found["dp"].size * 8 == config.world_size
