"""Samples of parametrised tests keep every value of every parameter where their size allows it."""

from itertools import product
from pathlib import Path

import pytest

from tests.helpers.sampling import LEFT_OUT, SAMPLED, sample


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4), (3, 2, 4), (5, 5)])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_sample_has_its_size_and_every_value(sizes: tuple[int, ...], n: int) -> None:
    cases = [frozenset(enumerate(place)) for place in product(*map(range, sizes))]
    taken = sample(cases, n)
    assert len(taken) == max(-(-len(cases) // n), 2)
    if len(taken) >= max(sizes):
        assert frozenset().union(*(cases[place] for place in taken)) == frozenset().union(*cases)


def test_cases_of_one_parameter_are_evenly_spaced() -> None:
    assert sample([frozenset({place}) for place in range(7)], 3) == {0, 3, 6}


def test_sampled_files_exist() -> None:
    folder = Path(__file__).parents[1]
    assert not [name for name in (*SAMPLED, *LEFT_OUT) if not _exists(*(folder / name).as_posix().split("::"))]


def _exists(path: str, test: str = "") -> bool:
    return Path(path).is_file() and f"def {test}" in Path(path).read_text()
