"""Experts over ranks under NCCL: the numbers of one rank, and no waiting for the device where none is declared."""

from pathlib import Path

import pytest

from tests.gpu.experts_over_gpus import cases, every_case, on_gpus, without_waiting
from tests.helpers.tolerances import FP64_LAYOUT
from tests.moe.parallel.folded import gathered, name_of, on_one_rank

NUM_GPUS = pytest.mark.parametrize(
    "num_gpus", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)


@NUM_GPUS
def test_every_fold_and_dispatcher_matches_one_rank(num_gpus: int, tmp_path: Path) -> None:
    by_rank = on_gpus(num_gpus, every_case, tmp_path)
    for place, (fold, config, data) in enumerate(cases(num_gpus)):
        actual = gathered([results[place] for results in by_rank], fold)
        partition = None if config.capacity is None else fold
        expected = on_one_rank(config, data, partition)
        FP64_LAYOUT.check_all(actual.tensors, expected.tensors, f"{name_of(fold)} {config.dispatcher}")


@NUM_GPUS
def test_dispatchers_without_a_host_read_run_without_host_sync(num_gpus: int, tmp_path: Path) -> None:
    for done in on_gpus(num_gpus, without_waiting, tmp_path):
        assert done == [("allgather", True), ("alltoall", True)]
