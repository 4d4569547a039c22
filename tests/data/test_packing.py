"""Packing of variable-length sequences into rows, and the loader that uses it."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arguments.dry_run.packing import packed_rows
from megatron_moe.build import build_data, build_packer
from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.packing import PackingConfig
from megatron_moe.config.training import BatchConfig, StepCounts
from megatron_moe.data.batch import MaskConfig, make_packed_microbatch
from megatron_moe.data.indexed import IndexedTokens
from megatron_moe.data.loader import RowPacker, SampleOrder, TrainLoader
from megatron_moe.data.packing import Row, attention_work, pack_rows, round_up, serpentine
from megatron_moe.data.samples import BlendedSamples, SampleRequest
from megatron_moe.data.varlen import WholeDocuments
from megatron_moe.parallel.context import ParallelContext
from tests.data.test_loader import rank_context
from tests.helpers.command_lines import plan_of
from tests.helpers.tiny_data import EOD, VOCAB, random_documents, write_tokens

CAPACITY = 64
MASKS = MaskConfig(vocab_size=VOCAB, eod=EOD, pad=-1)
CONFIG = PackingConfig()


@given(
    lengths=st.lists(st.integers(1, CAPACITY), max_size=60),
    ranks=st.integers(1, 5),
    unit=st.integers(1, 4),
    alignment=st.sampled_from([1, 4, 16]),
    most=st.sampled_from([None, 2, 3]),
    scheduler=st.sampled_from(["dp_balanced", "default_dynamic_cp"]),
)
def test_every_sequence_is_in_one_row_and_ranks_have_equally_many(
    lengths: list[int], ranks: int, unit: int, alignment: int, most: int | None, scheduler: Any
) -> None:
    config = PackingConfig(
        sequence_packing_scheduler=scheduler, pad_packed_seq_alignment=alignment, thd_max_packed_sequences=most
    )
    dealt = pack_rows(lengths, config, CAPACITY, ranks=ranks, unit=unit)
    rows = list(chain(*dealt))
    assert sorted(chain(*rows)) == list(range(len(lengths)))
    assert len(dealt) == ranks
    assert {len(own) for own in dealt} == {len(dealt[0])} and len(dealt[0]) % unit == 0 and dealt[0]
    for row in rows:
        assert sum(round_up(lengths[i], alignment) for i in row[:-1]) + sum(lengths[i] for i in row[-1:]) <= CAPACITY
        assert config.most_sequences is None or len(row) <= config.most_sequences
    # a row stays empty only if no sequence is left for it
    assert all(rows) or max(map(len, rows)) <= 1


@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40))
def test_one_rank_packs_in_order_until_a_row_is_full(lengths: list[int]) -> None:
    rows = sorted(pack_rows(lengths, CONFIG, CAPACITY, ranks=1, unit=1)[0])
    assert list(chain(*rows)) == list(range(len(lengths)))
    for row, after in zip(rows[:-1], rows[1:], strict=True):
        assert sum(lengths[i] for i in row) + lengths[after[0]] > CAPACITY


def test_heavy_rows_are_split_where_their_halves_have_similar_work() -> None:
    rows = list(chain(*pack_rows([8, 8, 8, 8, 16, 16], CONFIG, 32, ranks=1, unit=3)))
    assert sorted(rows) == [(0, 1, 2, 3), (4,), (5,)]


def test_the_time_of_packing_does_not_grow_with_the_square_of_the_documents() -> None:
    class Lengths(list[int]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    for ranks in (2, 500):
        lengths = Lengths([1, 2] * 1000)
        pack_rows(lengths, CONFIG, 3000, ranks=ranks, unit=1)
        assert lengths.reads < 20 * len(lengths)


def test_serpentine_deals_forward_and_backward() -> None:
    rows: list[Row] = [(index,) for index in range(7)]
    assert serpentine(rows, 3) == [[(0,), (5,), (6,)], [(1,), (4,)], [(2,), (3,)]]


def test_ranks_have_more_equal_work_than_in_turn() -> None:
    """Compares the imbalance over 16 ranks with round-robin assignment, for documents with lognormal lengths."""
    ranks, capacity = 16, 4096
    for seed in range(5):
        draw = np.random.default_rng(seed).lognormal(5.5, 1.2, size=4000)
        lengths = np.clip(draw, 1, capacity).astype(int).tolist()
        dealt = pack_rows(lengths, CONFIG, capacity, ranks=ranks, unit=1)
        in_turn = sorted(chain(*dealt))  # rows in data order, assigned round-robin below

        def imbalance(own: list[list[Row]], lengths: list[int] = lengths) -> float:
            loads = [sum(attention_work(row, lengths) for row in rows) for rows in own]
            return max(loads) / (sum(loads) / len(loads))

        assert imbalance(dealt) < 1.02 < imbalance([in_turn[rank::ranks] for rank in range(ranks)])


def documents(tmp_path: Path, lengths: list[int], *, size: int | None = None, name: str = "a", **changes: Any) -> Any:
    source = IndexedTokens(write_tokens(tmp_path / name, random_documents(3, lengths)), mmap=True)
    request = SampleRequest(
        documents=range(len(lengths)), split="train", seq_length=16, num_samples=size, seed=7, **changes
    )
    return source, WholeDocuments(source, name, request, EOD, None)


def test_a_sample_is_a_document_that_is_cut_to_the_length_of_a_row(tmp_path: Path) -> None:
    source, samples = documents(tmp_path, [5, 1, 0, 17, 40, 2], size=10)
    assert len(samples) == 12 and set(samples.document_index.tolist()) == {0, 3, 4, 5}
    for epoch in samples.document_index.reshape(3, 4):
        assert sorted(epoch) == [0, 3, 4, 5]
    for index, document in enumerate(samples.document_index):
        whole, tokens = source.get(int(document)), samples.tokens(index)
        assert samples.lengths(np.array([index])) == len(tokens) - 1 == min(len(whole) - 1, 16)
        assert tokens[-1] == EOD
        np.testing.assert_array_equal(tokens[:-1], whole[: len(tokens) - 1])


def test_longer_runs_continue_the_order_of_shorter_ones(tmp_path: Path) -> None:
    short, long = (documents(tmp_path, list(range(2, 12)), size=size, name=f"{size}")[1] for size in (10, 35))
    np.testing.assert_array_equal(long.document_index[:10], short.document_index)


def test_documents_without_two_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataProblem, match="no document of two or more tokens"):
        documents(tmp_path, [1, 0, 1])


def packed(samples: Any, rows: list[Row], **changes: Any) -> Any:
    config = replace(PackingConfig(), **{k: v for k, v in changes.items() if k != "masks"})
    return make_packed_microbatch(samples, rows, config, 16, changes.get("masks", MASKS), torch.float64)


@pytest.mark.parametrize("policy", ["append_dummy_seq", "extend_last"])
@pytest.mark.parametrize("alignment", [1, 4])
def test_rows_hold_samples_one_after_the_other(tmp_path: Path, policy: Any, alignment: int) -> None:
    _, samples = documents(tmp_path, [6, 4, 9, 3])
    lengths = samples.lengths(np.arange(4)).tolist()
    batch = packed(samples, [(0, 1), ()], thd_tail_padding_policy=policy, pad_packed_seq_alignment=alignment)
    meta, starts = batch.context.tokens, [0, round_up(lengths[0], alignment)]
    real = torch.zeros(2, 16, dtype=torch.bool)
    for segment, (index, start) in enumerate(zip((0, 1), starts, strict=True)):
        text, here = torch.from_numpy(samples.tokens(index).astype(np.int64)), slice(start, start + lengths[index])
        assert torch.equal(batch.tokens_BS[0, here], text[:-1]) and torch.equal(batch.labels_BS[0, here], text[1:])
        assert torch.equal(meta.positions_BS[0, here], torch.arange(lengths[index]))
        assert (meta.segments_BS[0, here] == segment).all()
        real[0, here] = True
    assert torch.equal(meta.valid_BS, real) and torch.equal(batch.loss_mask_BS, real.double())
    end = starts[1] + lengths[1]
    assert (meta.segments_BS[0, end:] == (2 if policy == "append_dummy_seq" else 1)).all()
    assert meta.positions_BS[0, end] == (0 if policy == "append_dummy_seq" else lengths[1])
    assert meta.max_seqlen == max(lengths[:2])


def test_the_loss_can_exclude_ends_of_documents_inside_a_sample(tmp_path: Path) -> None:
    source = IndexedTokens(write_tokens(tmp_path / "b", [[5, EOD, 6, EOD]]), mmap=True)
    request = SampleRequest(documents=range(1), split="train", seq_length=16, num_samples=1, seed=7)
    samples = WholeDocuments(source, "b", request, EOD, None)
    batch = packed(samples, [(0,)], masks=replace(MASKS, eod_mask_loss=True))
    assert batch.loss_mask_BS[0, :4].tolist() == [1, 0, 1, 0]


def test_ids_outside_the_vocabulary_are_reported_with_their_document(tmp_path: Path) -> None:
    _, samples = documents(tmp_path, [6])
    with pytest.raises(DataProblem, match=r"token id \d+ in a, document 0, token \d+"):
        packed(samples, [(0,)], masks=replace(MASKS, vocab_size=3))


def loader(samples: Any, *, rank: int = 0, dp: int = 2, micro: int = 1, group: int = 1, size: int = 12) -> TrainLoader:
    return TrainLoader(
        samples,
        SampleOrder(kind="cyclic", num_samples=len(samples), seed=5),
        BatchConfig(micro_batch_size=micro, global_batch_size=size),
        MASKS,
        rank_context(rank, dp),
        packer=RowPacker(config=CONFIG, seq_length=16, ranks=dp, group=group),
    )


@pytest.mark.parametrize(("dp", "micro", "group"), [(1, 1, 1), (2, 1, 1), (2, 2, 2), (4, 1, 3)])
def test_ranks_share_the_samples_of_every_step(tmp_path: Path, dp: int, micro: int, group: int) -> None:
    samples = documents(tmp_path, np.random.default_rng(0).integers(2, 20, size=30).tolist())[1]
    one = loader(samples, dp=1)
    loaders = [loader(samples, rank=rank, dp=dp, micro=micro, group=group) for rank in range(dp)]
    for step in range(4):
        taken = list(chain(*one.samples_at(step * 12)))
        shares = [each.samples_at(step * 12) for each in loaders]
        assert sorted(chain(*chain(*shares))) == sorted(taken)
        batches = [each.next_step() for each in loaders]
        one.next_step()
        tokens = int(samples.lengths(np.array(taken)).sum())
        assert [each.last_counts for each in loaders] == [StepCounts(12, tokens)] * dp
        assert len({len(own) for own in batches}) == 1 and len(batches[0]) % group == 0
        assert sum(int(b.context.tokens.valid_BS.sum()) for own in batches for b in own) == tokens


def test_a_run_states_its_padding(tmp_path: Path) -> None:
    samples = documents(tmp_path, [9] * 12)[1]
    packer = RowPacker(config=CONFIG, seq_length=32, ranks=2)
    batch = BatchConfig(micro_batch_size=1, global_batch_size=12)
    assert packer.describe(samples, batch) == (
        "packing: 12 documents with 96 tokens fill 4 rows, of which 25.0% are padding; 2 microbatches per rank"
    )


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("source", ["files", "blend", "mock"])
def test_a_dry_run_estimates_the_padding_of_packed_rows(tmp_path: Path, source: str, alignment: int) -> None:
    """Compares the estimate with rows that are counted over 24 steps of a run with the same flags. The bounds are
    three deviations of the estimates, which pack 16 steps."""
    draw, parts = np.random.default_rng(4), []
    for name in ("a", "b"):
        lengths = draw.integers(1, 150, size=400) // (1 if name == "a" else 4)
        parts.append(write_tokens(tmp_path / name, random_documents(3, lengths.tolist())))
    paths = {"files": parts[0], "blend": f"0.25 {parts[0]} 0.75 {parts[1]}", "mock": ""}[source]
    data = f"--data-path {paths}" if paths else "--mock-data"
    flags = f"--calculate-per-token-loss --use-varlen-dataset --split 1,0,0 --eval-iters 0 --data-cache-path {tmp_path}"
    flags += f" --pad-packed-seq-alignment {alignment} --global-batch-size 256 --micro-batch-size 2"
    plan = plan_of(
        f"{flags} --tokenizer-type NullTokenizer --vocab-size {VOCAB} {data}",
        without="--data-path --tokenizer-model --split --micro-batch-size --global-batch-size",
    )
    estimate, data_sets = packed_rows(plan), build_data(plan, ParallelContext.single())
    packer, samples = build_packer(plan), data_sets.train
    assert estimate is not None and packer is not None and samples is not None
    tokens = between = number = 0
    for step in range(24):
        dealt = packer.microbatches(samples, np.arange(step * 256, step * 256 + 256), plan.batch.micro_batch_size)
        rows = [row for microbatch in dealt[0] for row in microbatch]
        batch = make_packed_microbatch(samples, rows, packer.config, 128, data_sets.masks, torch.float64)
        valid = batch.context.tokens.valid_BS
        assert valid is not None
        tokens, number = tokens + int(valid.sum()), number + len(rows)
        after = valid.flip(1).cumsum(1).flip(1) > 0
        between += int((after & ~valid).sum())
    positions = number * 128
    assert estimate["rows"] == pytest.approx(number / 24, rel=0.04)
    assert estimate["padding"] == pytest.approx(1 - tokens / positions, abs=0.012)
    assert estimate["padding_between_sequences"] == pytest.approx(between / positions, abs=0.006)
    assert (estimate["padding_between_sequences"] > 0) == (alignment > 1 and source != "mock")


def test_resuming_inside_an_epoch_continues_the_same_batches(tmp_path: Path) -> None:
    samples = documents(tmp_path, np.random.default_rng(0).integers(2, 20, size=30).tolist())[1]
    whole = loader(samples)
    steps = [[batch.tokens_BS for batch in whole.next_step()] for _ in range(6)]
    for done in range(6):
        resumed = loader(samples)
        resumed.restore(done * 12)
        for wanted in steps[done:]:
            found = resumed.next_step()
            assert len(found) == len(wanted)
            assert all(torch.equal(batch.tokens_BS, tokens) for batch, tokens in zip(found, wanted, strict=True))


def test_ranks_without_samples_get_padding(tmp_path: Path) -> None:
    samples = documents(tmp_path, [10, 12, 9])[1]
    batches = [loader(samples, rank=rank, dp=4, size=3).next_step() for rank in range(4)]
    valid = [int(batch.context.tokens.valid_BS.sum()) for (batch,) in batches]
    assert valid == [11, 9, 8, 0]
    assert batches[3][0].loss_mask_BS.sum() == 0


def test_blends_know_the_lengths_of_their_samples(tmp_path: Path) -> None:
    parts = [documents(tmp_path, lengths, size=20, name=name)[1] for name, lengths in (("x", [3, 9]), ("y", [5, 30]))]
    blend = BlendedSamples(parts, [0.7, 0.3], 20, None)
    found = blend.lengths(np.arange(20))
    assert found.tolist() == [len(blend.tokens(index)) - 1 for index in range(20)]


def test_flags_select_the_packing() -> None:
    assert plan_of("--calculate-per-token-loss").data.packing is None
    assert plan_of("--calculate-per-token-loss --use-varlen-dataset").data.packing == PackingConfig()
    flags = "--pad-packed-seq-alignment 16 --thd-tail-padding-policy extend_last --thd-max-packed-sequences 9"
    assert plan_of(f"--calculate-per-token-loss --use-varlen-dataset {flags}").data.packing == PackingConfig(
        pad_packed_seq_alignment=16, thd_tail_padding_policy="extend_last", thd_max_packed_sequences=9
    )
