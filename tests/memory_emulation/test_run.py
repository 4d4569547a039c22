"""Runs with `--fake-init-process-group`: table, JSON values, plot, rejected arguments, and no warnings of torch."""

import json
from pathlib import Path

import pytest

import pretrain_moe

pytestmark = pytest.mark.filterwarnings("error:.*is deprecated:FutureWarning")

TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 "
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall "
    "--seq-length 32 --max-position-embeddings 32 --vocab-size 96 --micro-batch-size 1 --global-batch-size 32 "
    "--train-iters 4 --lr 1e-3 --bf16 --use-distributed-optimizer --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --device cpu"
).split()
WORLD = [*TINY, *"--world-size 8 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4".split()]
RUN = [*WORLD, "--fake-init-process-group"]


def row(name: str, table: str) -> list[str]:
    (line,) = (line.strip() for line in table.splitlines() if line.strip().startswith(name))
    return line.removeprefix(name).split()


def test_table_facts_and_plot_of_one_rank_per_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "memory.json", tmp_path / "memory.png"
    files = ["--emulate-json", str(figures), "--emulate-plot", str(picture)]
    assert pretrain_moe.main([*RUN, "--emulate-rank", "all", "--gpu", "h200", *files], {}) == 0
    table = capsys.readouterr().out
    assert "Emulation of 8 ranks: tensors without data, kernels of H200; balanced routing" in table
    assert row("rank of the world", table) == ["0", "4"]
    assert row("pipeline rank", table) == ["0", "1"]
    assert "peak memory of a step in MiB\n" in table and "GiB\n" not in table
    lines = [
        line for line in table.splitlines() if line.startswith(("  rank of", "  pipeline rank", "  weights", "  total"))
    ]
    assert len({len(line) for line in lines}) == 1, "aligned columns"
    values = json.loads(figures.read_text())
    assert [rank["rank"] for rank in values["ranks"]] == [0, 4]
    for rank in values["ranks"]:
        assert sum(rank["categories"].values()) == rank["peak_bytes"]
        assert "allocator_peak_bytes" not in rank
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_memory_of_the_gpu_is_that_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for memory in (100, 50):
        assert pretrain_moe.main([*RUN, "--gpu-memory", str(memory)], {}) == 0
        assert f"{memory:.1f} GiB of a H100 are left" in capsys.readouterr().out
    assert pretrain_moe.main([*RUN, "--gpu-tflops", "5"], {}) != 0
    assert "--gpu-tflops without --dry-run" in capsys.readouterr().err


def test_default_rank_is_that_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_moe.main(RUN, {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}) == 0
    assert row("rank of the world", capsys.readouterr().out) == ["5"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*RUN, "--emulate-rank", "8"], "--emulate-rank 8 is not a rank of a world of 8"),
        ([*RUN, "--emulate-imbalance", "5"], "receive at most 4 times a balanced share of top-2 choices among 8"),
        (
            [*RUN, "--moe-expert-capacity-factor", "0.5"],
            "an emulation cannot predict dropped tokens when experts have a capacity",
        ),
        ([*WORLD, "--emulate-rank", "all"], "--emulate-rank without --fake-init-process-group"),
        ([*TINY, "--world-size", "8"], "--world-size 8, but this run was started with 1 rank"),
        ([*RUN, "--kernel-backend", "transformer_engine"], "memory emulation on a CPU does not support kernel backend"),
        ([*RUN, "--emulate-json", "/no/such/folder/x.json"], "the emulation's results could not be written"),
    ],
)
def test_invalid_emulations_are_rejected(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_moe.main(words, {}) != 0
    assert sentence in capsys.readouterr().err
