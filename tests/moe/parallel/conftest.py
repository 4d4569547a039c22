"""Replaces the DeepEP library by a stand-in in the tests of token dispatchers."""

import pytest


@pytest.fixture(autouse=True)
def always_with_deep_ep(deep_ep_stand_in: None) -> None:
    """Installs the stand-in of DeepEP for every test in this folder."""
