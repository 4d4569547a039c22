"""The catalogue of faults names a test for every one, and every test that it names is there."""

import ast
from functools import cache
from pathlib import Path

from tests.faults.catalogue import FAULTS, HARDWARE, NUM_FAULTS, NUM_PROMISES, PROMISES

ROOT = Path(__file__).parents[2]


@cache
def functions(path: Path) -> frozenset[str]:
    """Names of the test functions of a file, which is not imported; those of a class too."""
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def test_every_fault_and_promise_has_a_proof() -> None:
    assert sorted(FAULTS) == [number for number in range(1, NUM_FAULTS + 1) if number != HARDWARE]
    assert sorted(PROMISES) == list(range(1, NUM_PROMISES + 1))
    assert all(FAULTS.values()) and all(PROMISES.values())


def test_every_proof_is_a_test_that_exists() -> None:
    names = {name for table in (FAULTS, PROMISES) for tests in table.values() for name in tests}
    missing = []
    for name in sorted(names):
        file, _, function = name.partition("::")
        if not (ROOT / file).is_file() or function not in functions(ROOT / file):
            missing.append(name)
    assert missing == []
