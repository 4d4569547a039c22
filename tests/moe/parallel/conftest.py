"""Stand-in of the DeepEP library for the tests of token dispatchers."""

import pytest


@pytest.fixture(autouse=True)
def always_with_deep_ep(deep_ep_stand_in: None) -> None:
    """All tests of this folder use the stand-in."""
