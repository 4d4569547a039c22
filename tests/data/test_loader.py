"""Loaders give the same sample order for any layout, microbatch size and number of restarts."""

from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.training import BatchConfig
from megatron_moe.data.batch import MaskConfig, MicroBatch
from megatron_moe.data.loader import EvalLoader, SampleOrder, TrainLoader

MASKS = MaskConfig(vocab_size=1000, eod=999, pad=-1)


class Numbered:
    """Dataset whose sample i is i, i + 1, i + 2."""

    fingerprint = "numbered"

    def __init__(self, count: int = 60) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def tokens(self, index: int) -> np.ndarray:
        assert 0 <= index < self.count
        return np.arange(index, index + 3)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), 2)

    def locate(self, index: int, position: int) -> str:
        return f"numbered, document {index}, token {position}"


def rank_context(rank: int = 0, dp: int = 1, dtype: torch.dtype = torch.float64) -> Any:
    groups = {"dp": SimpleNamespace(rank=rank, size=dp), "cp": SimpleNamespace(rank=0, size=1)}
    return SimpleNamespace(group=groups.__getitem__, device=torch.device("cpu"), dtype=dtype)


def loader(
    *,
    micro: int = 2,
    size: int = 12,
    dp: int = 1,
    rank: int = 0,
    kind: Any = "single",
    prefetch: bool = False,
    **batch: Any,
) -> TrainLoader:
    samples = Numbered()
    order = SampleOrder(kind=kind, num_samples=len(samples), seed=5)
    config = BatchConfig(micro_batch_size=micro, global_batch_size=size, **batch)
    return TrainLoader(samples, order, config, MASKS, rank_context(rank, dp), prefetch=prefetch)


def ids(batches: list[MicroBatch]) -> list[int]:
    return [index for batch in batches for index in batch.tokens_BS[:, 0].tolist()]


def steps_of(one: TrainLoader, count: int) -> Iterator[list[int]]:
    for _ in range(count):
        yield ids(one.next_step())


def test_a_step_is_the_microbatches_of_this_rank() -> None:
    batches = loader(micro=2, size=12, dp=2, rank=1).next_step()
    assert [batch.tokens_BS.tolist() for batch in batches] == [[[2, 3], [3, 4]], [[6, 7], [7, 8]], [[10, 11], [11, 12]]]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_resuming_after_any_step_continues_the_same_order(kind: str, prefetch: bool) -> None:
    whole = list(steps_of(loader(kind=kind), 5))
    for done in range(5):
        resumed = loader(kind=kind, prefetch=prefetch)
        resumed.restore(done * 12)
        assert list(steps_of(resumed, 5 - done)) == whole[done:]
        resumed.close()


def test_resuming_with_another_batch_size_continues_the_same_order() -> None:
    first = loader(size=12, kind="cyclic")
    taken = [index for step in steps_of(first, 4) for index in step]
    second = loader(size=6, micro=3, kind="cyclic")
    second.restore(first.state()["consumed_samples"])
    taken += [index for step in steps_of(second, 4) for index in step]
    one = loader(size=72, micro=72, kind="cyclic")
    assert taken == ids(one.next_step())


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 2), (1, 4), (3, 2), (2, 3), (12, 1)])
def test_all_ranks_together_take_the_samples_of_one_rank(micro: int, dp: int, kind: str) -> None:
    alone = list(steps_of(loader(micro=1, kind=kind), 5))
    ranks = [list(steps_of(loader(micro=micro, dp=dp, rank=rank, kind=kind), 5)) for rank in range(dp)]
    for step in range(5):
        parts = np.stack([np.array(ranks[rank][step]).reshape(-1, micro) for rank in range(dp)], axis=1)
        assert parts.ravel().tolist() == alone[step]


def test_ramp_up_takes_every_sample_once_and_resumes_inside() -> None:
    ramp = {"size": 8, "micro": 1, "dp": 2, "rampup_batch_size": (2, 2, 18)}
    one = loader(**ramp)
    sizes, seen, marks = [], [], []
    while not one.exhausted:
        marks.append(one.state()["consumed_samples"])
        step = ids(one.next_step())
        sizes.append(len(step) * 2)
        seen.append(step)
    assert sizes[:7] == [2, 2, 2, 4, 4, 6, 8]
    for number, consumed in enumerate(marks):
        resumed = loader(**ramp)
        resumed.restore(consumed)
        assert ids(resumed.next_step()) == seen[number]


def test_prefetching_does_not_change_batches() -> None:
    ahead, plain = loader(prefetch=True), loader()
    for _ in range(5):
        for one, other in zip(ahead.next_step(), plain.next_step(), strict=True):
            assert torch.equal(one.tokens_BS, other.tokens_BS)
            assert torch.equal(one.labels_BS, other.labels_BS)
    ahead.close()


def test_restore_discards_prefetched_batches() -> None:
    ahead = loader(prefetch=True)
    first = ids(ahead.next_step())
    ahead.restore(0)
    assert ids(ahead.next_step()) == first
    ahead.close()


def test_problem_in_prefetched_data_is_raised_in_its_step() -> None:
    samples = Numbered(60)
    config = BatchConfig(micro_batch_size=6, global_batch_size=6)
    order = SampleOrder(kind="single", num_samples=60, seed=1)
    masks = MaskConfig(vocab_size=10, eod=9, pad=-1)
    ahead = TrainLoader(samples, order, config, masks, rank_context(), prefetch=True)
    ahead.next_step()
    with pytest.raises(DataProblem, match="vocabulary of 10"):
        ahead.next_step()
    ahead.close()


def test_exhausted_data_is_reported_and_then_rejected() -> None:
    one = loader(size=24, micro=24)
    one.next_step()
    assert not one.exhausted
    one.next_step()
    assert one.exhausted
    with pytest.raises(DataProblem, match="after 48 samples needs 24 more, but the training data has 60"):
        one.next_step()
    assert not loader(kind="cyclic").exhausted


def test_a_run_longer_than_its_data_is_rejected() -> None:
    one = loader(size=24, micro=24)
    one.require_steps(2)
    with pytest.raises(DataProblem, match="60 samples, 0 of them consumed, which is enough for 2 iter.* but 3 are"):
        one.require_steps(3)
    one.restore(24)
    with pytest.raises(DataProblem, match="enough for 1 iteration, but 2 are left"):
        one.require_steps(2)
    loader(size=24, micro=24, kind="cyclic").require_steps(100)
    ramped = loader(size=24, micro=12, rampup_batch_size=(12, 12, 30))
    ramped.require_steps(4)  # 12, 12, 12 and 24 samples
    with pytest.raises(DataProblem, match="enough for 4 iterations"):
        ramped.require_steps(5)


def test_loss_mask_has_at_least_single_precision() -> None:
    samples, order = Numbered(), SampleOrder(kind="single", num_samples=60, seed=1)
    config = BatchConfig(micro_batch_size=1, global_batch_size=1)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        one = TrainLoader(samples, order, config, MASKS, rank_context(dtype=dtype))
        assert one.next_step()[0].loss_mask_BS.dtype == expected


def eval_ids(dp: int, rank: int, evaluation: int, count: int = 60) -> list[int]:
    batch = BatchConfig(micro_batch_size=2, global_batch_size=8, rampup_batch_size=(4, 4, 100))
    one = EvalLoader(Numbered(count), batch, MASKS, rank_context(rank, dp), eval_iters=3)
    return ids([*chain(*one.steps(evaluation))])


def test_evaluations_use_consecutive_batches() -> None:
    assert eval_ids(1, 0, 0) == list(range(24))
    assert eval_ids(1, 0, 1) == list(range(24, 48))


def test_evaluation_wraps_around_at_the_end_of_the_data() -> None:
    assert eval_ids(1, 0, 2) == [*range(48, 60), *range(12)]
    assert eval_ids(1, 0, 0, count=5) == [number % 5 for number in range(24)]


def test_ranks_share_an_evaluation() -> None:
    both = eval_ids(2, 0, 1) + eval_ids(2, 1, 1)
    assert sorted(both) == list(range(24, 48))


def test_skip_step_skips_exactly_one_step() -> None:
    for prefetch in (False, True):
        one = loader(prefetch=prefetch)
        first = ids(one.next_step())
        assert one.skip_step() == 12
        assert (first, ids(one.next_step())) == (list(range(12)), list(range(24, 36)))
        one.close()


def whole_set(count: int, size: int = 8) -> EvalLoader:
    return EvalLoader(
        Numbered(count), BatchConfig(micro_batch_size=2, global_batch_size=size), MASKS, rank_context(), eval_iters=None
    )


def test_a_full_validation_reads_every_full_batch_each_time() -> None:
    one = whole_set(30)
    assert [ids([*chain(*one.steps(evaluation))]) for evaluation in (0, 3)] == [list(range(24))] * 2


def test_a_full_validation_without_a_full_batch_is_refused() -> None:
    with pytest.raises(DataProblem, match="7 samples, less than one global batch of 8"):
        whole_set(7)


def test_the_state_distinguishes_sample_orders() -> None:
    assert loader(kind="single").state()["fingerprint"] != loader(kind="cyclic").state()["fingerprint"]
    assert loader(kind="cyclic", micro=4).state() == loader(kind="cyclic", size=24).state()
