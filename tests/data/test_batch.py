"""Microbatches: labels, loss mask, positions, segments, and their split over context-parallel ranks."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.data.batch import MaskConfig, MicroBatch, make_microbatch, split_sequence, to_device
from megatron_moe.data.samples import PADDING
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import microbatch

EOD = 9


class TokenRows:
    """Samples given as lists."""

    fingerprint = "rows"

    def __init__(self, *rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, index: int) -> np.ndarray:
        return np.array(self.rows[index], dtype=np.int64)

    def locate(self, index: int, position: int) -> str:
        return f"some/file, document {index + 10}, token {position + 100}"


def batch(*rows: list[int], dtype: torch.dtype = torch.float64, **masks) -> MicroBatch:
    config = MaskConfig(**{"vocab_size": 10, "eod": EOD, "pad": -1, **masks})
    return make_microbatch(TokenRows(*rows), np.arange(len(rows)), config, dtype)


def test_labels_are_the_next_tokens() -> None:
    made = batch([1, 2, 3, 4], [5, 6, 7, 8])
    assert made.tokens_BS.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert made.labels_BS.tolist() == [[2, 3, 4], [6, 7, 8]]
    assert made.loss_mask_BS.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert made.context.tokens.positions_BS.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert made.context.tokens.segments_BS is None
    assert made.context.tokens.valid_BS is None


def test_tensors_have_the_documented_dtypes_and_are_contiguous() -> None:
    made = batch([1, 2, EOD, 4], [5, 6, -1, -1], dtype=torch.float32, reset_attention_mask=True)
    assert made.loss_mask_BS.dtype == torch.float32
    assert made.context.tokens.valid_BS.dtype == torch.bool
    for tensor in (made.tokens_BS, made.labels_BS, made.context.tokens.positions_BS, made.context.tokens.segments_BS):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


def test_samples_are_in_the_order_of_the_indices() -> None:
    rows = TokenRows([1, 2], [3, 4], [5, 6])
    made = make_microbatch(rows, np.array([2, 0]), MaskConfig(vocab_size=10, eod=EOD, pad=-1), torch.float64)
    assert made.tokens_BS.tolist() == [[5], [1]]


def test_padding_has_no_loss_is_invalid_and_becomes_token_0() -> None:
    made = batch([1, 2, 3, PADDING, PADDING])
    assert made.tokens_BS.tolist() == [[1, 2, 3, 0]]
    assert made.labels_BS.tolist() == [[2, 3, 0, 0]]
    assert made.loss_mask_BS.tolist() == [[1, 1, 0, 0]]
    assert made.context.tokens.valid_BS.tolist() == [[True, True, True, False]]


def test_pad_id_in_the_data_is_padding() -> None:
    made = batch([1, 7, 3, 4], pad=7)
    assert made.tokens_BS.tolist() == [[1, 0, 3]]
    assert made.labels_BS.tolist() == [[0, 3, 4]]
    assert made.loss_mask_BS.tolist() == [[0, 1, 1]]
    assert made.context.tokens.valid_BS.tolist() == [[True, False, True]]


def test_padding_does_not_end_a_document_if_eod_is_0() -> None:
    made = batch(
        [1, 7, 3, 0, 4, PADDING], pad=7, eod=0, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True
    )
    assert made.tokens_BS.tolist() == [[1, 0, 3, 0, 4]]
    assert made.loss_mask_BS.tolist() == [[0, 1, 1, 0, 0]]
    assert made.context.tokens.positions_BS.tolist() == [[0, 1, 2, 3, 0]]
    assert made.context.tokens.segments_BS.tolist() == [[0, 0, 0, 0, 1]]


def test_eod_mask_loss_masks_the_end_of_a_document() -> None:
    made = batch([1, EOD, 3, 4, EOD], eod_mask_loss=True)
    assert made.loss_mask_BS.tolist() == [[1, 0, 1, 1]]


def test_positions_restart_after_the_end_of_a_document() -> None:
    made = batch([1, 2, EOD, 4, 5, EOD, EOD, 8], [EOD, 1, 2, 3, 4, 5, 6, 7], reset_position_ids=True)
    assert made.context.tokens.positions_BS.tolist() == [[0, 1, 2, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert made.context.tokens.segments_BS is None


def test_segments_number_documents_including_their_eod() -> None:
    made = batch([1, 2, EOD, 4, 5, EOD, EOD, 8], reset_attention_mask=True)
    assert made.context.tokens.segments_BS.tolist() == [[0, 0, 0, 1, 1, 1, 2]]
    assert made.context.tokens.positions_BS.tolist() == [[0, 1, 2, 3, 4, 5, 6]]


def slow_positions_and_mask(tokens: list[int]) -> tuple[list[int], list[list[bool]]]:
    """Positions and attention mask, computed document by document."""
    positions, document, documents = [], 0, []
    count = 0
    for token in tokens:
        positions.append(count)
        documents.append(document)
        count += 1
        if token == EOD:
            document, count = document + 1, 0
    size = len(tokens)
    visible = [[j <= i and documents[i] == documents[j] for j in range(size)] for i in range(size)]
    return positions, visible


def test_reset_equals_the_loop_over_documents() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        row = rng.choice([1, 2, EOD], size=13, p=[0.4, 0.3, 0.3]).tolist()
        made = batch(row, reset_position_ids=True, reset_attention_mask=True)
        positions, visible = slow_positions_and_mask(row[:-1])
        assert made.context.tokens.positions_BS.tolist() == [positions]
        segments = made.context.tokens.segments_BS[0]
        same = (segments[:, None] == segments[None, :]).tril()
        assert same.tolist() == visible


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("token", [10, 65535, -2])
def test_an_id_outside_the_vocabulary_is_reported_with_its_location(position: int, token: int) -> None:
    row = [1, 2, 3, 4, 5]
    row[position] = token
    sentence = (
        f"token id {token} in some/file, document 11, token {100 + position} "
        rf"\(sample 1, position {position}\) is not in the vocabulary of 10"
    )
    with pytest.raises(DataProblem, match=sentence):
        batch([1, 2, 3, 4, 5], row)


def test_to_device_returns_a_batch_on_that_device_unchanged() -> None:
    made = batch([1, 2, 3])
    assert to_device(made, torch.device("cpu")) is made


SEQ = 16


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_context_parallel_split_keeps_labels_masks_and_positions_with_their_tokens(split: Any, cp: int) -> None:
    marks = torch.arange(2 * SEQ).view(2, SEQ)
    whole = MicroBatch(
        tokens_BS=marks,
        labels_BS=marks + 1,
        loss_mask_BS=(marks + 2).double(),
        context=microbatch(2, SEQ, positions_BS=marks + 3, segments_BS=marks + 4, valid_BS=marks % 3 == 0).context,
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
    whole = microbatch(2, SEQ)
    first = on_threads(ParallelConfig(world_size=4, cp=4), lambda ctx: split_sequence(whole, ctx))[0]
    assert torch.equal(first.tokens_BS, whole.tokens_BS[:, [0, 1, 14, 15]])
    assert first.context.tokens.positions_BS[0].tolist() == [0, 1, 14, 15]
    assert first.context.tokens.segments_BS is None and first.context.tokens.valid_BS is None


def test_one_rank_does_not_split() -> None:
    whole = microbatch(2, SEQ)
    assert split_sequence(whole, ParallelContext.single()) is whole


def test_data_parallel_ranks_do_not_split() -> None:
    whole = microbatch(2, SEQ)
    assert all(part is whole for part in on_threads(ParallelConfig(world_size=2), lambda c: split_sequence(whole, c)))
