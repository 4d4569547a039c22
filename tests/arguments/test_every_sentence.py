"""Coverage by construction: every sentence that a check can say is read out of the source, and some case makes it.

A sentence is the first part of a pair (what is wrong, what mends it) in arguments/checks; its blanks match anything.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from arguments.checks import hints
from tests.arguments.test_checks import ALL_CASES, HINT_CASES, notes_of
from tests.helpers.command_lines import texts_of

CHECKS = Path(hints.__file__).parent
NOT_RULES = ("run.py", "hints.py")


def pattern_of(node: ast.expr) -> str | None:
    """The regular expression of a text with blanks; None if the expression is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(pattern_of(part) or ".*" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = (pattern_of(left), pattern_of(right))
            return "".join(side or ".*" for side in sides) if any(sides) else None
    return None


def sentences_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, pattern) of the first part of every pair that a function returns."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    yield from _of_value(node.value)


def _of_value(value: ast.expr) -> Iterator[tuple[int, str]]:
    for node in ast.walk(value):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            pattern = pattern_of(node.elts[0])
            if pattern is not None:
                yield node.lineno, pattern


@cache
def written() -> dict[str, str]:
    """Every sentence in the source -> its place."""
    found = {}
    for path in sorted(CHECKS.glob("*.py")):
        if path.name not in NOT_RULES:
            for line, pattern in sentences_of(ast.parse(path.read_text(encoding="utf-8"))):
                found[pattern] = f"{path.name}:{line}"
    return found


@cache
def said() -> tuple[str, ...]:
    """Every sentence that the cases of the rules bring about."""
    cases = ALL_CASES
    return tuple(text for case in cases for text in texts_of(case.bad, case.without, case.environ))


def test_every_sentence_is_said_by_a_case():
    silent = [
        f"{place}: {pattern}"
        for pattern, place in written().items()
        if not any(re.fullmatch(pattern, text) for text in said())
    ]
    assert silent == []


def test_most_sentences_are_found():
    assert len(written()) > 100


def test_sentences_are_read_out_of_the_source():
    source = """
def rule(x):
    if x:
        return f"{x} is (bad)" + x, "mend it"
    return None if x else ("plain", "mend")
"""
    assert {pattern for _, pattern in sentences_of(ast.parse(source))} == {r".*\ is\ \(bad\).*", "plain"}


@pytest.mark.parametrize("hint", hints.HINTS, ids=lambda hint: hint.__name__)
def test_every_hint_is_given_by_a_case(hint):
    notes = [note for more, without, _ in HINT_CASES for note in notes_of(more, without)]
    patterns = [
        pattern_of(node.value)
        for function in ast.parse((CHECKS / "hints.py").read_text(encoding="utf-8")).body
        if isinstance(function, ast.FunctionDef) and function.name == hint.__name__
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None and pattern_of(node.value) is not None
    ]
    assert patterns
    for pattern in patterns:
        assert any(re.fullmatch(pattern or "", note) for note in notes), pattern
