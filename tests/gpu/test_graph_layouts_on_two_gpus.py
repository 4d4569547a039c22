"""CUDA graphs in the layouts of published recipes: 20 replays are 20 computed steps bit for bit."""

import pickle
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.gpu.graph_layouts import CASES, run_cases
from tests.helpers.ranks import free_port
from tests.helpers.tolerances import EXACT

pytestmark = pytest.mark.gpu2


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Folder with the results of the selected cases, and the errors of those that failed. Two processes run all cases;
    if one fails, two new ones go on with the next."""
    items = [item for item in request.session.items if item.path == request.path]
    selected = {item.callspec.params["name"] for item in items}  # type: ignore[attr-defined]
    folder, errors = tmp_path_factory.mktemp("cases"), {}
    names = [name for name in CASES if name in selected]
    while names:
        ports = [free_port() for name in names for _ in range(1 + len(CASES[name][1]))]
        try:
            mp.spawn(run_cases, args=(names, ports, str(folder)), nprocs=2)
            break
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            done = [all((folder / f"{name}.{rank}.pickle").exists() for rank in range(2)) for name in names]
            failed = done.index(False)
            errors[names[failed]] = str(error)
            names = names[failed + 1 :]
    return folder, errors


@pytest.mark.parametrize("name", CASES)
def test_replays_equal_computed_steps(name: str, results: tuple[Path, dict[str, str]]) -> None:
    folder, errors = results
    assert name not in errors, errors[name]
    for rank in range(2):
        expected, *found = pickle.loads((folder / f"{name}.{rank}.pickle").read_bytes())
        for words, figures in zip(CASES[name][1], found, strict=True):
            EXACT.check_all(figures, expected, f"{name}, {words}, rank {rank}")
