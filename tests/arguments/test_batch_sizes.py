"""Global batch sizes that change during a run, and batch sizes of evaluations."""

import pytest

from megatron_moe.config.training import BatchConfig
from tests.helpers.command_lines import plan_of

ITERS = "--train-iters --lr-warmup-iters"


def steps_one_by_one(batch: BatchConfig, samples: int) -> int:
    consumed = steps = 0
    while consumed + batch.size_at(consumed) <= samples:
        consumed += batch.size_at(consumed)
        steps += 1
    return steps


@pytest.mark.parametrize("rampup", [(1, 1, 0), (1, 1, 7), (3, 2, 59), (5, 1, 60), (7, 3, 500), (2, 5, 211), (17, 3, 9)])
def test_steps_of_a_growing_batch_are_counted_as_they_are_trained(rampup):
    batch = BatchConfig(micro_batch_size=1, global_batch_size=17, rampup_batch_size=rampup)
    for samples in range(400):
        assert batch.steps_for(samples) == steps_one_by_one(batch, samples), samples
    check_samples_after(batch)


def check_samples_after(batch: BatchConfig) -> None:
    """Compares `samples_after` with a count of single steps."""
    consumed = 0
    for steps in range(60):
        assert batch.samples_after(steps) == consumed, steps
        consumed += batch.size_at(consumed)


def test_batch_sizes_step_at_numbers_of_tokens():
    """Thresholds count tokens of whole sequences; the learning-rate schedule assumes the largest batch."""
    plan = plan_of('--seq-length 64 --step-batch-size-schedule "0:8 1K:16 6.4K:4"', "--global-batch-size")
    assert plan.batch.step_sizes == ((0, 8), (15, 16), (100, 4)) and plan.batch.global_batch_size == 16
    assert [plan.batch.size_at(consumed) for consumed in (0, 14, 15, 99, 100, 10**9)] == [8, 8, 16, 16, 4, 4]
    for samples in range(300):
        assert plan.batch.steps_for(samples) == steps_one_by_one(plan.batch, samples), samples
    assert plan.batch.steps_for(130, consumed=100) == 7
    check_samples_after(plan.batch)
    check_samples_after(plan_of().batch)


def test_evaluations_have_their_own_batch_sizes():
    batch = plan_of("--eval-micro-batch-size 2 --eval-global-batch-size 6").batch
    assert batch.evaluation == BatchConfig(micro_batch_size=2, global_batch_size=6)
    assert (batch.micro_batch_size, batch.global_batch_size) == (4, 16)
    assert plan_of().batch.evaluation == BatchConfig(micro_batch_size=4, global_batch_size=16)


def test_a_growing_batch_takes_more_iterations_for_the_same_samples():
    batch = BatchConfig(micro_batch_size=4, global_batch_size=16, rampup_batch_size=(4, 4, 60))
    assert [batch.size_at(consumed) for consumed in (0, 16, 20, 40, 60, 61)] == [4, 4, 8, 12, 16, 16]
    steps = steps_one_by_one(batch, 1000)
    plan = plan_of("--train-samples 1000 --rampup-batch-size 4 4 60", ITERS)
    assert plan.batch == batch
    assert plan.loop.train_iters == steps
