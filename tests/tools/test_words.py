"""Where a tool's own words end."""

import pytest

from tools.words import words_around_dashes


@pytest.mark.parametrize(
    ("argv", "own", "theirs"),
    [
        ("", "", ""),
        ("--steps 3", "--steps 3", ""),
        ("--steps 3 --", "--steps 3", ""),
        ("-- --recipe q6", "", "--recipe q6"),
        ("none --steps 3 -- --recipe q6 -- more", "none --steps 3", "--recipe q6 -- more"),
    ],
)
def test_the_first_dashes_divide(argv, own, theirs):
    assert words_around_dashes(tuple(argv.split())) == (own.split(), theirs.split())
