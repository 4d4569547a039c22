"""Data that all runs of this folder share."""

import pytest

from tests.end_to_end.tiny_run import make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Prefix of a small `.bin/.idx` of real text."""
    return make_data(tmp_path_factory.mktemp("data"))
