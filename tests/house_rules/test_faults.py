"""Every fault and guarantee has a test, and every named test exists."""

import ast
from functools import cache
from pathlib import Path

from tests.faults.catalogue import FAULTS, GUARANTEES, HARDWARE, NUM_FAULTS, NUM_GUARANTEES

ROOT = Path(__file__).parents[2]


@cache
def functions(path: Path) -> frozenset[str]:
    """Names of the functions of a file, read without importing it."""
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def test_every_fault_and_guarantee_has_a_test() -> None:
    assert sorted(FAULTS) == [number for number in range(1, NUM_FAULTS + 1) if number != HARDWARE]
    assert sorted(GUARANTEES) == list(range(1, NUM_GUARANTEES + 1))
    assert all(FAULTS.values()) and all(GUARANTEES.values())


def test_every_named_test_exists() -> None:
    names = {name for table in (FAULTS, GUARANTEES) for tests in table.values() for name in tests}
    missing = []
    for name in sorted(names):
        file, _, function = name.partition("::")
        if not (ROOT / file).is_file() or function not in functions(ROOT / file):
            missing.append(name)
    assert missing == []
