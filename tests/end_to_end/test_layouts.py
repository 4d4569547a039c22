"""Runs on two ranks log the same numbers as a run on one rank, and their checkpoints can be resumed on one rank."""

from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from pretrain_moe import main
from tests.end_to_end.tiny_run import arguments, generate, metric_values, succeed
from tests.helpers.programs import run_ranks, start_ranks
from tests.helpers.thinned import nightly_only
from tests.helpers.tolerances import FP64_LAYOUT

METRICS = ("lm loss", "load_balancing_loss", "grad-norm", "lm loss validation")
ALLTOALL = "--moe-token-dispatcher-type alltoall"
DOCUMENTS = (
    "--reset-position-ids --reset-attention-mask --eod-mask-loss --fp64 --train-iters 3 --eval-interval 3".split()
)
CONTEXT_PARALLEL = f"--context-parallel-size 2 --expert-model-parallel-size 2 {ALLTOALL}".split()
EXCHANGES = {
    "another exchange in each layer": "--cp-comm-type p2p allgather a2a",
    "a degree per microbatch": "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 40",
}
SHARDED = "--fp64 --train-iters 4 --eval-interval 2 --save-interval 2 --padded-vocab-size 272 --qk-layernorm".split()
TENSOR_PARALLEL = f"--tensor-model-parallel-size 2 --sequence-parallel {ALLTOALL}".split()
PIPELINED = (
    "--fp64 --kernel-backend reference --lr-decay-iters 6 --eval-interval 3 --save-interval 3 --train-iters 6".split()
)
PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|L".split()


def train(data: str, run: Path, *flags: str) -> dict[str, dict[int, float]]:
    """Trains in this process and returns the metrics of the run."""
    assert main(arguments(data, run, *flags), {}) == ExitCode.OK
    return {name: metric_values(run, name) for name in METRICS}


def check(run: Path, expected: dict[str, dict[int, float]], what: str) -> None:
    """Asserts that the metrics of a run are those expected, at the same iterations."""
    found = {name: metric_values(run, name) for name in expected}
    assert all(expected.values()) and {name: [*found[name]] for name in found} == {n: [*expected[n]] for n in expected}
    values = ({name: [*rows.values()] for name, rows in each.items()} for each in (found, expected))
    FP64_LAYOUT.check_all(*values, what)


@pytest.fixture(scope="module")
def one_rank(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    return train(data, tmp_path_factory.mktemp("one") / "run", *DOCUMENTS)


@pytest.mark.parametrize("exchange", nightly_only(EXCHANGES, ["a degree per microbatch"]))
def test_context_parallel_ranks_log_the_numbers_of_one_rank(exchange, one_rank, data: str, tmp_path: Path) -> None:
    flags = (*DOCUMENTS, *CONTEXT_PARALLEL, *EXCHANGES[exchange].split())
    succeed(run_ranks(2, arguments(data, tmp_path / "run", *flags), cwd=tmp_path))
    check(tmp_path / "run", one_rank, exchange)


def test_expert_parallel_ranks_on_two_hosts_log_the_numbers_of_one_rank(one_rank, data: str, tmp_path: Path) -> None:
    flags = (*DOCUMENTS, *"--expert-model-parallel-size 2 --moe-token-dispatcher-type flex".split())
    for rank in start_ranks(2, arguments(data, tmp_path / "run", *flags), cwd=tmp_path, ranks_per_host=1):
        succeed(rank.wait())
    check(tmp_path / "run", one_rank, "two hosts")
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "2 expert ranks, with 1 on a host, send each token once per host" in log


def test_tensor_parallel_ranks_log_the_numbers_of_one_rank_and_it_resumes_from_their_checkpoint(
    data: str, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    expected = train(data, one, *SHARDED)
    expected |= {
        name: metric_values(one, name) for name in ("grad-norm dense", "grad-norm experts", "grad-norm router")
    }
    succeed(run_ranks(2, arguments(data, two, *SHARDED, *TENSOR_PARALLEL, "--exit-interval", "2"), cwd=tmp_path))
    assert [*metric_values(two, "lm loss")] == [2, 1]
    train(data, two, *SHARDED)
    check(two, expected, "tensor parallel")


@pytest.mark.slow
def test_pipeline_stages_log_the_numbers_of_one_rank_and_it_resumes_from_their_checkpoint(
    data: str, tmp_path: Path
) -> None:
    two = tmp_path / "two"
    succeed(run_ranks(2, arguments(data, two, *PIPELINED, *PIPELINE, "--exit-interval", "3"), cwd=tmp_path))
    assert len(list((two / "checkpoints" / "iter_0000003").glob("*.safetensors"))) == 4
    succeed(generate(two / "checkpoints", "--max-new-tokens", "3"))
    train(data, two, *PIPELINED)
    check(two, train(data, tmp_path / "one", *PIPELINED), "pipeline")
