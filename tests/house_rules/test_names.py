"""Unique class names, and packages of more than one module."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable

from tests.house_rules.source import PROGRAM, Source, report, source, sources


def clashes(files: Iterable[Source]) -> dict[str, list[str]]:
    """Locations of every class name that occurs several times; leading underscores are ignored."""
    places = defaultdict(list)
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{file.path}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def single_modules(paths: Iterable[str]) -> list[str]:
    """Packages whose only content is one module."""
    paths = set(paths)
    contents = Counter(path.rpartition("/")[0] for path in paths if not path.endswith("/__init__.py"))
    packages = {path.rpartition("/")[0] for path in paths if path.endswith("/__init__.py")}
    parents = {package.rpartition("/")[0] for package in packages}
    return sorted(package for package in packages - parents if contents[package] < 2)


def test_class_names_are_unique():
    found = clashes(sources(*PROGRAM, "benchmarks"))
    report([f"{name}: {', '.join(places)}" for name, places in found.items()], "two classes with one name")


def test_packages_have_several_modules():
    report(single_modules(file.path for file in sources(*PROGRAM)), "R5: no package with a single module")


def test_the_checks_find_planted_names():
    planted = source("a.py", "class Router: ...")
    assert list(clashes([planted, source("b.py", "class _Router: ...")])) == ["Router"]
    assert single_modules(["a/__init__.py", "a/b.py", "c/__init__.py", "c/d.py", "c/e.py"]) == ["a"]
