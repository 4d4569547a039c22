"""pytest plugin that applies the mutant named by the variable MUTANT (`pytest -p tests.mutants.plugin`)."""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    from tests.mutants.mutants import MUTANTS  # imports torch: only after tests/conftest.py has set the environment

    MUTANTS[os.environ["MUTANT"]].apply()
