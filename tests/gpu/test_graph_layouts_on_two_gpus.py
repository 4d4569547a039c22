"""CUDA graphs in the layouts of published recipes: 20 replays are 20 computed steps bit for bit."""

import pickle
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.gpu.graph_layouts import CASES, run_case
from tests.helpers.ranks import free_port
from tests.helpers.tolerances import EXACT

pytestmark = pytest.mark.gpu2


@pytest.mark.parametrize("name", CASES)
def test_replays_equal_computed_steps(name: str, tmp_path: Path) -> None:
    graphs = CASES[name][1]
    ports = [free_port() for _ in range(1 + len(graphs))]
    mp.spawn(run_case, args=(name, ports, str(tmp_path)), nprocs=2)
    for rank in range(2):
        expected, *found = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        for words, figures in zip(graphs, found, strict=True):
            EXACT.check_all(figures, expected, f"{name}, {words}, rank {rank}")
