"""Classification of the results of repeated steps."""

import math

import torch

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.rerun import Repeatability, RerunResult, compare_rerun, is_equal

NAN = math.nan


def result(rank: int, first: float, rerun: float) -> RerunResult:
    return RerunResult(rank, "host", "cpu", first, rerun)


def test_nonfinite_results_are_equal() -> None:
    assert is_equal(NAN, math.inf) and is_equal(2.0, 2.001) and is_equal(0.0, 0.0)
    assert not is_equal(NAN, 2.0) and not is_equal(2.0, 2.01)


def test_changed_result_suspects_the_rank_whose_loss_changed() -> None:
    ranks = [result(0, 5.0, 5.0), result(1, NAN, 5.0)]
    found = compare_rerun({"loss": NAN, "norm all": NAN}, {"loss": 5.0, "norm all": 1.0}, ranks)
    assert (found.kind, found.suspects) == ("transient", (1,)) and "suspect rank 1 (host, cpu)" in found.sentence
    assert found.problem("x").code == ExitCode.RERUN_DISAMBIGUATE


def test_changed_losses_with_an_equal_sum_are_detected() -> None:
    found = compare_rerun({"loss": 5.0}, {"loss": 5.0}, [result(0, 5.0, 4.0), result(1, 5.0, 6.0), result(2, 5.0, 5.0)])
    assert (found.kind, found.suspects) == ("transient", (0, 1))


def test_changed_gradients_name_no_suspect() -> None:
    found = compare_rerun({"loss": 5.0, "norm all": NAN}, {"loss": 5.0, "norm all": 1.0}, [result(0, 5.0, 5.0)])
    assert (found.kind, found.suspects) == ("transient", ())


def test_equal_result_in_two_starts_excludes_the_hardware() -> None:
    first, rerun, ranks = {"loss": NAN, "norm all": NAN}, {"loss": NAN, "norm all": NAN}, [result(0, NAN, NAN)]
    earlier = {"loss": "nan", "norm all": "nan"}
    verdicts = [compare_rerun(first, rerun, ranks, each) for each in (None, {**earlier, "loss": "5.0"}, earlier)]
    assert [found.kind for found in verdicts] == ["reproducible", "reproducible", "confirmed"]
    codes = [found.problem("x").code for found in verdicts]
    assert codes == [ExitCode.NUMERICS, ExitCode.NUMERICS, ExitCode.RERUN_FAILED]


def test_repeatability_statistics() -> None:
    figures, context = Repeatability(torch.device("cpu")), ParallelContext.single()
    assert figures.log_line(context) is None
    figures.add(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.0]))
    assert figures.log_line(context) == "1 iterations were computed twice: bitwise equal on all ranks"
    figures.add(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.5]))
    figures.add(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.0]))
    line = figures.log_line(context)
    assert line == "2 iterations were computed twice: up to 1 of them differ, relatively by at most 0.5, on ranks 0"
