"""Every layout gives the loss, metrics, gradient norm, gradients and weights of one rank, in double precision."""

from pathlib import Path

import pytest

from tests.parity.cells import command_of, compare_cell
from tests.parity.cover import GOLDEN, all_pairs, pairwise_cover
from tests.parity.dimensions import DIMENSIONS, available, cell_of, name_of, pairs, values_of

SINGLE = Path(__file__).parent.parent / "goldens" / "parity_single.txt"


def names(path: Path) -> list[str]:
    """The cells of a list that can run today."""
    return [name for name in path.read_text().splitlines() if available(cell_of(name))]


def check(name: str, *, processes: bool = False) -> None:
    comparison = compare_cell(name, processes=processes)
    assert comparison.equal, f"{comparison.text()}\nrepeat with: {command_of(name)}"


@pytest.mark.parametrize("name", names(SINGLE))
def test_one_feature_equals_one_rank(name):
    check(name)


@pytest.mark.parametrize("name", names(GOLDEN))
def test_features_together_equal_one_rank(name):
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


def test_the_golden_list_is_what_the_generator_makes_and_every_two_values_that_can_meet_do():
    cells, impossible = pairwise_cover()
    assert names(GOLDEN) == cells, "python -m tests.parity.cover --write"
    together = {pair for name in cells for pair in pairs(cell_of(name))}
    missing = [pair for pair in all_pairs() if pair not in together and pair not in impossible]
    assert not missing, f"{len(missing)} pairs stand in no cell, such as {missing[0]}"


@pytest.mark.parametrize("name", ["plain", "dp=4 mtp=on", "tp=2 sp=on dp=2 ep=4 dispatcher=alltoall"])
def test_a_cell_is_known_by_its_name(name):
    assert name_of(cell_of(name)) == name
