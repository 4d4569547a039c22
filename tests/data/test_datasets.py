"""Construction of the datasets of every split from flags."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_moe.config.exit_codes import DataProblem, MemoryProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.training import LoopConfig
from megatron_moe.data import datasets
from megatron_moe.data import samples as samples_module
from megatron_moe.data.datasets import Datasets, MockTokens, build_datasets, split_sizes
from megatron_moe.data.indexed import IndexedTokens
from megatron_moe.data.loader import train_loader
from megatron_moe.data.samples import BlendedSamples, DocumentSamples, SampleRequest, Samples
from megatron_moe.data.tokenizer import load_tokenizer
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_data import EOD, VOCAB, batch_config, corpus, data_config, loop_config, write_tokens


def build(loop: LoopConfig | None = None, context: ParallelContext | None = None, **changes) -> Datasets:
    config = data_config(**changes)
    tokenizer = load_tokenizer(config.tokenizer)
    return build_datasets(config, batch_config(), loop or loop_config(), tokenizer, context or ParallelContext.single())


def rows(samples: Samples | None) -> list[list[int]]:
    assert samples is not None
    return [samples.tokens(index).tolist() for index in range(len(samples))]


def direct(prefix: str, split: str, documents: range, num_samples: int | None) -> list[list[int]]:
    wanted = SampleRequest(documents=documents, split=split, seq_length=8, num_samples=num_samples, seed=1234)
    return rows(DocumentSamples(IndexedTokens(prefix), prefix, wanted, None))


def test_sizes_count_an_evaluation_per_interval_and_one_at_the_end() -> None:
    sizes = split_sizes(batch_config(global_batch_size=8), loop_config(train_iters=25, eval_interval=10, eval_iters=3))
    assert (sizes.train, sizes.valid, sizes.test) == (25 * 8, 3 * 3 * 8, 3 * 8)
    assert split_sizes(batch_config(), loop_config(eval_interval=None, eval_iters=3)).valid == 3 * 4
    assert split_sizes(batch_config(), loop_config(train_samples=77)).train == 77
    assert split_sizes(batch_config(), loop_config(skip_train=True)).train == 0


def test_one_prefix_is_cut_by_the_split(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    built = build(data_path=(prefix,))
    assert rows(built.train) == direct(prefix, "train", range(0, 32), 40)
    assert [*built.valid] == ["validation"]
    assert rows(built.valid["validation"]) == direct(prefix, "valid", range(32, 36), 4)
    assert rows(built.test) == direct(prefix, "test", range(36, 40), 4)
    assert built.masks.vocab_size == VOCAB and built.masks.eod == EOD and built.masks.pad == -1
    assert built.notes[-1].startswith("samples of 8 tokens: train ")


def test_unmapped_reads_equal_mapped_reads(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    assert rows(build(data_path=(prefix,), mmap_bin_files=False).train) == rows(
        build(data_path=(prefix,), mmap_bin_files=True).train
    )


def test_every_split_has_its_own_paths(tmp_path: Path) -> None:
    train, valid, test = (corpus(tmp_path, name=name, seed=seed) for seed, name in enumerate(("a", "b", "c")))
    built = build(train_data_path=(train,), valid_data_path=(valid,), test_data_path=(test,), split="1,0,0")
    assert rows(built.train) == direct(train, "train", range(40), 40)
    assert rows(built.valid["validation"]) == direct(valid, "valid", range(40), 4)
    assert rows(built.test) == direct(test, "test", range(40), 4)
    assert build(train_data_path=(train,)).valid == {}
    assert build(train_data_path=(train,)).test is None


def test_weighted_blend_has_the_targets_of_its_parts(tmp_path: Path) -> None:
    first, second = corpus(tmp_path, name="a"), corpus(tmp_path, name="b", seed=9)
    built = build(data_path=("0.25", first, "0.75", second), split="1")
    assert built.train is not None
    assert len(built.train) == 10 + 30
    from_first = {tuple(row) for row in direct(first, "train", range(40), 11)}
    taken = sum(tuple(row) in from_first for row in rows(built.train))
    assert taken == 10


@pytest.mark.parametrize(("options", "epochs"), [({}, 2), ({"mid_level_dataset_surplus": 0.0}, 1)])
def test_parts_of_a_weighted_blend_are_built_with_a_surplus(options: dict, epochs: int, tmp_path: Path) -> None:
    # One epoch of 72 tokens gives 8 samples; half of the 16 samples plus the surplus need a second epoch.
    first, second = (write_tokens(tmp_path / name, [[1] * 9] * 8) for name in ("a", "b"))
    built = build(loop_config(train_iters=4), train_data_path=("1", first, "1", second), **options)
    assert isinstance(built.train, BlendedSamples)
    assert len(built.train) == 16
    assert [part.inputs["epochs"] for part in built.train.parts] == [epochs, epochs]


def test_the_seed_of_the_data_sets_the_order(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    one, other = build(data_path=(prefix,), seed=1), build(data_path=(prefix,), seed=2)
    assert rows(one.train) != rows(other.train)
    assert one.fingerprint != other.fingerprint


def test_blend_without_weights_is_one_epoch_of_everything_at_most(tmp_path: Path) -> None:
    first, second = corpus(tmp_path, name="a"), corpus(tmp_path, name="b", seed=9)
    built = build(loop_config(train_iters=10_000), data_path=(first, second), split="1")
    expected = direct(first, "train", range(40), None) + direct(second, "train", range(40), None)
    assert sorted(rows(built.train)) == sorted(expected)


def test_several_validation_sets_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    first, second = corpus(tmp_path, name="a"), corpus(tmp_path, name="b", seed=9)
    third = corpus(tmp_path / "x", name="a", seed=5)
    built = build(train_data_path=(first,), valid_data_path=(second, first, third), multiple_validation_sets=True)
    assert [*built.valid] == ["b", first, third]
    assert rows(built.valid["b"]) == direct(second, "valid", range(40), 4)
    with pytest.raises(DataProblem, match="without weights"):
        build(train_data_path=(first,), valid_data_path=("1", second, "2", third), multiple_validation_sets=True)


def test_incomplete_last_validation_sample_is_kept_on_request(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [[1] * 12])
    loop = loop_config(eval_iters=1)
    cut = build(loop, train_data_path=(prefix,), valid_data_path=(prefix, prefix)).valid["validation"]
    kept = build(
        loop, train_data_path=(prefix,), valid_data_path=(prefix, prefix), drop_last_partial_validation=False
    ).valid["validation"]
    assert (len(cut), len(kept)) == (2, 4)


def test_mock_data_needs_no_files_and_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built = build(mock_data=True, split="969,30,1", seq_length=1024)
    assert built.train is not None and built.test is not None
    assert len(built.valid) == 1
    assert built.train.tokens(0).max() < VOCAB
    assert list(tmp_path.iterdir()) == []


def test_indices_are_cached_next_to_the_data_or_in_cache_dir(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    build(data_path=(prefix,))
    assert len(list((Path(prefix) / "cache" / "GPTDataset_indices").iterdir())) == 12
    build(data_path=(prefix,), data_cache_path=tmp_path / "elsewhere")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 12


@pytest.mark.parametrize("weights", [("3", "7"), None])
def test_the_order_of_a_blend_is_cached_next_to_its_first_data_set(
    weights: tuple[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = (corpus(tmp_path, name="one", seed=0), corpus(tmp_path, name="two", seed=1))
    words = prefixes if weights is None else (weights[0], prefixes[0], weights[1], prefixes[1])
    before = build(data_path=words)
    monkeypatch.setattr(BlendedSamples, "_build_order", None)
    assert rows(build(data_path=words).train) == rows(before.train)


def test_data_replaced_at_the_same_place_is_indexed_again(tmp_path: Path) -> None:
    prefix = corpus(tmp_path, seed=0)
    before = build(data_path=(prefix,))
    corpus(tmp_path, seed=1)
    after = build(data_path=(prefix,))
    assert before.fingerprint != after.fingerprint
    assert rows(after.train) == direct(prefix, "train", range(0, 32), 40)


def test_without_training_there_are_no_training_samples(tmp_path: Path) -> None:
    built = build(loop_config(skip_train=True), data_path=(corpus(tmp_path),))
    assert built.train is None
    assert built.fingerprint == "none"
    assert built.valid


def test_split_that_gets_no_document_is_noted(tmp_path: Path) -> None:
    built = build(data_path=(corpus(tmp_path),), split="969,30,1")
    assert built.test is None
    assert built.notes[0] == 'no test data: --split "969,30,1" gives it none of 40 documents'
    built = build(data_path=(corpus(tmp_path),), split="50,1,49")
    assert built.valid == {}
    assert built.notes[0] == 'no valid data: --split "50,1,49" gives it none of 40 documents'


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "there is no training data"),
        ({"data_path": ("{folder}/absent",)}, "absent.idx does not exist"),
        ({"data_path": ("{folder}/corpus",), "split": "0,1,0"}, "the train split is empty"),
        ({"data_path": ("{folder}/empty",)}, "train split of .*empty has none of its 0 documents"),
        ({"valid_data_path": ("{folder}/corpus",)}, "the train split is empty"),
    ],
)
def test_missing_training_data_is_rejected(tmp_path: Path, changes: dict, sentence: str) -> None:
    corpus(tmp_path)
    write_tokens(tmp_path / "empty", [])
    named = {
        key: tuple(word.format(folder=tmp_path) for word in value) if isinstance(value, tuple) else value
        for key, value in changes.items()
    }
    with pytest.raises(DataProblem, match=sentence):
        build(**named)


@pytest.mark.parametrize("iterations", [10**13, 10**23])
def test_more_samples_than_fit_host_memory_are_rejected_with_their_numbers(tmp_path: Path, iterations: int) -> None:
    corpus(tmp_path)
    loop = loop_config(train_iters=iterations, eval_interval=None)
    size = split_sizes(batch_config(), loop).train
    with pytest.raises(MemoryProblem, match=rf"sample index \({size:,} training, .* --train-iters"):
        build(loop, data_path=(str(tmp_path / "corpus"),))


@pytest.mark.parametrize(
    ("token", "dtype", "problem"),
    [
        (100, np.uint16, "not in the vocabulary of 100"),
        *((token, dtype, "is negative; check") for token in (-1, -2) for dtype in ("i1", "i2", "i4", "i8")),
    ],
)
def test_an_invalid_id_is_rejected_in_the_step_that_reads_it(
    token: int, dtype: str, problem: str, tmp_path: Path
) -> None:
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3, 4, 5, token, 7, 8, 9]] * 4, dtype)
    config = data_config(train_data_path=(prefix,))
    loader = train_loader(build(train_data_path=(prefix,)), config, batch_config(), ParallelContext.single())
    with pytest.raises(DataProblem, match=rf"token id {token} in .*/a, document \d, token 5 .* {problem}"):
        loader.next_step()


def test_ranks_read_the_steps_of_one_rank(tmp_path: Path) -> None:
    config = data_config(data_path=(corpus(tmp_path),), dataloader_type="cyclic")

    def steps(context: ParallelContext) -> list[torch.Tensor]:
        built = build_datasets(
            config, batch_config(micro_batch_size=1), loop_config(), load_tokenizer(config.tokenizer), context
        )
        loader = train_loader(built, config, batch_config(micro_batch_size=1), context)
        return [torch.stack([batch.tokens_BS for batch in loader.next_step()]) for _ in range(4)]

    alone = steps(ParallelContext.single())
    both = on_threads(ParallelConfig(world_size=2), steps)
    for step in range(4):
        together = np.stack([rank[step] for rank in both], axis=1).reshape(4, 1, 8)
        np.testing.assert_array_equal(together, alone[step])


def test_a_problem_of_the_first_rank_is_raised_on_every_rank(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    Path(f"{prefix}.bin").unlink()

    def attempt(context: ParallelContext) -> str:
        with pytest.raises(DataProblem) as problem:
            build(context=context, data_path=(prefix,))
        return str(problem.value)

    sentences = on_threads(ParallelConfig(world_size=2), attempt)
    assert sentences[0] == sentences[1]
    assert "corpus.bin does not exist" in sentences[0]


def test_ranks_communicate_while_the_first_builds_for_a_long_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, met, order = corpus(tmp_path), [], samples_module.blend_order

    def slow_order(weights: Sequence[float], size: int, limits: np.ndarray | None = None) -> dict[str, np.ndarray]:
        while len(met) < 6:
            time.sleep(0.001)
        return order(weights, size, limits)

    def gather_objects(value: object, group: ProcessGroup) -> list[object]:
        met.append(value)
        return collectives.gather_objects(value, group)

    monkeypatch.setattr(datasets, "_ROUND_SECONDS", 0.01)
    monkeypatch.setattr(datasets, "gather_objects", gather_objects)
    monkeypatch.setattr(samples_module, "blend_order", slow_order)
    first, second = on_threads(
        ParallelConfig(world_size=2),
        lambda context: build(
            context=context, data_path=("1", prefix, "2", prefix), data_cache_path=tmp_path / "cache"
        ),
    )
    assert len(met) > 6 and met.count((False, None)) == len(met) - 1, "one message says that it is done"
    np.testing.assert_array_equal(first.train.tokens(3), second.train.tokens(3))


def test_a_full_validation_set_is_one_epoch_of_it(tmp_path: Path) -> None:
    first, second = (write_tokens(tmp_path / name, [[1] * 9] * count) for name, count in (("a", 8), ("b", 4)))
    short = build(
        loop_config(eval_iters=1, eval_interval=None), train_data_path=(first,), valid_data_path=(first, second)
    )
    whole = build(
        loop_config(eval_iters=1, eval_interval=None),
        train_data_path=(first,),
        valid_data_path=(first, second),
        full_validation=True,
    )
    assert [len(each) for each in short.valid.values()] == [4]
    assert [len(each) for each in whole.valid.values()] == [8 + 4]


def test_without_evaluation_a_full_validation_set_is_not_built(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [[1] * 9] * 4)
    loop = loop_config(eval_iters=0, eval_interval=None)
    assert build(loop, train_data_path=(prefix,), valid_data_path=(prefix,), full_validation=True).valid == {}


def test_lengths_of_mock_documents_are_fixed() -> None:
    lengths = MockTokens(vocab_size=100, eod=99, num_documents=100_000).sequence_lengths
    expected = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)
    np.testing.assert_array_equal(lengths, expected)
    assert lengths.dtype == np.int32
    few = MockTokens(vocab_size=100, eod=99, num_documents=300)
    np.testing.assert_array_equal(few.sequence_lengths, expected[:300])
    assert len(few) == 300 and few.identity["mock"] == 300


def test_a_mock_document_counts_modulo_the_vocabulary_and_ends_with_eod() -> None:
    tokens = MockTokens(vocab_size=100, eod=99, num_documents=100)
    for number in (0, 5, 77):
        length = int(tokens.sequence_lengths[number])
        expected = [place % 100 for place in range(1, length)] + [99]
        assert tokens.get(number).tolist() == expected
        for offset in (0, 1, length // 2, length - 1):
            assert tokens.get(number, offset).tolist() == expected[offset:]
            assert tokens.get(number, offset, 1).tolist() == expected[offset : offset + 1]
            assert tokens.get(number, offset, 0).tolist() == []
