"""Restores the environment after each test, because benchmarks set variables for their plans."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def environment_of_a_plan() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield
