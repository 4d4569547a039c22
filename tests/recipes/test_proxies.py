"""Every recipe trains on the machine at hand when `--proxy` shrinks it, but for those with parts that are missing."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from arguments.flags import Registry
from arguments.read import read_plan
from arguments.recipe_table import without_proxy
from arguments.recipes import about, recipe_names
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.parallel.context import ParallelContext
from pretrain_moe import main
from tests.end_to_end.tiny_run import records
from tests.helpers import pipelines
from tests.helpers.tolerances import EXACT

REFUSED = Path(__file__).resolve().parents[1] / "goldens" / "recipes_without_proxy.txt"
NAMES = recipe_names()
NUM_ITERATIONS = 5
UPDATE = "run python tools/docs_gen.py recipes, and review the difference"
TRAINING = sorted(set(NAMES) - {line.partition(":")[0] for line in REFUSED.read_text(encoding="utf-8").splitlines()})


def first_of_every_model() -> list[str]:
    """One recipe per model is enough for every change of the code; the others differ in layout alone."""
    registry = Registry.declared()
    first: dict[str, str] = {}
    for name in TRAINING:
        first.setdefault(about(name, registry).model, name)
    return list(first.values())


FIRST = first_of_every_model()


@pytest.fixture(autouse=True)
def variables_of_a_run_end_with_it() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def train(name: str, run: Path) -> list[float]:
    """The losses of a small run."""
    assert main(["--recipe", name, "--proxy", "--device", "cpu", "--run-dir", str(run)], {}) == ExitCode.OK
    return [row["lm loss"] for row in records(run) if "lm loss" in row]


def test_the_list_of_recipes_without_a_proxy_is_the_golden_one():
    assert REFUSED.read_text(encoding="utf-8") == without_proxy(), UPDATE


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_proxies_fold_to_any_number_of_ranks(num_ranks: int):
    environ = {"RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(num_ranks)}
    for name in TRAINING:
        plan = read_plan(["--recipe", name, "--proxy"], environ, lambda config: config.vocab_size or 512)
        assert plan.parallel.world_size == num_ranks


@pytest.mark.parametrize("name", FIRST)
def test_a_recipe_of_every_model_trains_as_a_proxy(name: str, tmp_path):
    losses = train(name, tmp_path / "run")
    assert len(losses) == NUM_ITERATIONS
    assert all(map(math.isfinite, losses))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TRAINING) - set(FIRST)))
def test_all_other_recipes_train_as_proxies(name: str, tmp_path):
    losses = train(name, tmp_path / "run")
    assert len(losses) == NUM_ITERATIONS
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("name", ["q6", "m8"])
def test_remainders_of_master_weights_train_to_the_bits_of_whole_ones(name: str):
    small = f"--recipe {name} --proxy --seq-length 32 --lr 1e-2 --kernel-backend reference --device cpu".split()
    figures = []
    for more in ((), ("--no-use-precision-aware-optimizer",)):
        plan = read_plan([*small, *more], {}, lambda config: config.vocab_size or 512)
        assert plan.precision.params == "bf16" and plan.precision.remainders == (not more)
        figures.append(pipelines.train(plan, ParallelContext.single(dtype=torch.bfloat16)))
    EXACT.check_all(*figures, f"{name} with remainders")
