"""Point-to-point communication between pipeline stages."""

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.p2p import connect, edge_color
from tests.helpers.ranks import on_processes, on_threads


def pass_around(context):
    """Sends two activations to the next rank and two gradients to the previous one, then receives as many."""
    links, group = connect(context), context.group("pp")
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent = []
    for number in range(2):
        value = torch.full((2, 3), 10.0 * group.rank + number, dtype=torch.float64)
        sent.append(links.send("activation", value, following, f"activation {number}"))
        sent.append(links.send("gradient", -value, previous, f"gradient {number}"))
    # Receives are posted in a different order than sends, because the edges of the ring are independent.
    pending = [links.receive("gradient", (2, 3), following, f"gradient {number}") for number in range(2)]
    pending += [links.receive("activation", (2, 3), previous, f"activation {number}") for number in range(2)]
    received = [wait()[1, 2].item() for wait in pending]
    for wait in sent:
        wait()
    return received


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("run", [on_threads, on_processes])
def test_every_edge_of_the_ring_delivers_both_kinds_in_order(run, size):
    results = run(ParallelConfig(world_size=size, pp=size), pass_around)
    for rank, received in enumerate(results):
        following, previous = 10.0 * ((rank + 1) % size), 10.0 * ((rank - 1) % size)
        assert received == [-following, -following - 1, previous, previous + 1]


def test_concurrent_pipelines_do_not_exchange_messages():
    def main(context):
        links, group = connect(context), context.group("pp")
        if group.rank == 0:
            links.send("activation", torch.full((1,), float(context.rank)), 1, "hello")()
            return None
        return links.receive("activation", (1,), 0, "hello")().item()

    assert on_threads(ParallelConfig(world_size=4, pp=2), main) == [None, None, 0.0, 1.0]


@pytest.mark.parametrize("size", range(2, 12))
def test_both_edges_of_a_rank_have_different_colors(size):
    for rank in range(size):
        incoming, outgoing = ((rank - 1) % size, rank), (rank, (rank + 1) % size)
        assert edge_color(incoming, size) != edge_color(outgoing, size)


def test_stages_that_are_not_neighbours_have_no_edge():
    with pytest.raises(AssertionError, match="stages 0 and 2 of 4 are not neighbours"):
        edge_color((0, 2), 4)
