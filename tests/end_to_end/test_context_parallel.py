"""A run whose ranks split the sequence and share the experts, as a command line."""

from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config.exit_codes import ExitCode
from pretrain_moe import main
from tests.end_to_end.tiny_run import arguments, records
from tests.helpers.ranks import run_torchrun
from tests.helpers.thinned import nightly_only
from tests.helpers.tolerances import FP64_LAYOUT

DOCUMENTS = (
    "--reset-position-ids --reset-attention-mask --eod-mask-loss --fp64 --train-iters 3 --eval-interval 3".split()
)
RANKS = "--context-parallel-size 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split()
WAYS = {
    "each layer in its own way": "--cp-comm-type p2p allgather a2a",
    "a degree per microbatch": "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 40",
}
FIGURES = ("lm loss", "load_balancing_loss", "grad-norm", "lm loss validation")


def figures(run: Path) -> dict[str, list[Any]]:
    return {name: [row[name] for row in records(run) if name in row] for name in FIGURES}


@pytest.fixture(scope="module")
def one_rank(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    run = tmp_path_factory.mktemp("one") / "run"
    assert main(arguments(data, run, *DOCUMENTS), {}) == ExitCode.OK
    return figures(run)


@pytest.mark.parametrize("way", nightly_only(WAYS, ["a degree per microbatch"]))
def test_two_ranks_with_half_a_sequence_each_log_what_one_does(
    way: str, one_rank: dict[str, list[Any]], data: str, tmp_path: Path
) -> None:
    both = run_torchrun(2, arguments(data, tmp_path / "run", *DOCUMENTS, *RANKS, *WAYS[way].split()), cwd=tmp_path)
    assert both.returncode == 0, both.stdout + both.stderr
    assert all(len(one_rank[name]) >= 1 for name in FIGURES)
    FP64_LAYOUT.check_all(figures(tmp_path / "run"), one_rank, way)
