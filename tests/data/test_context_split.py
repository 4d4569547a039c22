"""A microbatch over context-parallel ranks: what each holds, and what it knows of the rest."""

from typing import Any

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.data.batch import MicroBatch, split_sequence
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import microbatch

SEQ = 16


def batch(**fields: Any) -> MicroBatch:
    return microbatch(2, SEQ, **fields)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_labels_masks_and_positions_stay_with_their_tokens(split: Any, cp: int) -> None:
    marks = torch.arange(2 * SEQ).view(2, SEQ)
    whole = MicroBatch(
        tokens_BS=marks,
        labels_BS=marks + 1,
        loss_mask_BS=(marks + 2).double(),
        context=batch(positions_BS=marks + 3, segments_BS=marks + 4, valid_BS=marks % 3 == 0).context,
    )
    parts = on_threads(ParallelConfig(world_size=cp, cp=cp, cp_split=split), lambda ctx: split_sequence(whole, ctx))
    for part in parts:
        assert torch.equal(part.labels_BS, part.tokens_BS + 1)
        assert torch.equal(part.loss_mask_BS, (part.tokens_BS + 2).double())
        assert torch.equal(part.context.tokens.positions_BS, part.tokens_BS + 3)
        assert torch.equal(part.context.tokens.segments_BS, part.tokens_BS + 4)
        assert torch.equal(part.context.tokens.valid_BS, part.tokens_BS % 3 == 0)
        assert torch.equal(part.context.tokens.whole_segments_BS, whole.context.tokens.segments_BS)
        assert part.whole is whole
    assert torch.equal(torch.cat([part.tokens_BS for part in parts], dim=1).sort(dim=1).values, marks)


def test_zigzag_rank_0_holds_both_ends() -> None:
    whole = batch()
    first = on_threads(ParallelConfig(world_size=4, cp=4), lambda ctx: split_sequence(whole, ctx))[0]
    assert torch.equal(first.tokens_BS, whole.tokens_BS[:, [0, 1, 14, 15]])
    assert first.context.tokens.positions_BS[0].tolist() == [0, 1, 14, 15]
    assert first.context.tokens.segments_BS is None and first.context.tokens.valid_BS is None


def test_one_rank_keeps_the_microbatch_itself() -> None:
    whole = batch()
    assert split_sequence(whole, ParallelContext.single()) is whole


def test_data_parallel_ranks_do_not_split() -> None:
    whole = batch()
    assert all(part is whole for part in on_threads(ParallelConfig(world_size=2), lambda c: split_sequence(whole, c)))
