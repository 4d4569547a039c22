"""A run whose ranks share heads, channels, vocabulary and positions, as a command line."""

from pathlib import Path
from typing import Any

from megatron_moe.config.exit_codes import ExitCode
from pretrain_moe import main
from tests.end_to_end.tiny_run import arguments, records
from tests.helpers.ranks import run_torchrun
from tests.helpers.tolerances import FP64_LAYOUT

FLAGS = "--fp64 --train-iters 4 --eval-interval 4 --save-interval 2 --padded-vocab-size 272 --qk-layernorm".split()
RANKS = "--tensor-model-parallel-size 2 --sequence-parallel --moe-token-dispatcher-type alltoall".split()
EVERY_STEP = (
    "lm loss",
    "load_balancing_loss",
    *("grad-norm", "grad-norm dense", "grad-norm experts", "grad-norm router"),
)
FIGURES = (*EVERY_STEP, "lm loss validation")


def figures(run: Path, first: int = 1) -> dict[str, list[Any]]:
    rows = [row for row in records(run) if row["iteration"] >= first]
    return {name: [row[name] for row in rows if name in row] for name in FIGURES}


def test_two_ranks_log_what_one_does_and_one_goes_on_from_their_checkpoint(data: str, tmp_path: Path) -> None:
    one, two, later = (tmp_path / name for name in ("one", "two", "later"))
    assert main(arguments(data, one, *FLAGS), {}) == ExitCode.OK
    both = run_torchrun(2, arguments(data, two, *FLAGS, *RANKS, "--exit-interval", "2"), cwd=tmp_path)
    assert both.returncode == 0, both.stdout + both.stderr
    assert main(arguments(data, later, *FLAGS, "--load", str(two / "checkpoints")), {}) == ExitCode.OK
    expected = figures(one)
    assert all(expected[name] for name in FIGURES)
    for name in EVERY_STEP:
        joined = figures(two)[name] + figures(later, first=3)[name]
        FP64_LAYOUT.check(joined, expected[name], name)
    FP64_LAYOUT.check(figures(later)["lm loss validation"][-1], expected["lm loss validation"][-1], "validation")
