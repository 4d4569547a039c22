"""Every layout gives the loss, metrics, gradient norm, gradients and weights of one rank, in double precision."""

from itertools import combinations
from pathlib import Path

import pytest

from megatron_moe.build import build_train_loader
from megatron_moe.layout_check.samples import random_datasets
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.parity.cells import NUM_STEPS, command_of, compare_cell, plan_of
from tests.parity.cover import (
    GOLDEN,
    GOLDEN_OF_RANKS,
    GOLDEN_TRIPLES,
    Choices,
    all_combinations,
    pairwise_cover,
    threewise_cover,
)
from tests.parity.dimensions import DIMENSIONS, available, cell_of, name_of, values_of

SINGLE = Path(__file__).parent.parent / "goldens" / "parity_single.txt"


def names(path: Path) -> list[str]:
    """The cells of a list that can run today."""
    return [name for name in path.read_text().splitlines() if available(cell_of(name))]


def check(name: str, *, processes: bool = False) -> None:
    comparison = compare_cell(name, processes=processes)
    assert comparison.equal, f"{comparison.text()}\nrepeat with: {command_of(name)}"


@pytest.mark.parametrize("name", names(SINGLE), ids=str)
def test_one_feature_equals_one_rank(name):
    check(name)


@pytest.mark.parametrize("name", names(GOLDEN), ids=str)
def test_features_together_equal_one_rank(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", names(GOLDEN_TRIPLES), ids=str)
def test_three_features_together_equal_one_rank(name):
    check(name)


@pytest.mark.parametrize(
    "name",
    [
        "dp=4 ep=4 dispatcher=alltoall zero=on overlap=params accumulation=2",
        "tp=2 sp=on pp=2 vpp=2 etp=2 dispatcher=allgather mtp=on head=tied accumulation=2",
        "cp=2 pp=2 dp=2 ep=4 dispatcher=alltoall overlap=grads balance=bias accumulation=2",
    ],
)
def test_ranks_that_are_processes_equal_one_rank(name):
    check(name, processes=True)


def test_every_value_has_a_cell_of_its_own():
    found = {choice for name in names(SINGLE) for choice in cell_of(name).items()}
    wanted = {(dimension, value) for dimension in DIMENSIONS for value in values_of(dimension)}
    assert wanted <= found, f"no cell for {sorted(wanted - found)}"


def check_cover(golden: Path, strength: int, cover: tuple[list[str], set[Choices]]) -> None:
    cells, impossible = cover
    assert names(golden) == cells, "python -m tests.parity.cover --write"
    together = {each for name in cells for each in combinations(sorted(cell_of(name).items()), strength)}
    missing = [each for each in all_combinations(strength) if each not in together and each not in impossible]
    assert not missing, f"{len(missing)} combinations stand in no cell, such as {missing[0]}"


@pytest.mark.parametrize(("ranks", "golden"), [(None, GOLDEN), *GOLDEN_OF_RANKS.items()])
def test_the_golden_list_is_what_the_generator_makes_and_every_two_values_that_can_meet_do(ranks, golden):
    check_cover(golden, 2, pairwise_cover(ranks))


@pytest.mark.slow
def test_the_golden_list_of_triples_is_what_the_generator_makes_and_every_three_values_that_can_meet_do():
    check_cover(GOLDEN_TRIPLES, 3, threewise_cover())


def test_what_the_generator_calls_impossible_breaks_a_rule_that_can_be_named():
    impossible = {frozenset(each) for each in pairwise_cover()[1]}
    assert frozenset({("pp", "1"), ("vpp", "2")}) in impossible
    assert frozenset({("tp", "4"), ("cp", "4")}) in impossible, "16 ranks"
    assert frozenset({("cp", "2"), ("dropout", "on")}) in impossible
    assert frozenset({("tp", "2"), ("cp", "2")}) not in impossible


def test_a_dynamic_cell_splits_its_microbatches_in_several_ways():
    name = next(name for name in names(SINGLE) if cell_of(name)["cpdegree"] == "dynamic")
    plan = plan_of(cell_of(name))
    datasets = random_datasets(plan, num_steps=NUM_STEPS)

    def degrees(context: ParallelContext) -> set[int]:
        loader = build_train_loader(plan, context, datasets)
        return {len(batch.context.tokens.part.of_ranks) for _ in range(NUM_STEPS) for batch in loader.next_step()}

    assert set.union(*on_threads(plan.parallel, degrees)) == {1, 2}


@pytest.mark.parametrize("name", ["plain", "dp=4 mtp=on", "tp=2 sp=on dp=2 ep=4 dispatcher=alltoall"])
def test_a_cell_is_known_by_its_name(name):
    assert name_of(cell_of(name)) == name
