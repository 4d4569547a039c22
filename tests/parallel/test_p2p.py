"""Messages between the stages of a pipeline."""

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.mailbox import Letter, Mailbox
from megatron_moe.parallel.p2p import connect, edge_colour, ring
from tests.helpers.ranks import on_processes, on_threads


def pass_around(context):
    """Every rank sends two activations to the next and two gradients to the previous one, then reads its own."""
    links, group = connect(context), context.group("pp")
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent = []
    for number in range(2):
        value = torch.full((2, 3), 10.0 * group.rank + number, dtype=torch.float64)
        sent.append(links.send("activation", value, following, f"activation {number}"))
        sent.append(links.send("gradient", -value, previous, f"gradient {number}"))
    # asked for in another order than sent: edges do not wait for each other
    coming = [links.receive("gradient", (2, 3), following, f"gradient {number}") for number in range(2)]
    coming += [links.receive("activation", (2, 3), previous, f"activation {number}") for number in range(2)]
    received = [wait()[1, 2].item() for wait in coming]
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


def test_pipelines_beside_each_other_do_not_mix():
    def main(context):
        links, group = connect(context), context.group("pp")
        if group.rank == 0:
            links.send("activation", torch.full((1,), float(context.rank)), 1, "hello")()
            return None
        return links.receive("activation", (1,), 0, "hello")().item()

    assert on_threads(ParallelConfig(world_size=4, pp=2), main) == [None, None, 0.0, 1.0]


def test_a_message_out_of_order_is_noticed():
    def main(context):
        links = connect(context)
        if context.rank == 0:
            for label in ("F1", "F0"):
                links.send("activation", torch.zeros(1), 1, label)
        else:
            links.receive("activation", (1,), 0, "F0")()

    with pytest.raises(AssertionError, match="F1 came where F0 was expected"):
        on_threads(ParallelConfig(world_size=2, pp=2), main)


def test_a_message_that_nobody_reads_is_noticed():
    def main(context):
        if context.rank == 0:
            connect(context).send("activation", torch.zeros(1), 1, "F0")

    with pytest.raises(AssertionError, match="never received.*F0"):
        on_threads(ParallelConfig(world_size=2, pp=2), main)


def test_a_message_that_never_comes_does_not_hang():
    with pytest.raises(AssertionError, match="no F0 came"):
        Mailbox(patience=0.05).take((0, 1, "activation"), "F0")


def test_who_waits_for_a_failed_rank_is_told():
    mailbox = Mailbox()
    mailbox.post((0, 1, "activation"), Letter("F0", torch.zeros(1)))
    mailbox.close()
    mailbox.take((0, 1, "activation"), "F0")
    with pytest.raises(AssertionError, match="no F1 came"):
        mailbox.take((0, 1, "activation"), "F1")


@pytest.mark.parametrize("size", range(2, 12))
def test_both_edges_of_a_rank_have_different_colours(size):
    for rank in range(size):
        incoming, outgoing = ((rank - 1) % size, rank), (rank, (rank + 1) % size)
        assert {incoming, outgoing} <= set(ring(size))
        assert edge_colour(incoming, size) != edge_colour(outgoing, size)


def test_stages_that_are_not_neighbours_have_no_edge():
    with pytest.raises(AssertionError, match="stages 0 and 2 of 4 are not neighbours"):
        edge_colour((0, 2), 4)
