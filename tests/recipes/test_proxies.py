"""Every supported recipe trains on this machine with `--proxy`."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from arguments.read import read_plan
from arguments.recipes import recipe_names
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.parallel.context import ParallelContext
from pretrain_moe import main
from tests.end_to_end.tiny_run import records
from tests.helpers import pipelines
from tests.helpers.thinned import nightly_only
from tests.helpers.tolerances import EXACT
from tools.verify_layout import layout_of

REFUSED = Path(__file__).resolve().parents[1] / "goldens" / "recipes_without_proxy.txt"
NAMES = recipe_names()
NUM_ITERATIONS = 5
NUM_RANKS = (2, 3, 8)
TRAINING = sorted(set(NAMES) - {line.partition(":")[0] for line in REFUSED.read_text(encoding="utf-8").splitlines()})


ARCHITECTURES = (
    *("deepseek-v3-b200-256", "gpt-oss-20b-h100-16"),
    *("minimax-m2-h100-256", "mixtral-8x7b-h100-64", "qwen2-57b-a14b-h100-64", "qwen3-30b-a3b-b200-8"),
)
"""Recipes of different architectures; the others differ in sizes and layout, or combine parts of these."""


@pytest.fixture(autouse=True)
def variables_of_a_run_end_with_it() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def train(name: str, run: Path) -> list[float]:
    """Losses of a small run."""
    words = ["--recipe", name, "--proxy", "--device", "cpu", "--no-plots", "--run-dir", str(run)]
    assert main(words, {}) == ExitCode.OK
    plan = read_plan(["--recipe", name, "--proxy"], {}, lambda config: config.vocab_size or 512)
    assert json.loads((run / "status.json").read_text())["warning"] == plan.warning
    return [row["lm loss"] for row in records(run) if "lm loss" in row]


def fold(name: str, num_ranks: int) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(num_ranks)}
    plan = read_plan(["--recipe", name, "--proxy"], environ, lambda config: config.vocab_size or 512)
    assert plan.parallel.world_size == num_ranks, name


@pytest.mark.parametrize(("first", "num_ranks"), list(enumerate(NUM_RANKS)))
def test_proxies_fold_to_any_number_of_ranks(first: int, num_ranks: int):
    for name in TRAINING[first :: len(NUM_RANKS)]:
        fold(name, num_ranks)


@pytest.mark.slow
def test_every_proxy_folds_to_every_number_of_ranks():
    for name in TRAINING:
        for num_ranks in NUM_RANKS:
            fold(name, num_ranks)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1, 8))])
def test_the_layout_of_every_proxy_can_be_verified(first: int):
    """CI takes every eighth recipe, and the nightly run all."""
    for name in TRAINING[first::8]:
        assert layout_of(["--recipe", name], {}).precision.params == "fp64", name


@pytest.mark.parametrize("name", nightly_only(TRAINING, set(TRAINING) - set(ARCHITECTURES)))
def test_a_recipe_trains_as_a_proxy(name: str, tmp_path):
    losses = train(name, tmp_path / "run")
    assert len(losses) == NUM_ITERATIONS
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("name", ["q6", "m8"])
def test_remainders_of_master_weights_train_to_the_bits_of_whole_ones(name: str):
    small = f"--recipe {name} --proxy --seq-length 32 --lr 1e-2 --kernel-backend reference --device cpu".split()
    figures = []
    for more in ((), ("--no-use-precision-aware-optimizer",)):
        plan = read_plan([*small, *more], {}, lambda config: config.vocab_size or 512)
        assert plan.precision.params == "bf16" and plan.precision.store_param_remainders == (not more)
        figures.append(pipelines.train(plan, ParallelContext.single(dtype=torch.bfloat16)))
    EXACT.check_all(*figures, f"{name} with remainders")
