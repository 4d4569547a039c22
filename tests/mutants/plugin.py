"""pytest plugin that applies the mutant named by the variable MUTANT (`pytest -p tests.mutants.plugin`)."""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    from tests.mutants.catalogue import MUTANTS  # imports torch, so tests/conftest.py must set the environment before

    MUTANTS[os.environ["MUTANT"]].apply()
