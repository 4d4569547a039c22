"""Collectives through symmetric memory between CPU ranks: values, order of sums, flags, late ranks."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.tp_overlap import symmetric_bytes
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel import sequence_shards
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sequence_shards import PeerShards, SequenceCollectives, new_peer_shards, no_overlap_note
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

SHAPES = ((3, 2, 4), (5, 1, 8), (0, 2, 4), (1, 7))
"""Shapes of the shards of successive collectives."""


def new_peers(context: ParallelContext, slot_bytes: int = 1024) -> PeerShards:
    context.timeout_s = min(context.timeout_s, 30.0)
    return PeerShards(slot_bytes, context, reference.sum_contributions_)


def partial_of(rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values whose sum over ranks depends on the order."""
    draw = torch.Generator().manual_seed(100 * rank + shape[0])
    whole = torch.randn(size * shape[0], *shape[1:], generator=draw, dtype=torch.float64)
    return (whole * 10.0 ** (2 * rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_shards_are_gathered_and_summed_in_rank_order(size: int, dtype: torch.dtype) -> None:
    def rank_main(context: ParallelContext) -> None:
        peers, rank = new_peers(context), context.rank
        for shape in (*SHAPES, *SHAPES):
            partials = [partial_of(each, size, shape, dtype) for each in range(size)]
            shards = [each[: shape[0]].contiguous() for each in partials]
            gathered = peers.start_gather(shards[rank])
            scatter = peers.start_scatter(size * shape[0], lambda rows: partials[rank][rows])  # noqa: B023
            EXACT.check(gathered.wait(), torch.cat(shards))
            wide = torch.promote_types(torch.float32, dtype)
            first, *others = (each.chunk(size)[rank] if shape[0] else each for each in partials)
            EXACT.check(scatter(), sum((each.to(wide) for each in others), start=first.to(wide)).to(dtype))

    on_threads(ParallelConfig(world_size=size, tp=size), rank_main)


def test_own_rows_are_multiplied_first_and_computed_last() -> None:
    """Copies run while a rank computes what no other rank waits for."""

    def rank_main(context: ParallelContext) -> tuple[list[slice], list[slice]]:
        peers, computed = new_peers(context), list[slice]()

        def compute(rows: slice) -> Tensor:
            computed.append(rows)
            return torch.zeros(2, 4)

        gathered = peers.start_gather(torch.zeros(2, 4), fills_own_rows=False)
        seen = [rows for rows, _ in gathered.parts]
        peers.start_scatter(6, compute)()
        return seen, computed

    parts = [slice(0, 2), slice(2, 4), slice(4, 6)]
    for rank, (seen, computed) in enumerate(on_threads(ParallelConfig(world_size=3, tp=3), rank_main)):
        order = parts[rank:] + parts[:rank]
        assert seen == order
        assert computed == [*order[1:], order[0]]


def test_flags_have_the_same_values_after_every_sequence() -> None:
    """A CUDA graph that captured a sequence can therefore be replayed at any time."""

    def rank_main(context: ParallelContext) -> list[Tensor]:
        peers, flags = new_peers(context), []
        barrier = SequenceCollectives(context.group("tp")).start_gather
        for number in range(3):
            for _ in range(number):
                peers.start_gather(torch.zeros(2, 4)).wait()
                peers.start_scatter(4, lambda rows: torch.zeros(2, 4))()
            barrier(torch.zeros(1))
            flags.append(peers.memory[2 * 1024 :].view(torch.int32).clone())
            barrier(torch.zeros(1))
        return flags

    for flags in on_threads(ParallelConfig(world_size=2, tp=2), rank_main):
        EXACT.check(flags[1], flags[0])
        EXACT.check(flags[2], flags[0])
        assert flags[0].sum() == 2 * 2, "both buffers are free for both ranks"


def test_buffers_are_not_reused_before_a_slow_rank_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 reads 50 ms after the other rank has written; rank 0 starts the next collective in the meantime."""

    def slowly(call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **named: Any) -> None:
            time.sleep(0.05)
            call(*args, **named)

        return run

    def rank_main(context: ParallelContext) -> None:
        peers, rank = new_peers(context), context.rank
        if rank == 1:
            monkeypatch.setattr(peers, "_sum_contributions_", slowly(reference.sum_contributions_))
            monkeypatch.setattr(peers._flags, "set", slowly(peers._flags.set))  # after each wait
        for step in range(3):
            gathered = peers.start_gather(torch.full((2, 4), 10.0 * step + rank))
            EXACT.check(gathered.wait()[::2, 0], torch.tensor([10.0 * step, 10.0 * step + 1]))
        for step in range(3):
            total = peers.start_scatter(4, lambda rows: torch.full((2, 4), float(step)))()  # noqa: B023
            EXACT.check(total, torch.full((2, 4), 2.0 * step))

    on_threads(ParallelConfig(world_size=2, tp=2), rank_main)


def test_a_late_rank_is_named() -> None:
    def rank_main(context: ParallelContext) -> str:
        context.timeout_s = 0.2
        peers = new_peers(context)
        if context.rank == 1:
            return ""
        with pytest.raises(RuntimeError) as problem:
            peers.start_gather(torch.zeros(2, 4))
        return str(problem.value)

    found, _ = on_threads(ParallelConfig(world_size=2, tp=2), rank_main)
    assert found == "rank 1 did not exchange its shards of a sequence within 0.2 s"


def test_a_shard_that_exceeds_its_buffer_is_an_error_with_both_sizes() -> None:
    def rank_main(context: ParallelContext) -> None:
        peers = new_peers(context)
        assert peers.memory.nbytes == symmetric_bytes(1024, 2) == 2 * (1024 + 4 * 128)
        with pytest.raises(AssertionError, match="a tensor of 1056 bytes exceeds its buffer of 1024 bytes"):
            peers.start_gather(torch.zeros(33, 4, dtype=torch.float64))

    on_threads(ParallelConfig(world_size=2, tp=2), rank_main)


def test_gpus_without_peer_access_use_collectives_and_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "GPUs of this host cannot access each other's memory"
    monkeypatch.setattr(sequence_shards, "sharing_problem", lambda group, context: reason)
    overlap = ParallelConfig(world_size=2, tp=2, sequence_parallel=True, tp_comm_overlap=("qkv_fprop",))

    def rank_main(context: ParallelContext) -> None:
        assert new_peer_shards(context, 1024, reference.sum_contributions_) is None
        assert no_overlap_note(context) == f"--tp-comm-overlap has no effect: {reason}"

    on_threads(overlap, rank_main)
