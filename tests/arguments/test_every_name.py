"""Every flag of Megatron-LM's two branches and of the Model Zoo's recipes has a decision.

data_files/megatron_flags.tsv lists them: name, other spellings, priority (A and B must work or say what to use; C may
be refused by a sentence; - is known from the development branch or from recipes alone), and where it was seen.
"""

import csv
from pathlib import Path

import pytest

from arguments import recognised
from arguments.deprecated import old_names
from arguments.errors import Finished, FlagErrors
from arguments.flags import Registry, normal
from arguments.read import read_plan
from arguments.recognised import find_recognised, recognised_flags
from tests.helpers.command_lines import plan_of, texts_of

REGISTRY = Registry.declared()
TABLE = Path(__file__).parents[1] / "data_files" / "megatron_flags.tsv"
LIST = Path(recognised.__file__).with_name("recognised.txt")
DOCUMENTED = (
    "--moe-token-capacity-factor", "--bias-activation-fusion", "--external-cuda-graph", "--cuda-graph-scope",
    "--moe-enable-deepep", "--moe-router-padding-for-fp8", "--moe-hybridep-num-sms", "--moe-deepep-num-sms",
    "--offload-optimizer-states", "--use-rotary-position-embeddings", "--recompute-activations",
)  # fmt: skip
"""Names from documentation and earlier Megatron versions."""


def rows() -> list[dict[str, str]]:
    with TABLE.open() as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


def spellings(row: dict[str, str]) -> list[str]:
    return [normal(name) for name in (row["flag"], *row["other names"].split())]


def decided(name: str) -> bool:
    return REGISTRY.find(name) is not None or name in old_names() or find_recognised(name) is not None


def test_the_table_is_complete():
    assert (len(rows()), sum("zoo" in row["seen in"] for row in rows())) == (923, 337)


def test_every_name_has_a_decision():
    assert [name for row in rows() for name in spellings(row) if not decided(name)] == []


def refused(name: str) -> bool:
    known = find_recognised(name)
    return known is not None and known[0].refused


def test_no_common_flag_is_rejected_permanently():
    used = [row for row in rows() if row["priority"] in ("A", "B") or "zoo" in row["seen in"]]
    assert [row["flag"] for row in used if refused(normal(row["flag"]))] == []


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_and_earlier_names_are_accepted(name):
    assert decided(name) and not refused(name)
    assert not old_names().get(name, "").startswith("refused")


def test_every_deprecated_name_maps_to_existing_flags():
    for old, today in old_names().items():
        if not today.startswith("rejected: "):
            assert [word for word in today.split() if word.startswith("--") and not REGISTRY.find(word)] == [], old


def test_a_name_has_one_meaning():
    names = [word for line in LIST.read_text().splitlines() if not line.startswith("[") for word in line.split()]
    assert len(names) == len(set(names)) == len(recognised_flags())
    assert [name for name in names if REGISTRY.find(name) or name in old_names()] == []
    assert [name for name in (*REGISTRY.spellings, *old_names()) if find_recognised(name)] == []


@pytest.mark.parametrize("name", recognised_flags())
def test_a_recognised_name_is_refused_or_accepted_and_reported_with_its_reason(name):
    known = recognised_flags()[name]
    if known.refused:
        assert texts_of(f"{name} 3") == [f"{name} {known.reason} (command line)"]
        assert texts_of(f"{name} false") == []
    else:
        assert f"without effect: {name} 3 ({known.reason})" in plan_of(f"{name} 3").notes


def test_flags_without_effect_share_one_line_per_reason():
    notes = plan_of("--transformer-impl local --tp-comm-overlap --use_flash_attn --no-rope-fusion").notes
    listed = [note.partition(" (")[0] for note in notes if note.startswith("without effect: ")]
    assert listed == [
        "without effect: --transformer-impl local, --use_flash_attn, --no-rope-fusion",
        "without effect: --tp-comm-overlap",
    ]


def test_the_opposite_of_a_refused_switch_requests_nothing():
    assert plan_of("--no-rl-use-sequence-packing --no_perform_rl_step --dsa-indexer-scoring-relu").notes == ()


def test_a_recognised_name_in_a_file_is_reported_once_and_taken_back_by_null(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("otel-enabled: true\nrope-fusion: true\nperform-rl-step: false\nlogging-level: $UNSET\n")
    second.write_text("otel-enabled: null\nrope-fusion: false\n")
    notes = plan_of(f"--config {first} {second}").notes
    listed = [note.partition(" (")[0] for note in notes if note.startswith("without effect: ")]
    assert listed == ["without effect: --rope-fusion false", "without effect: --logging-level"]


def test_help_and_search_know_recognised_names():
    for words, text in (
        (("--help", "--otel_enabled"), "--otel_enabled concerns a logger .* It has no effect"),
        (("--help", "--perform-rl-step"), "reinforcement learning; .* It is rejected"),
        (("--find", "expert parallel"), "--expert-model-parallel-size "),
        (("--find", "otel"), "--otel-span-groups +no effect: concerns a logger"),
    ):
        with pytest.raises(Finished, match=text):
            read_plan(words, {})
    for words in (("--find",), ("--find", "")):
        with pytest.raises(FlagErrors, match="--find needs a word"):
            read_plan(words, {})
