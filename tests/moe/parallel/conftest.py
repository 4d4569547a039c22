"""Stand-in of the DeepEP library for the tests of token dispatchers."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parents[2] / "stand_ins"


@pytest.fixture(autouse=True)
def stand_in_for_deep_ep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield
    for name in ("deep_ep", "deep_ep.hybrid_ep_buffer", "hybrid_ep_cpp"):
        sys.modules.pop(name, None)
