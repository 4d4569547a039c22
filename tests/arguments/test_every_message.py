"""Every message of the rules in arguments/checks is produced by a case.

The messages are extracted from the source: first elements of yielded (problem, remedy) pairs and messages of `conflict`
and `lacks`, with wildcards for formatted values.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from arguments.checks import hints
from arguments.checks.run import HINTS
from arguments.checks.violation import conflict, lacks
from tests.arguments.test_checks import HINT_CASES, notes_of
from tests.helpers.check_cases import CASES

CHECKS = Path(hints.__file__).parent
OTHER_FILES = ("run.py", "hints.py")
PHRASES = {"conflict": conflict, "lacks": lacks}


def pattern_of(node: ast.expr) -> str | None:
    """Regular expression that matches a string expression; None for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(pattern_of(part) or ".*" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = (pattern_of(left), pattern_of(right))
            return "".join(side or ".*" for side in sides) if any(sides) else None
    return None


def messages_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, pattern) of the first element of every yielded pair."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Yield) and node.value is not None:
                    yield from _of_value(node.value)


def _of_value(value: ast.expr) -> Iterator[tuple[int, str]]:
    for node in ast.walk(value):
        match node:
            case ast.Tuple(elts=[what, _]) if pattern := pattern_of(what):
                yield node.lineno, pattern
            case ast.Call(func=ast.Name(id=name), args=[first, second, *_]) if name in PHRASES:
                message, _ = PHRASES[name]("FIRST", "SECOND", "")
                pattern = re.escape(message).replace("FIRST", pattern_of(first) or ".*")
                yield node.lineno, pattern.replace("SECOND", pattern_of(second) or ".*")


@cache
def declared() -> dict[str, str]:
    """Maps the pattern of every message to the line that contains it."""
    found = {}
    for path in sorted(CHECKS.glob("*.py")):
        if path.name not in OTHER_FILES:
            for line, pattern in messages_of(ast.parse(path.read_text(encoding="utf-8"))):
                found[pattern] = f"{path.name}:{line}"
    return found


@cache
def produced() -> tuple[str, ...]:
    """All messages that the cases produce."""
    return tuple(problem.what for case in CASES for problem in case.problems)


def test_every_message_is_produced_by_a_case():
    missing = [
        f"{place}: {pattern}"
        for pattern, place in declared().items()
        if not any(re.fullmatch(pattern, text) for text in produced())
    ]
    assert missing == []


def test_most_messages_are_found():
    assert len(declared()) > 100


def test_messages_are_extracted_from_the_source():
    source = """
def rule(x):
    if x:
        yield f"{x} is (bad)" + x, "fix it"
    yield ("plain", "fix")
    yield conflict("--a", f"--b {x}", "fix")
"""
    messages = {pattern for _, pattern in messages_of(ast.parse(source))}
    assert messages == {r".*\ is\ \(bad\).*", "plain", r"\-\-a\ cannot\ be\ combined\ with\ \-\-b\ .*"}


@cache
def hints_of_cases() -> tuple[str, ...]:
    """Notes of the command lines of all cases of hints."""
    return tuple(note for more, without, _ in HINT_CASES for note in notes_of(more, without))


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: hint.__name__)
def test_every_hint_is_produced_by_a_case(hint):
    patterns = [
        pattern_of(node.value)
        for function in ast.parse((CHECKS / "hints.py").read_text(encoding="utf-8")).body
        if isinstance(function, ast.FunctionDef) and function.name == hint.__name__
        for node in ast.walk(function)
        if isinstance(node, ast.Yield) and node.value is not None and pattern_of(node.value) is not None
    ]
    assert patterns
    for pattern in patterns:
        assert any(re.fullmatch(pattern or "", note) for note in hints_of_cases()), pattern
