"""Every flag of Megatron-LM's two branches and of the Model Zoo's recipes has a decision.

data_files/megatron_flags.tsv lists them: name, other spellings, priority (A and B must work or say what to use; C may
be refused by a sentence; - is known from the development branch or from recipes alone), and where it was seen.
"""

import csv
from pathlib import Path

import pytest

from arguments.errors import Finished, FlagErrors
from arguments.flags import Registry, normal
from arguments.names.deprecated import old_names
from arguments.names.rare import is_rare_switch_off, rare_name, rare_names
from arguments.read import read_plan
from tests.command_lines import plan_of, problems_of

REGISTRY = Registry.declared()
TABLE = Path(__file__).parents[1] / "data_files" / "megatron_flags.tsv"
OF_DOCUMENTS = (
    "--moe-token-capacity-factor", "--bias-activation-fusion", "--external-cuda-graph", "--cuda-graph-scope",
    "--moe-enable-deepep", "--moe-router-padding-for-fp8", "--moe-hybridep-num-sms", "--moe-deepep-num-sms",
    "--offload-optimizer-states", "--use-rotary-position-embeddings", "--recompute-activations",
)  # fmt: skip
"""Names of documents and of earlier versions that people still write."""


def rows() -> list[dict[str, str]]:
    with TABLE.open() as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


def spellings(row: dict[str, str]) -> list[str]:
    return [normal(name) for name in (row["flag"], *row["other names"].split())]


def decided(name: str) -> bool:
    return (
        REGISTRY.find(name) is not None
        or name in old_names()
        or rare_name(name) is not None
        or is_rare_switch_off(name)
    )


def test_the_table_is_whole():
    assert (len(rows()), sum("zoo" in row["seen in"] for row in rows())) == (923, 337)


def test_every_name_has_a_decision():
    assert [name for row in rows() for name in spellings(row) if not decided(name)] == []


def test_what_people_use_is_a_flag_or_an_old_name_of_one():
    used = [row for row in rows() if row["priority"] in ("A", "B") or "zoo" in row["seen in"]]
    assert [row["flag"] for row in used if rare_name(normal(row["flag"]))] == []


@pytest.mark.parametrize("name", OF_DOCUMENTS)
def test_names_of_documents_and_of_earlier_versions_are_old_names(name):
    (today,) = [today for old, today in old_names().items() if old == name]
    assert not today.startswith("refused")


def test_every_old_name_becomes_flags_that_exist():
    for old, today in old_names().items():
        if not today.startswith(("refused: ", "nothing: ")):
            assert [word for word in today.split() if word.startswith("--") and not REGISTRY.find(word)] == [], old


def test_a_name_has_one_meaning():
    rare = [name for name, _ in rare_names()]
    assert len(rare) == len(set(rare))
    assert [name for name in rare if REGISTRY.find(name) or name in old_names()] == []
    assert [name for name in old_names() if REGISTRY.find(name)] == []


@pytest.mark.parametrize("name", [name for name, _ in rare_names()])
def test_a_rare_name_is_refused_by_its_sentence_and_ignored_on_request_where_no_number_changes(name):
    rare = rare_name(name)
    (problem,) = problems_of(f"{name} 3")
    assert problem.what == f"{name} {rare.reason} (command line)"
    rest = problems_of(f"{name} 3 --allow-ignored-flags")
    assert rest == (() if rare.harmless else (problem,))


def test_a_rare_name_that_is_ignored_leaves_a_note():
    (note,) = plan_of("--otel-enabled --allow-ignored-flags").notes
    assert note.startswith("ignored: --otel-enabled belongs to a logger")


def test_a_rare_switch_that_is_off_asks_for_nothing():
    assert plan_of("--no-rl-use-sequence-packing --no_perform_rl_step").notes == ()


def test_help_and_search_know_rare_names():
    for words, text in (
        (("--help", "--otel_enabled"), "--otel_enabled belongs to a logger that does not exist"),
        (("--find", "otel"), "--otel-span-groups"),
    ):
        with pytest.raises(Finished, match=text):
            read_plan(words, {})
    for words in (("--find",), ("--find", "")):
        with pytest.raises(FlagErrors, match="--find needs a word"):
            read_plan(words, {})
