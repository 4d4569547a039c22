"""Docstrings, raised errors, skipped tests, private paths."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house_rules.source import PROGRAM, ROOT, Source, report, source, sources

EVERYTHING = (*PROGRAM, "tests", "setup.py")
TEXT_FOLDERS = ("arguments", "megatron_moe", "tools", "tests", "scripts", "docs", "benchmarks", ".ci")
TEXT_SUFFIXES = (".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", "")
SKIPS = ("skip", "skipif", "importorskip", "xfail", "skipTest", "skipUnless", "skipIf", "SkipTest")
PRIVATE = re.compile(r"(?<![\w.$}*])/(?:work|tmp|home|root|Users|opt/wheels|opt/pypi)(?:/|\b)")
"""Absolute paths of one machine. `/` followed by a word is allowed inside longer paths and patterns."""
PATHS_OF_IMAGES = ("Dockerfile", ".dockerignore")


def docstring_findings(files: tuple[Source, ...]) -> list[str]:
    return [
        f"{file.path}: no module docstring" for file in files if file.text.strip() and not ast.get_docstring(file.tree)
    ]


def skip_findings(files: tuple[Source, ...]) -> list[str]:
    return [
        f"{file.path}:{node.lineno} {name}"
        for file in files
        for node in file.nodes
        if (name := node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else "")
        in SKIPS
    ]


def private_findings(path: str, text: str) -> list[str]:
    return [
        f"{path}:{number} {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), start=1)
        if "/" in line and PRIVATE.search(line)
    ]


def text_files() -> Iterator[Path]:
    for folder in TEXT_FOLDERS:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if _is_text(path))
    yield from (path for path in sorted(ROOT.iterdir()) if _is_text(path) and path.name not in PATHS_OF_IMAGES)


def _is_text(path: Path) -> bool:
    generated = {"__pycache__", ".git"} & set(path.parts) or any(part.endswith(".egg-info") for part in path.parts)
    return path.is_file() and path.suffix in TEXT_SUFFIXES and not generated


def test_every_file_has_a_docstring():
    report(docstring_findings(sources(*EVERYTHING)), "every Python file has a module docstring")


def test_no_test_is_skipped():
    report(skip_findings(sources("tests")), "no test is skipped or expected to fail; GPU tests carry a marker instead")


def test_no_file_names_a_path_of_one_machine():
    findings = [
        finding
        for path in text_files()
        for finding in private_findings(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8", errors="replace"))
    ]
    report(findings, "no absolute paths of one machine in code, tests and documents")


def test_every_kind_of_run_error_is_raised_somewhere():
    (table,) = [file for file in sources("megatron_moe/config") if file.path.endswith("exit_codes.py")]
    kinds = {node.name for node in table.tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Problem")}
    raised = {
        name.id
        for file in sources(*PROGRAM)
        if file is not table
        for node in file.nodes
        if isinstance(node, ast.Call) and isinstance(name := node.func, ast.Name)
    }
    report(sorted(kinds - raised), "every RunError subclass of config/exit_codes.py is raised")


def test_every_test_file_has_tests_with_descriptive_names():
    findings = []
    for file in sources("tests"):
        if file.path.rsplit("/", 1)[-1].startswith("test_"):
            names = [node.name for node in file.nodes if isinstance(node, ast.FunctionDef)]
            tests = [name for name in names if name.startswith("test")]
            findings += [f"{file.path}: no tests"] * (not tests)
            findings += [f"{file.path}: {name} is not descriptive" for name in tests if name.count("_") < 2]
    report(findings, "test names are descriptive")


@pytest.mark.parametrize("line", ["see " + "/" + "work/main", 'open("' + "/" + 'tmp/x")', "cd " + "/" + "home/me/code"])
def test_the_check_finds_a_planted_path(line):
    assert private_findings("a.md", line)


@pytest.mark.parametrize("line", ["tests/work/x", "https://example.org/home", "$HOME/runs", "a/b", "and/or"])
def test_the_check_accepts_ordinary_text(line):
    assert private_findings("a.md", line) == []


def test_the_checks_find_a_planted_skip_and_a_missing_docstring():
    planted = source("tests/test_a.py", "import pytest\npytest." + "skip('later')")
    assert len(skip_findings((planted,))) == 1
    assert len(docstring_findings((planted,))) == 1
    assert docstring_findings((source("a/__init__.py", ""),)) == []
