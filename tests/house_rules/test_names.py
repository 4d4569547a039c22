"""Vocabulary of identifiers and texts, unique class names, and packages of more than one module.

The ceilings are the current numbers of findings; they only go down.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from types import MappingProxyType

import pytest

from tests.house_rules.source import PROGRAM, Source, report, source, sources

PRODUCT = (*PROGRAM, "benchmarks")
CEILINGS = MappingProxyType({"texts": (0, 0), "identifiers": (0, 0)})
"""Allowed findings in (product, tests)."""

COMMENT = re.compile(r"(?:^|  |\t)\s*#\s*([^\"']*)$")
FRAGMENT = re.compile(
    r"(Of|So|By|As|Without|Behind|The same|Whoever|Whether or not|And|But|Or|For it|In it|That|Those|There)\b"
)
"""Docstrings start with a noun phrase or a verb."""
PHRASE = re.compile(
    r"\b(whoever|nobody|somebody|for ever|mend(s|ed|ing)?|wish(es|ed)?|besides?|(is|are|was|were) told|so many"
    r"|stands? (in|behind|for|there|alone|at|on)|tells? (what|how|where|why|which)|of (its|their) own|as ever|at hand"
    r"|forg(et|ets|ot|otten|etting)|travel(s|led|ling)?|go(es)? on|that is no|(is|are) no [a-z]+|left behind|in one go"
    r"|behind (it|them|the|a|that)|knows? (nothing|of|what|how)|turned|asked for|to and fro|kin)\b"
    r"|\bwhat (it|they|the|a|an|is|was|this|that|of)\b[^.?]{0,60}$",
    re.IGNORECASE,
)
WORDS = frozenset(
    """asked beside complaint complaints errand errands forget forgets forgotten grant granted judge judged looped mend
    mended nobody played rehearse somebody tally tallies told turned twice weigh whoever wish wishes""".split()
)
"""Words that no identifier contains: `requested`, `alongside`, `violation`, `discard`, `sequential`, `reported`, ..."""
NAMES = frozenset(
    """again attended combined deadlines departed dispatched flight flights gathering give keeping lanes
    mailbox on_their_way ownership passage plant put_together region take_apart ticket used_rows visits
    whole_step""".split()
)
"""Whole identifiers that have a standard name: `is_recomputed`, `graph_instance`, `accumulate`, `handle`, ..."""
CLASSES = frozenset(
    """Chain Combined Crossing Cut Deadlines Departed Dispatched Figure Fit Flight Flights Forgotten Gathering GradSlot
    HostSteps Keeping Lanes OnTheirWay Pair PartedGrad Passage Plan Repeater Routed Rows Side Tally Transfers
    UpdatesBeside Visits Wish""".split()
)


def texts(file: Source) -> Iterator[tuple[int, bool, str]]:
    """(line, is a docstring, text) of every docstring, field text and comment."""
    for node in file.nodes:
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, True, " ".join(value.value.split())
    for number, line in enumerate(file.text.splitlines(), start=1):
        if match := COMMENT.search(line):
            yield number, False, match[1]


def text_findings(files: Iterable[Source]) -> list[str]:
    return [
        f"{file.path}:{line} {text[:80]}"
        for file in files
        if file.path != "tests/house_rules/test_names.py"
        for line, is_docstring, text in texts(file)
        if PHRASE.search(text) or (is_docstring and FRAGMENT.match(text))
    ]


def identifiers(file: Source) -> Iterator[tuple[int, str]]:
    """(line, name) of every class, function, parameter and assigned variable or attribute."""
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def identifier_findings(files: Iterable[Source]) -> list[str]:
    found = {}
    for file in files:
        for line, name in identifiers(file):
            bare = name.strip("_")
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", bare)}
            if words & WORDS or bare.lower() in NAMES or bare in CLASSES:
                found.setdefault((file.path, name), f"{file.path}:{line} {name}")
    return list(found.values())


def clashes(files: Iterable[Source]) -> dict[str, list[str]]:
    """Places of every class name that occurs several times; a leading underscore does not count."""
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


@pytest.mark.parametrize("kind", CEILINGS)
@pytest.mark.parametrize("part", ["product", "tests"])
def test_texts_and_identifiers_use_the_terms_of_the_field(kind, part):
    files = sources(*PRODUCT) if part == "product" else sources("tests")
    findings = text_findings(files) if kind == "texts" else identifier_findings(files)
    ceiling = CEILINGS[kind][part == "tests"]
    report(findings * (len(findings) > ceiling), f"{len(findings)} {kind} with discouraged words, allowed {ceiling}")


def test_class_names_are_unique():
    found = clashes(sources(*PRODUCT))
    report([f"{name}: {', '.join(places)}" for name, places in found.items()], "two classes with one name")


def test_packages_have_several_modules():
    report(single_modules(file.path for file in sources(*PROGRAM)), "R5: no package with a single module")


def test_the_checks_find_planted_names():
    planted = source(
        "a.py", '"""So it is."""\nclass Tally:\n    nobody_asked = 1\n    """What is told of its own."""\n'
    )
    assert len(text_findings([planted])) == 2 and len(identifier_findings([planted])) == 2
    assert list(clashes([planted, source("b.py", "class _Tally: ...")])) == ["Tally"]
    assert single_modules(["a/__init__.py", "a/b.py", "c/__init__.py", "c/d.py", "c/e.py"]) == ["a"]
