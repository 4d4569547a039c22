"""Batch size schedule and assignment of samples to ranks and steps."""

from typing import Any

import numpy as np
import pytest

from megatron_moe.config.training import BatchConfig
from megatron_moe.data.loader import SampleOrder, rank_share


def batch(size: int, rampup: tuple[int, int, int] | None = None) -> BatchConfig:
    return BatchConfig(micro_batch_size=1, global_batch_size=size, rampup_batch_size=rampup)


def test_constant_batch_has_one_size() -> None:
    assert [batch(24).size_at(consumed) for consumed in (0, 24, 10**9)] == [24, 24, 24]


def test_ramp_grows_at_equal_intervals_of_consumed_samples() -> None:
    ramp = batch(8, (2, 2, 300))
    # Three increments over 300 samples: one per 100.
    expected = [(0, 2), (99, 2), (100, 4), (199, 4), (200, 6), (299, 6), (300, 8), (301, 8), (10**9, 8)]
    assert [(consumed, ramp.size_at(consumed)) for consumed, _ in expected] == expected


def test_ramp_equals_the_formula_at_every_count() -> None:
    ramp = batch(9, (3, 2, 100))
    for consumed in range(150):
        increments = 3 if consumed > 100 else int(consumed / (100 / 3))
        assert ramp.size_at(consumed) == 3 + 2 * increments


def test_ramp_without_distance_or_samples_is_constant() -> None:
    assert batch(4, (4, 2, 100)).size_at(0) == 4
    assert batch(8, (4, 2, 0)).size_at(1) == 8


@pytest.mark.parametrize("size", [0, 1, 5, 6])
def test_batches_that_do_not_divide_into_microbatches_are_refused(size: int) -> None:
    with pytest.raises(AssertionError, match=f"{size} sequences are not a multiple of 2 x 2"):
        rank_share(np.arange(size), 0, ranks=2, micro=2)


def test_ranks_take_consecutive_slices_of_every_micro_step() -> None:
    taken = [rank_share(np.arange(12, 24), rank, ranks=3, micro=2).tolist() for rank in range(3)]
    assert taken == [[[12, 13], [18, 19]], [[14, 15], [20, 21]], [[16, 17], [22, 23]]]


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (1, 4), (2, 3), (4, 3), (12, 1), (1, 12)])
def test_a_step_takes_the_same_samples_in_every_layout(micro: int, dp: int) -> None:
    taken = np.stack([rank_share(np.arange(12), rank, ranks=dp, micro=micro) for rank in range(dp)])
    # samples are consecutive in the order of micro steps and ranks
    assert taken.transpose(1, 0, 2).ravel().tolist() == list(range(12))


def test_single_order_is_the_order_of_the_data_and_ends_with_it() -> None:
    order = SampleOrder(kind="single", num_samples=10, seed=1)
    assert order.indices(np.arange(3, 7)).tolist() == [3, 4, 5, 6]
    assert order.end == 10


def test_cyclic_order_is_a_new_permutation_in_every_pass() -> None:
    order = SampleOrder(kind="cyclic", num_samples=11, seed=1)
    taken = order.indices(np.arange(33)).reshape(3, 11)
    for one_pass in taken:
        assert sorted(one_pass.tolist()) == list(range(11))
    assert len({tuple(one_pass.tolist()) for one_pass in taken}) == 3
    assert order.end is None


def test_cyclic_order_depends_on_seed_and_position_only() -> None:
    order = SampleOrder(kind="cyclic", num_samples=11, seed=1)
    whole = order.indices(np.arange(40))
    for start in range(40):
        np.testing.assert_array_equal(order.indices(np.arange(start, 40)), whole[start:])
    np.testing.assert_array_equal(order.indices(np.arange(40).reshape(4, 10)), whole.reshape(4, 10))
    assert SampleOrder(kind="cyclic", num_samples=11, seed=2).indices(np.arange(40)).tolist() != whole.tolist()


def test_cyclic_order_draws_a_permutation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    order = SampleOrder(kind="cyclic", num_samples=1000, seed=1)
    order.indices(np.arange(5))
    monkeypatch.setattr(np.random, "default_rng", None)
    order.indices(np.arange(5, 1000))
    assert order == SampleOrder(kind="cyclic", num_samples=1000, seed=1)


def test_another_order_of_the_same_samples_has_another_fingerprint() -> None:
    def fingerprint(kind: Any, num_samples: int = 10, seed: int = 1) -> str:
        return SampleOrder(kind=kind, num_samples=num_samples, seed=seed).fingerprint("samples")

    assert fingerprint("single") == fingerprint("single", num_samples=20), "a longer run continues the same order"
    cyclic = {fingerprint("cyclic"), fingerprint("cyclic", num_samples=20), fingerprint("cyclic", seed=2)}
    assert len(cyclic | {fingerprint("single")}) == 4
