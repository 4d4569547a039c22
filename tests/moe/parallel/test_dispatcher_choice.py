"""Selection of the token dispatcher and its transport, and the row bound and settings of HybridEP."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.moe import CapacityConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.transport import (
    ALLGATHER,
    DEEPEP,
    HIERARCHICAL,
    HYBRIDEP,
    LOCAL,
    NCCL,
    SYMMETRIC,
    ExpertTransport,
    HybridEPConfig,
    libraries,
)
from megatron_moe.memory_emulation.rank import assumed_load, transport_without_peers
from megatron_moe.moe.moe_layer import new_expert_comm
from megatron_moe.moe.token_dispatcher.base import ExpertComm
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.streams import Streams
from megatron_moe.parallel.symmetric_memory import has_peer_access
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import FP64_REF
from tests.moe.parallel.folded import moe_config, parallel
from tests.moe.parallel.test_dispatch_over_ranks import CASES, EXPERTS, REFERENCE, WIDTH, new, there_and_back
from tests.moe.routings import draw, sparse


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("deepep", "the module deep_ep is not installed"),
        ("hybridep", "the module hybrid_ep_cpp is not installed"),
        ("ncclep", "this program has no backend for the library"),
    ],
)
def test_symmetric_memory_replaces_a_missing_library(backend: str, reason: str) -> None:
    config = replace(moe_config(dispatcher="flex"), transport_backend=backend)
    for comm in on_threads(
        parallel(2, ep=2, missing_libraries=libraries()), lambda ctx: new_expert_comm(config, ctx, REFERENCE)
    ):
        assert comm.kind is SYMMETRIC and comm.note
        assert comm.note.startswith(f"--moe-flex-dispatcher-backend {backend}: {reason}")
    alone = new_expert_comm(config, ParallelContext.single(), REFERENCE)
    assert alone.kind is LOCAL and alone.note is None


@pytest.mark.parametrize(("backend", "kind"), [("deepep", DEEPEP), ("hybridep", HYBRIDEP)])
def test_installed_library_is_used(backend: str, kind: ExpertTransport) -> None:
    config = replace(moe_config(dispatcher="flex"), transport_backend=backend)
    comms = on_threads(parallel(2, ep=2), lambda ctx: new_expert_comm(config, ctx, REFERENCE))
    assert [(comm.kind, comm.note) for comm in comms] == [(kind, None)] * 2
    emulated = ParallelContext.fake(parallel(2, ep=2), 0)
    stand_in = partial(transport_without_peers, assumed_load(emulated))
    assert new_expert_comm(config, emulated, REFERENCE, stand_in=stand_in).kind is SYMMETRIC
    emulated.stop()


def test_alltoall_uses_symmetric_memory_among_the_gpus_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    config = moe_config(dispatcher="alltoall")
    folds = [ParallelConfig(world_size=24, ep=ep, ranks_per_host=8, shares_memory=True) for ep in (1, 2, 3, 8, 24)]
    assert [config.transport(fold) for fold in folds] == [LOCAL, SYMMETRIC, HIERARCHICAL, SYMMETRIC, HIERARCHICAL]
    on_cpus = [config.transport(replace(fold, shares_memory=False)) for fold in folds]
    assert on_cpus == [LOCAL, NCCL, HIERARCHICAL, NCCL, HIERARCHICAL]
    plain = replace(config, transport_backend="nccl")
    assert [plain.transport(fold) for fold in folds] == [LOCAL, *[NCCL] * 4]
    assert replace(config, dispatcher="allgather").transport(folds[2]) is ALLGATHER
    library = replace(config, dispatcher="flex", transport_backend="hybridep")
    assert [library.transport(fold) for fold in folds] == [LOCAL, *[HYBRIDEP] * 4]
    absent = [library.transport(replace(fold, missing_libraries=libraries())) for fold in folds]
    assert absent == [config.transport(fold) for fold in folds]
    library = replace(config, dispatcher="flex", transport_backend="deepep")
    assert [library.transport(fold) for fold in folds] == [LOCAL, DEEPEP, HIERARCHICAL, DEEPEP, HIERARCHICAL]
    padded = replace(library, capacity=CapacityConfig(factor=1.0, pad=True))
    assert [padded.transport(fold) for fold in folds] == [LOCAL, SYMMETRIC, HIERARCHICAL, SYMMETRIC, HIERARCHICAL]

    def kind_and_note(ctx: ParallelContext, **named: Any) -> tuple[ExpertTransport, str | None]:
        comm = new_expert_comm(config, ctx, REFERENCE, **named)
        return comm.kind, comm.note

    fold = parallel(2, ep=2, shares_memory=True)
    assert on_threads(fold, kind_and_note) == [(NCCL, None)] * 2  # only GPUs use symmetric memory
    emulated = ParallelContext.fake(fold, 0)
    kind, note = kind_and_note(emulated, stand_in=lambda transport, config: transport)
    assert kind is SYMMETRIC and note == (
        "--moe-token-dispatcher-type alltoall: 2 expert ranks on one host exchange tokens through symmetric memory; "
        "--moe-alltoall-backend nccl selects NCCL"
    )
    monkeypatch.setattr("megatron_moe.moe.moe_layer.has_peer_access", lambda group, ctx: False)
    kind, note = kind_and_note(emulated, stand_in=lambda transport, config: transport)
    assert kind is NCCL and note is not None and note.endswith("cannot access each other's memory")
    emulated.stop()


def test_peer_access_includes_every_two_gpus_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 4 and 6 use GPUs 0 and 2, which are connected; ranks 4 and 5 use GPUs 0 and 1, which are not."""
    connected = {(0, 2), (2, 0)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in connected)
    monkeypatch.setattr("megatron_moe.parallel.symmetric_memory.is_emulated", lambda group, ctx: False)
    ctx = SimpleNamespace(process=SimpleNamespace(local_world_size=4), device=torch.device("cuda"))
    assert has_peer_access(SimpleNamespace(ranks=(4, 6)), ctx)
    assert not has_peer_access(SimpleNamespace(ranks=(4, 5)), ctx)
    # With one visible GPU per process, peer access cannot be queried and is assumed.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert has_peer_access(SimpleNamespace(ranks=(4, 5)), ctx)


def test_symmetric_memory_for_alltoall_equals_alltoall_in_fp64() -> None:
    """Symmetric memory adds the partial sums in rank order in at least fp32, so results differ only in rounding."""

    def rank(ctx: ParallelContext, kind: Any) -> tuple[Tensor, ...]:
        ids = CASES["some dropped"](ctx.rank)
        tokens = draw(len(ids), WIDTH, seed=ctx.rank).requires_grad_()
        routing = sparse(ids, num_experts=EXPERTS)
        routing.probs.requires_grad_()
        _, back = there_and_back(new(kind, ctx), tokens, routing, 0.5)
        back.backward(draw(len(ids), WIDTH, seed=10 + ctx.rank))
        return back.detach(), tokens.grad, routing.probs.grad

    fold = parallel(4, etp=2, ep=2)
    expected = on_threads(fold, lambda ctx: rank(ctx, NCCL))
    for actual, other in zip(on_threads(fold, lambda ctx: rank(ctx, SYMMETRIC)), expected, strict=True):
        for name, *values in zip(("outputs", "gradients", "gradients of probabilities"), actual, other, strict=True):
            FP64_REF.check(*values, name)


@pytest.mark.parametrize(("num_rows", "overflow"), [(12, 0), (13, 1), (24, 12)])
def test_hybridep_counts_the_rows_beyond_its_bound(num_rows: int, overflow: int) -> None:
    """Rank 0 sends `num_rows` tokens to the last expert, whose rank has a buffer for 12 rows."""

    def rank(ctx: ParallelContext) -> tuple[int, float]:
        comm = ExpertComm(ctx, REFERENCE, HYBRIDEP, EXPERTS, row_capacity_factor=0.25)
        dispatcher = comm.new_dispatcher()
        ids = [[EXPERTS - 1, -1] if ctx.rank == 0 and token < num_rows else [-1, -1] for token in range(24)]
        routing = sparse(ids, num_experts=EXPERTS)
        rows, _ = dispatcher.finish_dispatch(dispatcher.start_dispatch(draw(24, WIDTH), routing))
        assert rows.bound == 12 and rows.offsets_e[-1] == (min(num_rows, 12) if ctx.rank == 1 else 0)
        assert not rows.data[rows.offsets_e[-1] :].any() and not rows.probs_R[rows.offsets_e[-1] :].any()
        comm.record_overflow(rows)
        missing = int(rows.overflow)
        comm.raise_row_bound(float(comm.overflow))
        with comm.without_row_bound():
            rows, _ = dispatcher.finish_dispatch(dispatcher.start_dispatch(draw(24, WIDTH), routing))
        assert rows.bound == 2 * 24 * 2 and int(rows.overflow) == 0
        return missing, comm.row_capacity_factor

    (first, _), (second, factor) = on_threads(parallel(2, ep=2), rank)
    assert (first, second) == (0, overflow)
    assert factor * 24 * 2 >= num_rows


def test_hybridep_uses_only_the_current_stream_during_a_capture() -> None:
    class Capturing(Streams):
        def fork(self, name: str) -> Any:
            raise AssertionError("a side stream during a capture")

        def none_while_capturing(self) -> Streams:
            return Streams()

    def rank(ctx: ParallelContext) -> None:
        comm = ExpertComm(ctx, REFERENCE, HYBRIDEP, EXPERTS)
        comm.transport._side_streams = Capturing()
        tokens, routing = draw(4, WIDTH).requires_grad_(), sparse([[0, EXPERTS - 1]] * 4, num_experts=EXPERTS)
        there_and_back(comm.new_dispatcher(), tokens, routing, 1.0)[1].sum().backward()
        FP64_REF.check(tokens.grad, torch.ones_like(tokens), "gradient of tokens")

    on_threads(parallel(2, ep=2), rank)


def test_hybridep_gets_its_settings_once_per_run() -> None:
    settings = HybridEPConfig(
        num_sms=16, fuse_permute=True, num_blocks_permute=7, num_blocks_unpermute=9, num_sms_preprocessing=64
    )
    config = replace(moe_config(dispatcher="flex"), transport_backend="hybridep", hybridep=settings)

    def rank(ctx: ParallelContext) -> tuple[Any, bool]:
        comm = new_expert_comm(config, ctx, REFERENCE)
        buffers = []
        for dispatcher in (comm.new_dispatcher(), comm.new_dispatcher()):
            there_and_back(dispatcher, draw(4, WIDTH), sparse(CASES["spread"](0), num_experts=EXPERTS), 1.0)
            buffers.append(comm.transport._buffer)
        return buffers[0], buffers[0] is buffers[1]

    for buffer, is_shared in on_threads(parallel(2, ep=2), rank):
        assert is_shared and buffer.fused == [True] * 4
        assert buffer.settings == {
            "num_sms_dispatch_api": 16,
            "num_sms_combine_api": 16,
            "num_sms_preprocessing_api": 64,
            "num_blocks_permute": 7,
            "num_blocks_unpermute": 9,
        }
