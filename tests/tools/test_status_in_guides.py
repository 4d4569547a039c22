"""Guides say of every flag what it can do today."""

import re
from dataclasses import dataclass

import pytest

from arguments.flag import flag, flags_of
from arguments.flags import Registry
from arguments.recognised import find_recognised
from tests.helpers.ranks import REPOSITORY
from tools.status_in_guides import refreshed, standing

GUIDE = (REPOSITORY / "docs" / "optimize.md").read_text()
FILE = re.compile(r"\b(?:tools|scripts|docs|tests|megatron_moe|arguments)/[\w./-]*\w")
NAMED = re.compile(r"--[a-z][a-z0-9-]+")
SOURCES = [*(REPOSITORY / "tools").glob("*.py"), REPOSITORY / "arguments" / "explain.py"]
OF_TOOLS = {flag for path in SOURCES for flag in re.findall(r'"(--[a-z-]+)"', path.read_text())} | {"--nproc-per-node"}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Flags of every status."""

    works: bool = flag(False)
    later: int | None = flag(None, status="not yet", works=(3,))
    never: str = flag("a", status="refused")


@pytest.fixture
def registry() -> Registry:
    return Registry.over(flags_of("planted", Planted))


@pytest.mark.parametrize(
    ("piece", "answer"),
    [
        ("--works", "yes"),
        ("--later", "not yet"),
        ("--later 2", "not yet"),
        ("--later 3", "yes"),
        ("--never b", "refused"),
        ("--use-sharp", "no effect"),
        ("--works --use-sharp", "no effect"),
        ("--use-sharp --later 2 --works", "not yet"),
        ("--later 2 --never b", "refused"),
    ],
)
def test_the_worst_flag_of_a_row_decides(registry, piece, answer):
    assert standing([piece], registry) == answer


def test_only_the_column_here_of_rows_with_flags_is_written(registry):
    table = "| a | {} |\n|---|---|\n| `--use-sharp` | yes |\n"
    text = table.format("here") + "| nothing | me |\n\n" + table.format("b")
    assert refreshed(text, registry) == text.replace("| `--use-sharp` | yes |", "| `--use-sharp` | no effect |", 1)


def test_a_name_that_is_no_flag_is_a_mistake(registry):
    with pytest.raises(AssertionError, match="--unknown, which is not a flag"):
        standing(["--unknown 3"], registry)


def test_the_guide_is_up_to_date():
    assert refreshed(GUIDE, Registry.declared()) == GUIDE, "run python tools/write_flags_doc.py"


@pytest.mark.parametrize("name", ["README.md", "docs/optimize.md"])
def test_documents_name_no_flag_that_does_not_exist(name):
    registry = Registry.declared()
    flags = NAMED.findall((REPOSITORY / name).read_text())
    named = {flag for flag in flags if not registry.find(flag) and not find_recognised(flag)}
    assert named <= OF_TOOLS, named - OF_TOOLS


@pytest.mark.parametrize("name", ["README.md", "docs/optimize.md"])
def test_documents_name_no_file_that_does_not_exist(name):
    text = (REPOSITORY / name).read_text()
    named = set(FILE.findall(text))
    assert "tools/launch.py" in named
    assert {path for path in named if not (REPOSITORY / path).exists()} == set()
