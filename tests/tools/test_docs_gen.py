"""Generated documents are current, and guides name only flags and files that exist."""

import re

import pytest

from arguments.flags import Registry
from arguments.recognised import find_recognised
from tests.helpers.ranks import REPOSITORY
from tools.docs_gen import flag_texts, lowest_status, recipe_texts

FILE = re.compile(r"\b(?:tools|scripts|docs|tests|megatron_moe|arguments)/[\w./-]*\w")
NAMED = re.compile(r"--[a-z][a-z0-9-]+")
SOURCES = [
    *(REPOSITORY / "tools").glob("*.py"),
    *(REPOSITORY / "benchmarks" / "harness").glob("*.py"),
    REPOSITORY / "arguments" / "explain.py",
]
TOOL_FLAGS = {flag for path in SOURCES for flag in re.findall(r'"(--[a-z-]+)"', path.read_text())}


def test_the_lowest_status_of_a_row_decides():
    registry = Registry.declared()
    assert lowest_status(["--use-sharp"], registry) == "no effect"
    assert lowest_status(["--num-layers 4"], registry) == "yes"
    assert lowest_status(["--num-layers 4 --use-sharp"], registry) == "no effect"
    with pytest.raises(AssertionError, match="--unknown, which is not a flag"):
        lowest_status(["--unknown 3"], registry)


@pytest.mark.parametrize("texts", [flag_texts, recipe_texts])
def test_generated_texts_are_current(texts):
    assert [path for path, text in texts() if path.read_text() != text] == [], "run python tools/docs_gen.py"


@pytest.mark.parametrize("name", ["README.md", "docs/optimize.md"])
def test_documents_name_only_existing_flags_and_files(name):
    registry, text = Registry.declared(), (REPOSITORY / name).read_text()
    unknown = {flag for flag in NAMED.findall(text) if not registry.find(flag) and not find_recognised(flag)}
    assert unknown <= TOOL_FLAGS | {"--nproc-per-node"}, unknown
    assert {path for path in FILE.findall(text) if not (REPOSITORY / path).exists()} == set()
