"""Ring through symmetric memory between CPU ranks: values, flags, late ranks, choice of the ring."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.context_ring import RingBuffers
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel import peer_ring
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import Ring, pack_keys_values
from megatron_moe.parallel.peer_ring import NO_PEERS, ContextPeers, PeerRing, new_context_peers, no_copies_note
from megatron_moe.parallel.sequence_shards import PeerShards
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

BUFFERS = RingBuffers(keys_values=1024, gradients=2048)
CALLS = ((3, torch.float64), (5, torch.bfloat16), (0, torch.float32), (5, torch.bfloat16), (2, torch.float32))
"""Rows per rank and dtype of successive calls."""


def new_ring(context: ParallelContext, timeout_s: float = 30.0) -> PeerRing:
    context.timeout_s = timeout_s
    return PeerRing(BUFFERS, context)


def over(size: int) -> ParallelConfig:
    return ParallelConfig(world_size=size, cp=size)


def keys_values(rows: int, dtype: torch.dtype, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + rows)
    return torch.randn(rows, 1, 2, 5, generator=draw).to(dtype), torch.randn(rows, 1, 2, 3, generator=draw).to(dtype)


def around(ring: Ring, k: Tensor, v: Tensor) -> list[Any]:
    """All keys and values in the order of the ring, and a sum that is sent around it as attention sends gradients."""
    seen, landing = [], None
    for source, (k_held, v_held) in ring.circulate(k, v):
        seen.append((source, k_held.clone(), v_held.clone()))
        if source != ring.rank:
            total = pack_keys_values(k_held, v_held).to(torch.promote_types(torch.float32, k.dtype)) * (ring.rank + 1)
            if landing is not None:
                total += landing()
            landing = ring.send_to_next(total)
    assert landing is not None
    return [*seen, landing().clone()]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_values_and_order_are_those_of_the_ring_of_collectives(size: int) -> None:
    def rank_main(context: ParallelContext) -> None:
        copies, collectives = new_ring(context), Ring(context.group("cp"))
        for rows, dtype in CALLS:
            inputs = keys_values(rows, dtype, context.rank)
            *actual, total = around(copies, *inputs)
            *expected, expected_total = around(collectives, *inputs)
            for (source, *tensors), (expected_source, *expected_tensors) in zip(actual, expected, strict=True):
                assert source == expected_source
                for pair in zip(tensors, expected_tensors, strict=True):
                    EXACT.check(*pair)
            EXACT.check(total, expected_total)

    on_threads(over(size), rank_main)


def test_flags_have_the_same_values_after_every_sequence() -> None:
    """A CUDA graph that captured a sequence can therefore be replayed at any time."""

    def rank_main(context: ParallelContext) -> list[Tensor]:
        ring, flags = new_ring(context), []
        for number in range(3):
            for _ in range(number):
                around(ring, *keys_values(3, torch.float32, context.rank))
            gather_objects(None, context.group("cp"))  # barrier
            flags.append(ring.memory[sum(BUFFERS) :].view(torch.int32).clone())
            gather_objects(None, context.group("cp"))
        return flags

    for flags in on_threads(over(3), rank_main):
        EXACT.check(flags[1], flags[0])
        EXACT.check(flags[2], flags[0])
        assert flags[0].sum() == 3, "all ranks have copied the keys"


def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        time.sleep(0.03)
        return call(*args)

    return run


@pytest.mark.parametrize("late", [0, 1])
def test_no_rank_reads_or_writes_a_buffer_too_early(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late rank begins each call, copies keys and reads gradients after the other rank; the calls differ in value."""

    def rank_main(context: ParallelContext) -> None:
        ring, rank = new_ring(context), context.rank
        if rank == late:
            monkeypatch.setattr(ring._flags, "take", slowly(ring._flags.take))
        for step in range(3):
            if rank == late:
                time.sleep(0.03)
            mine, other = (torch.full((2, 1, 1, 4), 10.0 * step + each) for each in (rank, 1 - rank))
            (_, (own, _)), (_, (k, v)) = ring.circulate(mine, mine)
            EXACT.check(own, mine)
            EXACT.check(pack_keys_values(k, v), pack_keys_values(other, other))
        for step in range(3):
            if rank == late:
                time.sleep(0.03)
            landing = ring.send_to_next(torch.full((2, 1, 1, 4), 10.0 * step + rank))()
            if rank == late:
                time.sleep(0.06)  # meanwhile, the other rank starts its next call
            EXACT.check(landing, torch.full((2, 1, 1, 4), 10.0 * step + 1 - rank))

    on_threads(over(2), rank_main)


def test_a_late_rank_is_named() -> None:
    def rank_main(context: ParallelContext) -> str:
        ring = new_ring(context, timeout_s=0.2)
        if context.rank == 1:
            return ""
        with pytest.raises(RuntimeError) as problem:
            list(ring.circulate(*keys_values(2, torch.float32, 0)))
        return str(problem.value)

    found, _ = on_threads(over(2), rank_main)
    assert found == "rank 1 did not exchange its keys and values within 0.2 s"


def test_keys_that_exceed_their_buffer_are_an_error_with_both_sizes() -> None:
    def rank_main(context: ParallelContext) -> None:
        ring = new_ring(context)
        assert ring.memory.nbytes == BUFFERS.total(2) == 1024 + 2048 + 2 * 4 * 128
        with pytest.raises(AssertionError, match="a tensor of 1088 bytes exceeds its buffer of 1024 bytes"):
            list(ring.circulate(*keys_values(17, torch.float32, 0)))

    on_threads(over(2), rank_main)


def test_only_gpus_of_one_host_with_peer_access_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_main(context: ParallelContext) -> None:
        def created(buffers: RingBuffers | None, shard_bytes: int) -> ContextPeers:
            return new_context_peers(context, buffers, shard_bytes, reference.sum_contributions_)

        assert created(BUFFERS, 512) == NO_PEERS, "CPU ranks"
        context.device = torch.device("meta")  # as in memory emulation
        assert created(None, 0) == NO_PEERS
        assert list(map(type, created(BUFFERS, 512))) == [PeerRing, PeerShards]
        assert [each is None for each in created(BUFFERS, 0)] == [False, True]
        context.config = replace(over(2), shares_memory=True)
        assert no_copies_note(context) == ""
        reason = "GPUs of this host cannot access each other's memory"
        monkeypatch.setattr(peer_ring, "sharing_problem", lambda *_: reason)
        assert created(BUFFERS, 512) == NO_PEERS
        assert no_copies_note(context) == f"context-parallel ranks exchange keys and values by NCCL: {reason}"

    on_threads(over(1), rank_main)
    host = ParallelConfig(cp=4, tp=2, world_size=16, ranks_per_host=8, shares_memory=True)
    assert host.shares_keys_values
    others = {"cp": 1}, {"tp": 4}, {"ranks_per_host": 4}, {"shares_memory": False}, {"max_seqlen_per_dp_cp_rank": 8}
    assert not any(replace(host, **changes).shares_keys_values for changes in others)
