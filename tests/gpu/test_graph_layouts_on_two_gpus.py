"""CUDA graphs in the layouts of published recipes: 20 replayed steps equal 20 eager steps bit for bit.

All cases share one process group. A case that fails or times out destroys the group; the next case creates another.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from tests.gpu.graph_layouts import CASES, ENVIRONMENT, SHORT_OF_PAGES, trained
from tests.helpers.process_pool import start_pool
from tests.helpers.tolerances import EXACT

pytestmark = pytest.mark.gpu2

LIMIT_S = 120.0
Train = Callable[[str, bool], list[dict[str, torch.Tensor]]]
"""Flags, and whether a step is short of pages -> losses and weights of every rank."""


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    pool, both = start_pool("spawn"), ParallelConfig(world_size=2)

    @cache
    def run(words: str, short_of_pages: bool) -> list[dict[str, torch.Tensor]]:
        begun = time.monotonic()
        found = pool.run(
            both, trained, (words, short_of_pages), dtype=torch.bfloat16, seed=1, timeout=LIMIT_S, on_gpu=True
        )
        print(f"{time.monotonic() - begun:.1f} s: {words}", flush=True)
        return found

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield run
        pool.close()


@pytest.mark.parametrize(("name", "graphs"), [(name, words) for name, (_, kinds) in CASES.items() for words in kinds])
def test_replays_equal_computed_steps(name: str, graphs: str, train: Train) -> None:
    layout, _ = CASES[name]
    short_of_pages = name in SHORT_OF_PAGES
    expected = train(layout, short_of_pages)
    for rank, figures in enumerate(train(f"{layout} {graphs}", short_of_pages)):
        EXACT.check_all(figures, expected[rank], f"{name}, {graphs}, rank {rank}")
