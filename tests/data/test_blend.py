"""Blending: grammar of `--data-path` and `--split`, and the order compared with a slow greedy selection."""

from pathlib import Path

import numpy as np
import pytest

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.data.datasets import Blend, parse_blend, parse_split, samples_per_dataset, split_range
from megatron_moe.data.indexed import IndexedTokens
from megatron_moe.data.samples import BlendedSamples, DocumentSamples, SampleRequest, blend_order, normalize
from tests.helpers.tiny_data import corpus


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        ([], None),
        (["a"], Blend(prefixes=("a",))),
        (["a", "b"], Blend(prefixes=("a", "b"))),
        (["0.3", "a", "7e-1", "b"], Blend(prefixes=("a", "b"), weights=(0.3, 0.7))),
        (["1", "a"], Blend(prefixes=("a",), weights=(1.0,))),
        (["a", "1"], Blend(prefixes=("a", "1"))),
        (["1", "a", "b", "c"], Blend(prefixes=("1", "a", "b", "c"))),
        (["1", "2", "3"], Blend(prefixes=("1", "2", "3"))),
    ],
)
def test_words_are_pairs_exactly_when_every_second_is_a_number(words: list[str], blend: Blend | None) -> None:
    assert parse_blend(words) == blend


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_a_weight_that_is_not_positive_is_rejected(weight: str) -> None:
    with pytest.raises(DataProblem, match=f"gives b the weight {weight}"):
        parse_blend(["1", "a", weight, "b"])


@pytest.mark.parametrize("entry", [["a"], ["1", "a"]])
def test_more_data_sets_than_the_order_can_number_are_rejected(entry: list[str]) -> None:
    assert parse_blend(entry * 32766) is not None
    with pytest.raises(DataProblem, match=r"blends 32,767 data sets; at most 32,766 are possible"):
        parse_blend(entry * 32767)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("969, 30, 1", ((0.0, 0.969), (0.969, 0.999), (0.999, 1.0))),
        ("99,1,0", ((0.0, 0.99), (0.99, 1.0), None)),
        ("1", ((0.0, 1.0), None, None)),
        ("1,1", ((0.0, 0.5), (0.5, 1.0), None)),
        ("0,1,0", (None, (0.0, 1.0), None)),
        ("99990/8/2", ((0.0, 0.9999), (0.9999, 0.99998), (0.99998, 1.0))),
        ("0.5 .25 0.25", ((0.0, 0.5), (0.5, 0.75), (0.75, 1.0))),
    ],
)
def test_split_is_cut_at_the_shares(text: str, expected: tuple) -> None:
    shares = parse_split(text)
    assert [share is None for share in shares] == [share is None for share in expected]
    for share, wanted in zip(shares, expected, strict=True):
        assert share == pytest.approx(wanted) if wanted else share is None


@pytest.mark.parametrize("text", ["", "0,0,0", "1,2,3,4", "a,b"])
def test_split_without_shares_is_refused(text: str) -> None:
    with pytest.raises(DataProblem, match="three shares"):
        parse_split(text)


def test_split_ranges_cover_every_document_once() -> None:
    for num_documents in range(1, 200):
        for text in ("969, 30, 1", "8,1,1", "1,1,1", "95,5,0"):
            ranges = [split_range(share, num_documents) for share in parse_split(text) if share is not None]
            assert [document for part in ranges for document in part] == list(range(num_documents))


def test_split_edges_are_rounded() -> None:
    assert split_range((0.0, 0.969), 742) == range(0, 719)
    assert split_range((0.969, 0.999), 742) == range(719, 741)
    assert split_range((0.5, 1.0), 5) == range(2, 5)


def test_dataset_sizes_are_rounded_up_before_and_after_the_surplus() -> None:
    assert samples_per_dataset([0.3, 0.7], 10) == [3, 7]
    assert samples_per_dataset([1 / 3, 2 / 3], 10) == [4, 7]
    assert samples_per_dataset([0.3, 0.7], 1000, 0.005) == [302, 704]
    assert samples_per_dataset([1 / 3, 2 / 3], 10, 0.005) == [5, 8]


def slow_greedy(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    """Selects, sample by sample, the data set furthest below its share; ties go to the first."""
    used = [0] * len(weights)
    chosen, counts = [], []
    for sample in range(size):
        best = 0
        for number in range(1, len(weights)):
            behind = weights[number] * max(float(sample), 1.0) - used[number]
            if behind > weights[best] * max(float(sample), 1.0) - used[best]:
                best = number
        chosen.append(best)
        counts.append(used[best])
        used[best] += 1
    return chosen, counts


def test_blend_order_equals_the_slow_greedy_choice() -> None:
    rng = np.random.default_rng(0)
    cases = [[1.0], [1.0, 1.0], [1.0, 1.0, 1.0], [0.3, 0.7], [5.0, 3.0, 1.0, 1.0]]
    cases += [rng.random(int(rng.integers(2, 9))).tolist() for _ in range(30)]
    for case in cases:
        weights = normalize(case)
        order = blend_order(weights, 500)
        chosen, counts = slow_greedy(weights, 500)
        np.testing.assert_array_equal(order["dataset_index"], chosen)
        np.testing.assert_array_equal(order["dataset_sample_index"], counts)
        assert order["dataset_index"].dtype == np.int16
        assert order["dataset_sample_index"].dtype == np.int64


def test_blend_follows_its_weights_at_every_point() -> None:
    weights = normalize([5, 3, 1, 1])
    dataset = blend_order(weights, 2000)["dataset_index"]
    for size in range(1, 2001, 37):
        taken = np.bincount(dataset[:size], minlength=4)
        assert np.abs(taken - np.array(weights) * size).max() <= 2


def exhaustive_order(sizes: list[int], size: int) -> dict[str, np.ndarray]:
    return blend_order(normalize(sizes), size, limits=np.array(sizes))


def test_exhaustive_order_takes_every_sample_exactly_once() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        sizes = [*rng.integers(0, 60, size=int(rng.integers(1, 7))).tolist(), 1]
        sizes[0] *= int(rng.integers(0, 2))
        order = exhaustive_order(sizes, sum(sizes))
        pairs = zip(order["dataset_index"].tolist(), order["dataset_sample_index"].tolist(), strict=True)
        assert sorted(pairs) == [(number, sample) for number, size in enumerate(sizes) for sample in range(size)]


def test_a_data_set_without_samples_yields_no_samples() -> None:
    assert exhaustive_order([0, 3, 0], 3)["dataset_index"].tolist() == [1, 1, 1]


def test_exhaustive_order_is_the_greedy_order_while_nothing_is_used_up() -> None:
    sizes = [50, 30, 20]
    chosen, _ = slow_greedy(normalize(sizes), 60)
    assert exhaustive_order(sizes, 60)["dataset_index"].tolist() == chosen


def parts_of(folder: Path, counts: list[int]) -> list[DocumentSamples]:
    parts = []
    for number, count in enumerate(counts):
        prefix = corpus(folder, name=f"set{number}", seed=number)
        wanted = SampleRequest(documents=range(40), split="train", seq_length=8, num_samples=count, seed=1)
        parts.append(DocumentSamples(IndexedTokens(prefix), prefix, wanted, None))
    return parts


def test_blended_samples_are_those_of_their_parts(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, [40, 80])
    blend = BlendedSamples(parts, [1, 2], 100, tmp_path / "cache")
    chosen, counts = slow_greedy(normalize([1, 2]), 100)
    assert len(blend) == 100
    for index in range(100):
        part = parts[chosen[index]]
        np.testing.assert_array_equal(blend.tokens(index), part.tokens(counts[index]))
        assert blend.locate(index, 3) == part.locate(counts[index], 3)


def test_blend_without_weights_takes_all_of_every_part(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, [40, 80])
    total = sum(map(len, parts))
    assert len(BlendedSamples(parts, None, None, None)) == total
    assert len(BlendedSamples(parts, None, 10 * total, None)) == total
    assert len(BlendedSamples(parts, None, 17, None)) == 17


def test_cached_blend_equals_the_built_one(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, [40, 80])
    first, second = (BlendedSamples(parts, [1, 2], 100, tmp_path / "cache") for _ in range(2))
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".npy", ".npy", ".txt"]
    for index in range(100):
        np.testing.assert_array_equal(first.tokens(index), second.tokens(index))


def test_fingerprint_changes_with_weights_and_parts(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, [40, 80])
    base = BlendedSamples(parts, [1, 2], 30, None).fingerprint
    assert BlendedSamples(parts, [2, 4], 50, None).fingerprint == base
    others = [([2, 1], parts, 30), ([1, 2], parts[::-1], 30), (None, parts, 30)]
    digests = [BlendedSamples(these, weights, size, None).fingerprint for weights, these, size in others]
    assert len({base, *digests}) == 4


def test_a_blend_that_exceeds_a_data_set_is_rejected(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, [40, 80])
    with pytest.raises(DataProblem, match="set0, which has"):
        BlendedSamples(parts, [100, 1], 5 * len(parts[0]), None)
