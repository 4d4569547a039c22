"""Pushes between ranks: interpreted Triton kernels against the reference, with all ranks in one process."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.precision import OperandFormat, low_precision_config
from megatron_moe.kernels.backends.triton import backend as triton
from megatron_moe.kernels.backends.triton import push
from megatron_moe.kernels.ops import RowIndex
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.push_channel import ChannelShape, PushChannel, new_channel
from tests.helpers.tolerances import EXACT

EXPERTS = 8


def channels(
    num_ranks: int, num_tokens: int, width: int, topk: int, timeout_s: float = 5.0, fmt: OperandFormat | None = None
) -> list[PushChannel]:
    """Views of one channel, one per rank."""
    sizes = {"num_ranks": num_ranks, "num_tokens": num_tokens, "width": width, "topk": topk}
    shape = ChannelShape(**sizes, dtype=torch.float32, fmt=fmt)
    parts: list[Tensor] = []

    def allocate(num_bytes: int) -> tuple[Tensor, ...]:
        if not parts:
            parts.extend(torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(num_ranks))
        return tuple(parts)

    return [new_channel(shape, rank, allocate, timeout_s, num_programs=3) for rank in range(num_ranks)]


def owners(num_ranks: int) -> Tensor:
    return torch.eye(num_ranks, dtype=torch.bool).repeat_interleave(EXPERTS // num_ranks, dim=0)


def random_ids(num_tokens: int, topk: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:topk] for _ in range(num_tokens)])
    return ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.2, -1)


def round_trip(
    kernels: Any, num_ranks: int, num_tokens: int, width: int, topk: int, *, is_summed: bool = False
) -> list[Tensor]:
    """Runs two dispatch and combine exchanges on the same channels; expert e multiplies its rows by e + 1."""
    there, back = (channels(num_ranks, num_tokens, width, topk) for _ in range(2))
    owner_EP, num_local, found = owners(num_ranks), EXPERTS // num_ranks, []
    for epoch in range(2):
        draw = [torch.Generator().manual_seed(10 * epoch + rank) for rank in range(num_ranks)]
        ids = [random_ids(num_tokens, topk, 10 * epoch + rank) for rank in range(num_ranks)]
        tokens = [torch.randn(num_tokens, width, generator=draw[rank]) for rank in range(num_ranks)]
        probs = [torch.rand(num_tokens, topk, generator=draw[rank]) for rank in range(num_ranks)]
        for rank in range(num_ranks):
            ranks = kernels.mark_ranks(ids[rank], owner_EP)
            kernels.push_tokens(tokens[rank], ranks, (ids[rank], probs[rank]), there[rank])
        for rank in range(num_ranks):
            kernels.wait_for_peers(there[rank])
            first = rank * num_local
            local = there[rank].received_ids.long() - first
            local = local.masked_fill((local < 0) | (local >= num_local), -1)
            index: RowIndex = reference.sort_rows(local, num_local, None)
            rows = reference.permute(there[rank].received, index)
            values = there[rank].received_probs.clone()
            kernels.acknowledge(there[rank])
            found += [rows, values]
            if is_summed:
                rows = kernels.unpermute(rows, index, num_ranks * num_tokens)
            kernels.push_sums(rows, index, values, back[rank], is_summed=is_summed)
        for rank in range(num_ranks):
            kernels.wait_for_peers(back[rank])
            found += kernels.sum_partials(ids[rank], owner_EP, back[rank], with_values=True)
            kernels.acknowledge(back[rank])
            copies = (ids[rank] >= 0).sum(dim=1, keepdim=True)
            torch.testing.assert_close(found[-2], tokens[rank] * copies)
            EXACT.check(found[-1], probs[rank].masked_fill(ids[rank] < 0, 0))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "width", "topk"), [(2, 5, 16, 2), (4, 9, 24, 3), (4, 1, 8, 1), (1, 3, 8, 2)]
)
@pytest.mark.parametrize("is_summed", [False, True])
def test_triton_pushes_what_the_reference_pushes(
    num_ranks: int, num_tokens: int, width: int, topk: int, is_summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "COLUMNS", 16)
    expected = round_trip(reference, num_ranks, num_tokens, width, topk)
    actual = round_trip(triton, num_ranks, num_tokens, width, topk, is_summed=is_summed)
    for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
        EXACT.check(a, e, f"tensor {number}")


@pytest.mark.parametrize(("num_ranks", "num_tokens", "width"), [(2, 5, 264), (4, 9, 300), (3, 1, 130), (1, 3, 33)])
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_pushed_bytes_are_those_of_quantised_tokens(
    num_ranks: int, num_tokens: int, width: int, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two exchanges; slots of ranks that do not need a token keep their content."""
    monkeypatch.setattr(push, "COLUMNS", 16)
    fmt, owner_EP, received = low_precision_config(recipe).inputs, owners(num_ranks), []
    for kernels in (reference, triton):
        both = channels(num_ranks, num_tokens, width, 2, fmt=fmt)
        for epoch in range(2):
            for rank, channel in enumerate(both):
                draw = torch.Generator().manual_seed(10 * epoch + rank)
                tokens = torch.randn(num_tokens, width, generator=draw)
                tokens_q = reference.quantize_rows(tokens, fmt, rowwise=True, columnwise=False)
                wide = torch.cat([tokens_q.row_copy.scales] * 2, dim=1)[:, :num_tokens]  # padded, as of other backends
                tokens_q = replace(tokens_q, rowwise=tokens_q.row_copy._replace(scales=wide))
                ids = random_ids(num_tokens, 2, 10 * epoch + rank)
                ranks_T = kernels.mark_ranks(ids, owner_EP)
                kernels.push_tokens(tokens_q, ranks_T, None if epoch else (ids, tokens[:, :2]), channel)
                for peer, other in enumerate(both if epoch == 0 else ()):
                    needed = (ranks_T >> peer & 1).bool()
                    rows = slice(rank * num_tokens, (rank + 1) * num_tokens)
                    data, scales, _ = other.received.row_copy
                    EXACT.check(data[rows][needed].view(torch.uint8), tokens_q.row_copy.data[needed].view(torch.uint8))
                    EXACT.check(scales.T[rows][needed], tokens_q.row_copy.scales.T[needed], "scales")
            for channel in both:
                kernels.wait_for_peers(channel)
                assert channel.late_rank_flag == 0
                data, scales, _ = channel.received.row_copy
                received += [data.view(torch.uint8).clone(), scales.clone(), channel.received_ids.clone()]
                kernels.acknowledge(channel)
    for actual, expected in zip(received[len(received) // 2 :], received[: len(received) // 2], strict=True):
        EXACT.check(actual, expected)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_does_not_arrive_is_reported_after_the_timeout(late: int) -> None:
    both = channels(2, 3, 8, 1, timeout_s=0.05)
    ids, tokens = random_ids(3, 1, 0), torch.randn(3, 8)
    here = both[1 - late]
    reference.push_tokens(tokens, reference.mark_ranks(ids, owners(2)), None, here)
    assert here.late_rank_flag == 0
    reference.wait_for_peers(here)
    assert here.late_rank_flag == late + 1


@pytest.mark.parametrize("push", ["push_tokens", "push_sums"])
def test_slots_are_not_overwritten_before_they_are_acknowledged(push: str) -> None:
    both = channels(2, 3, 8, 1, timeout_s=0.05)
    ids, tokens = torch.zeros(3, 1, dtype=torch.int64), torch.randn(3, 8)
    index = reference.sort_rows(torch.zeros(6, 1, dtype=torch.int64), 1, None)
    pushes: dict[str, Callable[[PushChannel], None]] = {
        "push_tokens": lambda channel: reference.push_tokens(
            tokens, reference.mark_ranks(ids, owners(2)), None, channel
        ),
        "push_sums": lambda channel: reference.push_sums(torch.randn(6, 8), index, None, channel),
    }
    pushes[push](both[0])
    pushes[push](both[1])
    assert both[0].late_rank_flag == 0
    reference.acknowledge(both[0])
    pushes[push](both[0])
    assert both[0].late_rank_flag == 2, "rank 1 has not acknowledged the first exchange"


def value_of(rank: int, epoch: int) -> float:
    return 100.0 * epoch + rank


def run_rank(channel: PushChannel, num_epochs: int, pause: Callable[[], None]) -> None:
    """Exchanges on one rank; every received token must be that of the current epoch. Slots are overwritten with nan
    after they are read, so that a token that arrives too early or too late is detected."""
    ranks_T = torch.full((channel.shape.num_tokens,), 2**channel.shape.num_ranks - 1, dtype=torch.int32)
    for epoch in range(1, num_epochs + 1):
        pause()
        tokens = torch.full((channel.shape.num_tokens, channel.shape.width), value_of(channel.rank, epoch))
        reference.push_tokens(tokens, ranks_T, None, channel)
        pause()
        reference.wait_for_peers(channel)
        for rank, slots in enumerate(channel.tokens[channel.rank]):
            assert (slots == value_of(rank, epoch)).all(), f"epoch {epoch}: rank {channel.rank} read {slots}"
        channel.received.fill_(torch.nan)
        pause()
        reference.acknowledge(channel)
        assert channel.late_rank_flag == 0


@pytest.mark.parametrize("num_epochs", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_slots_hold_the_tokens_of_their_epoch_under_random_delays(num_epochs: int) -> None:
    errors: list[BaseException] = []

    def rank_main(channel: PushChannel) -> None:
        draw = random.Random(channel.rank)
        try:
            run_rank(channel, num_epochs, lambda: time.sleep(draw.choice((0, 0, 0, 1e-4, 5e-4))))
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [Thread(target=rank_main, args=(channel,)) for channel in channels(3, 2, 4, 1, timeout_s=60.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_interleaving_of_the_ranks_loses_a_token_or_deadlocks(num_ranks: int) -> None:
    """Explores every order of the steps (push, wait and read, acknowledge) of all ranks over three exchanges."""
    num_epochs, views = 3, channels(num_ranks, 1, 1, 1, timeout_s=0.0)
    ranks_T = torch.full((1,), 2**num_ranks - 1, dtype=torch.int32)
    stores = [view.tokens[view.rank] for view in views] + [view.epoch for view in views]
    stores += [flags[view.rank] for view in views for flags in (view.arrived, view.acknowledged)]

    def act(view: PushChannel, step: int) -> bool:
        """Runs step `step` of a rank; False if it would block."""
        epoch = step // 3 + 1
        if step % 3 == 0:
            reference.push_tokens(torch.full((1, 1), value_of(view.rank, epoch)), ranks_T, None, view)
        elif step % 3 == 1:
            reference.wait_for_peers(view)
        if view.late_rank_flag:
            view.late_rank_flag.zero_()
            return False
        if step % 3 == 1:
            read = [slots.item() for slots in view.tokens[view.rank]]
            assert read == [value_of(rank, epoch) for rank in range(num_ranks)], f"epoch {epoch}: {read}"
        if step % 3 == 2:
            reference.acknowledge(view)
        return True

    seen, pending = set(), [((0,) * num_ranks, [store.clone() for store in stores])]
    while pending:
        steps, contents = pending.pop()
        if steps in seen:
            continue
        seen.add(steps)
        moved = False
        for rank in range(num_ranks):
            for store, content in zip(stores, contents, strict=True):
                store.copy_(content)
            if steps[rank] < 3 * num_epochs and act(views[rank], steps[rank]):
                moved = True
                after = (*steps[:rank], steps[rank] + 1, *steps[rank + 1 :])
                pending.append((after, [store.clone() for store in stores]))
        assert moved or steps == (3 * num_epochs,) * num_ranks, f"deadlock after {steps}"
    assert len(seen) > 20
