"""Where a tool's own words end, and numbers of them."""

import argparse

import pytest

from tools.words import positive, words_around_dashes


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


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "²"])
def test_a_count_is_at_least_1(text):
    assert positive("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match="no whole number of at least 1"):
        positive(text)
