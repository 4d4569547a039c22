"""A run length on the command line replaces one of a file in the other unit, and the file's schedule is converted."""

from pathlib import Path

import pytest

from megatron_moe.config.run import RunPlan
from tests.helpers.command_lines import plan_of, problems_of

LENGTHS = "--train-iters --lr-warmup-iters"
IN_ITERATIONS = "train-iters: 200\nlr-warmup-iters: 20\nlr-decay-iters: 150\n"
IN_SAMPLES = "train-samples: 3205\nlr-warmup-samples: 330\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Path of a file with the lengths of a recipe; the global batch size of the command line is 16."""
    (tmp_path / "iterations.yaml").write_text(IN_ITERATIONS)
    (tmp_path / "samples.yaml").write_text(IN_SAMPLES)
    return str(tmp_path)


def plan(words: str) -> RunPlan:
    return plan_of(words, LENGTHS)


def test_samples_replace_the_iterations_of_a_file(config: str) -> None:
    found = plan(f"--config {config}/iterations.yaml --train-samples 3210")
    assert (found.loop.train_iters, found.loop.train_samples) == (200, 3210)
    lr = found.lr_schedule
    assert (lr.warmup_samples, lr.decay_samples) == (20 * 16, 150 * 16)
    assert any(
        f"--train-samples 3210 (command line) replaces --train-iters 200 ({config}/iterations.yaml:1)" in note
        and "--lr-warmup-iters 20 becomes --lr-warmup-samples 320" in note
        for note in found.notes
    )


def test_iterations_replace_the_samples_of_a_file(config: str) -> None:
    found = plan(f"--config {config}/samples.yaml --train-iters 60")
    assert (found.loop.train_iters, found.loop.train_samples) == (60, None)
    assert (found.lr_schedule.warmup_samples, found.lr_schedule.decay_samples) == (21 * 16, 60 * 16)


@pytest.mark.parametrize(
    ("words", "warmup"), [("--lr-warmup-samples 70", 70), ("--lr-warmup-fraction 0.5", 1200), ("", 320)]
)
def test_a_later_warmup_takes_precedence(config: str, words: str, warmup: int) -> None:
    found = plan(f"--config {config}/iterations.yaml --train-samples 3210 {words}")
    assert found.lr_schedule.warmup_samples == warmup


def test_a_length_in_each_of_two_files(config: str) -> None:
    both = plan(f"--config {config}/iterations.yaml {config}/samples.yaml")
    assert (both.loop.train_samples, both.lr_schedule.warmup_samples) == (3205, 330)


def test_two_lengths_on_one_command_line_are_rejected(config: str) -> None:
    problems = problems_of(f"--config {config}/iterations.yaml --train-samples 3210 --train-iters 5", LENGTHS)
    assert "the length of the run is given twice" in [problem.what for problem in problems]


def test_a_schedule_without_a_batch_size_is_rejected(config: str) -> None:
    """Iterations are converted to samples by --global-batch-size; its default depends on the number of ranks."""
    words = f"--config {config}/iterations.yaml --train-samples 3210"
    (problem,) = problems_of(words, f"{LENGTHS} --global-batch-size")
    assert problem.what == "the run length is given in samples, but the learning-rate schedule in iterations"


def test_a_proxy_takes_a_length_in_samples(config: str) -> None:
    found = plan(f"--config {config}/iterations.yaml --proxy --train-samples 48")
    assert (found.loop.train_samples, found.lr_schedule.warmup_samples) == (48, 0)
