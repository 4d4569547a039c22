"""Every layout has the loss, metrics, gradient norm, gradients and weights of one rank in fp64."""

import hashlib
import os
from itertools import combinations
from pathlib import Path

import pytest

from megatron_moe.build import build_train_loader
from megatron_moe.layout_check.samples import random_datasets
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.helpers.thinned import nightly_only, thinned
from tests.parity.cells import NUM_STEPS, command_of, compare_cell, plan_of
from tests.parity.cover import all_combinations, cells_of_every_value, cover, domains_of
from tests.parity.dimensions import DIMENSIONS, cell_of, name_of

GOLDENS = Path(__file__).parent.parent / "goldens"
SINGLE = (GOLDENS / "parity_single.txt").read_text(encoding="utf-8").splitlines()
PAIRWISE_FILES = {graphs: GOLDENS / f"parity_pairs{'_of_graphs' if graphs else ''}.txt" for graphs in (False, True)}
"""Files of the pairwise covering arrays without and with CUDA graphs, which take 6 s to compute."""
PAIRWISE, WITH_GRAPHS = (path.read_text(encoding="utf-8").splitlines() for path in PAIRWISE_FILES.values())
SINGLE_IN_CI = [name for at, name in enumerate(cells_of_every_value(SINGLE)) if at % 4 == 1 or "graphs=step" in name]
"""Cells with one feature that CI runs; the nightly run has all, and `PAIRWISE_IN_CI` all other values."""
GRAPHS_STEP = 40
"""CI runs every `GRAPHS_STEP`-th cell with CUDA graphs."""


def pytest_generate_tests(metafunc):
    """Generates the covering array of triples, which takes 10 s, only if slow tests are selected."""
    if "triple" in metafunc.fixturenames:
        metafunc.parametrize("triple", () if "not slow" in metafunc.config.option.markexpr else cover(3).names)


def check(name: str, *, processes: bool = False) -> None:
    comparison = compare_cell(name, processes=processes)
    assert comparison.all_equal, f"{comparison.text()}\nrepeat with: {command_of(name)}"


@pytest.mark.parametrize("name", nightly_only(SINGLE, set(SINGLE) - set(SINGLE_IN_CI)), ids=str)
def test_one_feature_equals_one_rank(name):
    check(name)


PAIRWISE_IN_CI = cells_of_every_value(PAIRWISE)


@pytest.mark.parametrize("name", nightly_only(PAIRWISE, set(PAIRWISE) - set(PAIRWISE_IN_CI)), ids=str)
def test_features_together_equal_one_rank(name):
    check(name)


@pytest.mark.parametrize("name", thinned(WITH_GRAPHS, GRAPHS_STEP), ids=str)
def test_features_together_with_graphs_equal_one_rank(name):
    check(name)


@pytest.mark.slow
def test_three_features_together_equal_one_rank(triple):
    check(triple)


@pytest.mark.parametrize(
    "name",
    [
        "tp=2 sp=on pp=2 vpp=2 etp=2 dispatcher=allgather mtp=on head=tied accumulation=2",
        "dp=4 ep=4 dispatcher=hierarchical overlap=experts zero=on accumulation=2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "dp=4 ep=4 dispatcher=alltoall zero=on overlap=params accumulation=2",
                "cp=2 pp=2 dp=2 ep=4 dispatcher=alltoall overlap=grads balance=bias accumulation=2",
            )
        ),
    ],
)
def test_ranks_that_are_processes_equal_one_rank(name):
    check(name, processes=True)


def test_every_value_has_a_cell_in_ci():
    names = (*PAIRWISE_IN_CI, *SINGLE_IN_CI, *WITH_GRAPHS[::GRAPHS_STEP])
    found = {choice for name in names for choice in cell_of(name).items()}
    wanted = {(dimension, value) for dimension, values in DIMENSIONS.items() for value in values}
    assert wanted <= found, f"no cell for {sorted(wanted - found)}"


def check_cover(strength: int, ranks: int | None = None, *, graphs: bool = False) -> tuple[int, str]:
    """Checks that every legal combination occurs; returns the number of cells and a checksum of their names."""
    names, impossible = cover(strength, ranks, graphs=graphs)
    together = {each for name in names for each in combinations(sorted(cell_of(name).items()), strength)}
    missing = [
        each
        for each in all_combinations(strength, domains_of(graphs=graphs))
        if each not in together and each not in impossible
    ]
    assert not missing, f"{len(missing)} combinations occur in no cell, such as {missing[0]}"
    return len(names), hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pairwise_cells_of_the_golden_file_contain_every_legal_pair(graphs):
    text = "".join(f"{name}\n" for name in cover(2, graphs=graphs).names)
    if os.environ.get("UPDATE_GOLDENS"):
        PAIRWISE_FILES[graphs].write_text(text, encoding="utf-8")
    assert PAIRWISE_FILES[graphs].read_text(encoding="utf-8") == text, "after an intended change set UPDATE_GOLDENS=1"
    check_cover(2, graphs=graphs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strength", "ranks", "expected"),
    [(2, 2, (66, "ae52c3c20ad80f13")), (2, 4, (69, "6c8ed0bbaab8b2b2")), (3, None, (487, "a2869948ff0d93c8"))],
)
def test_other_cells_are_reproducible_and_contain_every_legal_combination(strength, ranks, expected):
    assert check_cover(strength, ranks) == expected, "the cells changed; after an intended change update this test"


def test_impossible_pairs_break_a_rule():
    impossible = {frozenset(each) for each in cover(2).impossible}
    assert frozenset({("pp", "1"), ("vpp", "2")}) in impossible
    assert frozenset({("tp", "4"), ("cp", "4")}) in impossible, "16 ranks"
    assert frozenset({("cp", "2"), ("dropout", "on")}) in impossible
    assert frozenset({("tp", "2"), ("cp", "2")}) not in impossible


def test_dynamic_context_parallelism_uses_degrees_1_and_2():
    name = next(name for name in SINGLE if cell_of(name)["cpdegree"] == "dynamic")
    plan = plan_of(cell_of(name))
    datasets = random_datasets(plan, num_steps=NUM_STEPS)

    def degrees(context: ParallelContext) -> set[int]:
        loader = build_train_loader(plan, context, datasets)
        return {len(batch.context.tokens.part.of_ranks) for _ in range(NUM_STEPS) for batch in loader.next_step()}

    assert set.union(*on_threads(plan.parallel, degrees)) == {1, 2}


@pytest.mark.parametrize("name", ["plain", "dp=4 mtp=on", "tp=2 sp=on dp=2 ep=4 dispatcher=alltoall"])
def test_a_cell_name_round_trips(name):
    assert name_of(cell_of(name)) == name
