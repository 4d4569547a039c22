"""Conversion of flag values from and to text, and layer patterns; text is never evaluated as code."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arguments.values import BadValue, LayerPattern, check_bounds, parse, split_words, strip_quotes, type_name, words_of

DEEPSEEK = (0,) * 3 + (1,) * 58


@pytest.mark.parametrize(
    ("annotation", "texts", "value"),
    [
        (int, ["12"], 12),
        (int | None, ["-1"], -1),
        (float, ["1e-6"], 1e-6),
        (float, ["3"], 3.0),
        (bool, ["true"], True),
        (bool, ["Off"], False),
        (str | None, ["a b"], "a b"),
        (str, ["'quoted'"], "quoted"),
        (Literal["a", "b"], ["b"], "b"),
        (Literal[0, 1, 2], ["2"], 2),
        (tuple[str, ...], ["0.3", "a", "0.7", "b"], ("0.3", "a", "0.7", "b")),
        (tuple[str, ...], [], ()),
        (tuple[int, ...], ["1", "2 3", "4,5"], (1, 2, 3, 4, 5)),
        (tuple[float, ...], ["[1e-2, 0]"], (0.01, 0.0)),
        (tuple[Literal["a", "b"], ...], ["['a', 'b']"], ("a", "b")),
        (tuple[int, int] | None, ["127,0"], (127, 0)),
        (tuple[int, int] | None, ["(-1, 0)"], (-1, 0)),
        (tuple[int, int, int] | None, ["8", "8", "1000"], (8, 8, 1000)),
        (LayerPattern | None, ["2"], 2),
        (LayerPattern, ["([0]*3+[1]*58)"], DEEPSEEK),
        (LayerPattern, ["'([0]*3+[1]*58)'"], DEEPSEEK),
        (LayerPattern, ["[0,1,1]"], (0, 1, 1)),
        (LayerPattern, [" ([0]*3 + 2*[1]) * 2 "], (0, 0, 0, 1, 1) * 2),
        (LayerPattern, ["2*3"], 6),
        (LayerPattern, ["0", "1", "1"], (0, 1, 1)),
        (LayerPattern, [str([0, 1] * 200)], (0, 1) * 200),
        (tuple[Literal["a", "b"], ...], ["[a b]"], ("a", "b")),
        (Literal["h100", "LayerNorm"], ["H100"], "h100"),
    ],
)
def test_text_is_converted_to_the_type_of_the_flag(annotation, texts, value):
    parsed = parse(annotation, texts)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("annotation", "texts", "message"),
    [
        (int, ["1.5"], "is not an integer"),
        (int, ["1", "2"], "takes one value, not 2"),
        (float, ["fast"], "is not a number"),
        (float, ["nan"], "is not a finite number"),
        (float, ["1e999"], "is not a finite number"),
        (int, ["9" * 400], "is not a finite number"),
        (float, ["-1e39"], r"is larger than 3.40282e\+38, the largest fp32 number"),
        (bool, ["maybe"], "takes no value"),
        (Literal["a", "b"], ["c"], "is not one of a, b"),
        (tuple[int, int] | None, ["127"], "takes 2 values, not 1"),
        (tuple[int, ...], ["1", "x"], "has x, which is not an integer"),
        (tuple[Literal["a", "b"], ...], ["a", "c"], "has c, which is not one of a, b"),
        (LayerPattern, ["([0]*3+[1]*99999)"], "exceeds 10000"),
    ],
)
def test_invalid_text_is_rejected_with_a_reason(annotation, texts, message):
    with pytest.raises(BadValue, match=message):
        parse(annotation, texts)


@pytest.mark.parametrize(
    "hostile",
    [
        "__import__('os').system('true')",
        "[0]*10**10",
        "[0]*(10**10)",
        "[[0]*3]*2",
        "([0]*9999)*9999",
        "[0]*9999+[1]*9999",
        "99999999999",
        "9999*9999",
        "-1",
        "1-1",
        "1.5",
        "True",
        "'x'*3",
        "[0][0]",
        "[x for x in [0]]",
        "f()",
        "[0]+1",
        "[0]*[1]",
        "",
        "(",
        "lambda: 0",
        "[0]*3; [1]",
        "(" * 300 + "1" + ")" * 300,
        "1" * 2000,
        "[0]*\0",
    ],
)
def test_an_invalid_pattern_is_rejected_without_evaluation(hostile):
    with pytest.raises(BadValue):
        parse(LayerPattern, [hostile])


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60).map(tuple))
def test_a_pattern_is_written_so_that_it_reads_back(pattern):
    assert parse(LayerPattern, words_of(LayerPattern, pattern)) == pattern


@given(st.floats(-(2.0**127), 2.0**127))
def test_a_number_is_written_so_that_it_reads_back(number):
    assert parse(float, words_of(float, number)) == number


@given(st.text(max_size=8))
def test_a_text_is_written_so_that_it_reads_back(text):
    assert parse(str, words_of(str, text)) == text


def test_a_pattern_is_written_as_runs():
    assert words_of(LayerPattern, DEEPSEEK) == ["([0]*3+[1]*58)"]


def test_one_level_of_matching_quotes_is_removed():
    assert strip_quotes("\"'a'\"") == "'a'"
    assert strip_quotes("'a\"") == "'a\""
    assert strip_quotes("'") == "'"


def test_bounds_hold_for_numbers_and_for_every_one_of_a_list():
    check_bounds((1, 2), 1, 3)
    with pytest.raises(BadValue, match="is less than 1"):
        check_bounds((1, 0), 1, None)
    with pytest.raises(BadValue, match="is not less than 1"):
        check_bounds(1.0, 0, 1)


def test_text_is_split_like_a_shell_would():
    assert split_words("a 'b c' d") == ["a", "b c", "d"]
    with pytest.raises(BadValue, match="quote"):
        split_words("a 'b")


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int | None, "int"),
        (bool, "switch"),
        (Literal["a", "b"] | None, "a | b"),
        (tuple[float, ...], "float ..."),
        (tuple[int, int], "int int"),
        (LayerPattern, "layer pattern"),
        (str, "text"),
    ],
)
def test_types_are_described_for_people(annotation, text):
    assert type_name(annotation) == text
