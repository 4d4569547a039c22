"""Sample order compared with a plain loop over the documents."""

from pathlib import Path

import numpy as np
import pytest

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.data.indexed import IndexedTokens
from megatron_moe.data.samples import (
    PADDING,
    DocumentSamples,
    SampleRequest,
    build_indices,
    build_sample_index,
    num_epochs,
    plan_passes,
)
from tests.helpers.tiny_data import random_documents, write_tokens


class Lengths:
    """Document lengths without tokens, which suffice to build indices."""

    identity = {"lengths": "test"}

    def __init__(self, lengths: list[int]) -> None:
        self.sequence_lengths = np.array(lengths, dtype=np.int32)


def request(stop: int, **changes) -> SampleRequest:
    values = {"documents": range(stop), "split": "train", "seq_length": 8, "num_samples": None, "seed": 1234}
    return SampleRequest(**{**values, **changes})


def slow_walk(lengths: list[int], order: list[int], seq_length: int, drop_last: bool) -> list[tuple[int, int]]:
    """Takes seq_length + 1 tokens at a time across documents; the next sample starts at the last token taken."""
    total = sum(lengths[document] for document in order)
    count = (total - 1) // seq_length
    if not drop_last and (total - 1) % seq_length:
        count += 1
    rows = [(0, 0)]
    place, offset = 0, 0
    while len(rows) <= count:
        missing = seq_length + 1
        while True:
            here = lengths[order[place]] - offset
            if here >= missing:
                offset += missing - 1
                break
            missing -= here
            if place == len(order) - 1:
                offset = lengths[order[place]] - 1
                break
            place += 1
            offset = 0
        rows.append((place, offset))
    return rows


def slow_indices(lengths: list[int], wanted: SampleRequest) -> dict[str, list]:
    """Document, sample and shuffle index, computed by loops from their definition."""
    documents, seq_length = list(wanted.documents), wanted.seq_length
    per_epoch = sum(lengths[document] for document in documents)
    epochs = 1
    if wanted.num_samples is not None:
        while epochs * per_epoch < wanted.num_samples * seq_length + 1:
            epochs += 1
    separate = False
    before_last = 0
    if epochs > 1:
        before_last = ((epochs - 1) * per_epoch - 1) // seq_length
        separate = wanted.num_samples - before_last < int(0.8 * ((per_epoch - 1) // seq_length))
    rng = np.random.RandomState(wanted.seed)

    def shuffled(values: list[int], dtype: type) -> list[int]:
        array = np.array(values, dtype=dtype)
        rng.shuffle(array)
        return array.tolist()

    if separate:
        document_index = shuffled(documents * (epochs - 1), np.int32) + shuffled(documents, np.int32)
    else:
        document_index = shuffled(documents * epochs, np.int32)
    sample_index = slow_walk(lengths, document_index, seq_length, wanted.drop_last_partial)
    count = len(sample_index) - 1
    if separate:
        shuffle_index = shuffled(list(range(before_last)), np.uint32)
        shuffle_index += shuffled(list(range(before_last, count)), np.uint32)
    else:
        shuffle_index = shuffled(list(range(count)), np.uint32)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def built_from(lengths: list[int], wanted: SampleRequest) -> dict[str, np.ndarray]:
    source = Lengths(lengths)
    return build_indices(source, wanted, plan_passes(source, "some/prefix", wanted))


def check_equal(lengths: list[int], wanted: SampleRequest) -> dict[str, np.ndarray]:
    built = built_from(lengths, wanted)
    for name, expected in slow_indices(lengths, wanted).items():
        np.testing.assert_array_equal(built[name], np.array(expected), err_msg=f"{name} of {wanted}")
    return built


@pytest.mark.parametrize("empty_documents", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_indices_equal_the_slow_walk(drop_last: bool, empty_documents: bool) -> None:
    rng = np.random.default_rng([drop_last, empty_documents])
    for _ in range(100):
        lengths = rng.integers(0 if empty_documents else 1, 30, size=int(rng.integers(2, 25))).tolist()
        lengths[1] = 2
        wanted = request(
            len(lengths),
            documents=range(int(rng.integers(0, 2)), len(lengths)),
            seq_length=int(rng.integers(1, 12)),
            num_samples=int(rng.integers(1, 120)),
            seed=int(rng.integers(0, 10_000)),
            drop_last_partial=drop_last,
        )
        check_equal(lengths, wanted)


@pytest.mark.parametrize("drop_last", [True, False])
def test_one_epoch_of_any_length_equals_the_slow_walk(drop_last: bool) -> None:
    for total in range(9, 27):
        check_equal([5, total - 5], request(2, drop_last_partial=drop_last))


def test_every_number_of_samples_equals_the_slow_walk() -> None:
    for num_samples in range(1, 200):
        check_equal([7, 30, 1, 12, 31], request(5, num_samples=num_samples))


def test_last_epoch_is_separate_exactly_below_80_percent() -> None:
    # 81 tokens and samples of 8: an epoch gives 10 samples, two epochs give 20.
    lengths = [9] * 9
    separate = {}
    for num_samples in range(11, 21):
        built = check_equal(lengths, request(9, num_samples=num_samples))
        separate[num_samples] = sorted(built["document_index"][:9].tolist()) == list(range(9))
    assert [number for number, value in separate.items() if value] == list(range(11, 18))


def test_dtypes_are_those_of_the_format() -> None:
    built = built_from([9, 9, 9], request(3))
    assert built["document_index"].dtype == np.int32
    assert built["sample_index"].dtype == np.int32
    assert built["shuffle_index"].dtype == np.uint32


def test_documents_beyond_int32_keep_their_numbers() -> None:
    first = 2**31 - 2
    source = Lengths([])
    source.sequence_lengths = np.broadcast_to(np.int32(9), first + 5)  # takes no memory
    wanted = request(0, documents=range(first, first + 5))
    built = build_indices(source, wanted, plan_passes(source, "some/prefix", wanted))
    assert sorted(built["document_index"].tolist()) == list(range(first, first + 5))


def test_sample_index_is_int64_when_a_document_is_longer_than_int32() -> None:
    lengths = np.array([3, 2**31], dtype=np.int64)
    index = build_sample_index(lengths, np.array([0, 1], dtype=np.int32), 2**29, drop_last_partial=True)
    assert index.dtype == np.int64
    assert index.tolist() == [[0, 0], [1, 2**29 - 3], [1, 2**30 - 3], [1, 3 * 2**29 - 3], [1, 2**31 - 3]]


def test_num_epochs_is_the_smallest_that_suffices() -> None:
    for per_epoch in range(1, 40):
        for num_samples in range(0, 30):
            epochs = num_epochs(per_epoch, 8, num_samples)
            assert epochs * per_epoch >= num_samples * 8 + 1 or epochs == 1 and num_samples == 0
            assert epochs == 1 or (epochs - 1) * per_epoch < num_samples * 8 + 1
    assert num_epochs(5, 8, None) == 1


def test_order_depends_on_the_seed() -> None:
    one, other = (built_from([9] * 20, request(20, seed=seed)) for seed in (1, 2))
    assert one["document_index"].tolist() != other["document_index"].tolist()
    assert one["shuffle_index"].tolist() != other["shuffle_index"].tolist()


@pytest.mark.parametrize(("lengths", "num_samples"), [([1], 5), ([0, 0], 5), ([8], None), ([4, 4], None)])
def test_too_few_tokens_are_rejected_with_their_number(lengths: list[int], num_samples: int | None) -> None:
    with pytest.raises(DataProblem, match=f"train split of some/prefix has {sum(lengths)} tokens"):
        built_from(lengths, request(len(lengths), num_samples=num_samples))


def samples_of(folder: Path, lengths: list[int], **changes) -> tuple[DocumentSamples, list[np.ndarray]]:
    documents = random_documents(7, lengths)
    source = IndexedTokens(write_tokens(folder / "a", documents))
    return DocumentSamples(source, str(folder / "a"), request(len(lengths), **changes), None), documents


def test_tokens_are_those_of_the_concatenated_documents(tmp_path: Path) -> None:
    samples, documents = samples_of(tmp_path, [3, 30, 0, 1, 17, 9], num_samples=30)
    stream = np.concatenate([documents[number] for number in samples.document_index])
    assert len(samples) >= 30
    for index in range(len(samples)):
        start = int(samples.shuffle_index[index]) * 8
        np.testing.assert_array_equal(samples.tokens(index), stream[start : start + 9])
        assert samples.tokens(index).dtype == np.int64


@pytest.mark.parametrize("tokens", range(10, 18))
def test_incomplete_last_sample_is_padded(tmp_path: Path, tokens: int) -> None:
    samples, documents = samples_of(tmp_path, [4, tokens - 4], drop_last_partial=False)
    stream = np.concatenate([documents[number] for number in samples.document_index])
    assert len(samples) == 2
    last = samples.tokens(samples.shuffle_index.tolist().index(1))
    np.testing.assert_array_equal(last[: tokens - 8], stream[8:])
    assert last[tokens - 8 :].tolist() == [PADDING] * (17 - tokens)


def test_locate_names_document_and_token(tmp_path: Path) -> None:
    samples, documents = samples_of(tmp_path, [3, 30, 1, 17, 9], num_samples=20)
    for index in range(len(samples)):
        for position, token in enumerate(samples.tokens(index)):
            name, document, place = samples.locate(index, position).split(", ")
            assert name == str(tmp_path / "a")
            assert documents[int(document.split()[1])][int(place.split()[1])] == token


def test_fingerprint_changes_with_everything_that_changes_the_order(tmp_path: Path) -> None:
    base = samples_of(tmp_path, [9, 30, 30])[0].fingerprint
    assert samples_of(tmp_path, [9, 30, 30])[0].fingerprint == base
    changes = [
        {"seed": 5},
        {"seq_length": 9},
        {"num_samples": 11},
        {"num_samples": 40},
        {"documents": range(1, 3)},
        {"split": "test"},
    ]
    others = [samples_of(tmp_path, [9, 30, 30], **change)[0].fingerprint for change in changes]
    others.append(samples_of(tmp_path, [9, 31, 29])[0].fingerprint)
    assert len({base, *others}) == len(others) + 1


def test_a_longer_run_within_the_same_epochs_has_the_same_order(tmp_path: Path) -> None:
    # 72 tokens give 8 samples in one epoch.
    few, many = (samples_of(tmp_path, [9] * 8, num_samples=count)[0] for count in (3, 8))
    assert few.fingerprint == many.fingerprint
    assert [few.tokens(index).tolist() for index in range(8)] == [many.tokens(index).tolist() for index in range(8)]
    assert samples_of(tmp_path, [9] * 8, num_samples=9)[0].fingerprint != few.fingerprint


def test_a_hundred_million_tokens_are_indexed_in_vectorised_form() -> None:
    lengths = np.full(200_000, 500, dtype=np.int32)
    index = build_sample_index(lengths, np.arange(200_000, dtype=np.int32), 100, drop_last_partial=True)
    assert len(index) == (200_000 * 500 - 1) // 100 + 1
    assert index[-1].tolist() == [199_999, 400]
