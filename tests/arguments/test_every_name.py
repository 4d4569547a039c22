"""Every flag of Megatron-LM's two branches and of the Model Zoo's recipes is implemented, translated or recognised.

data_files/megatron_flags.txt lists them by priority and source.
"""

from pathlib import Path

import pytest

from arguments import recognised
from arguments.deprecated import old_names
from arguments.errors import Finished, FlagErrors
from arguments.flags import Registry, with_dashes
from arguments.read import read_plan
from arguments.recognised import find_recognised, recognised_flags
from tests.helpers.command_lines import plan_of, texts_of

REGISTRY = Registry.declared()
TABLE = Path(__file__).parents[1] / "data_files" / "megatron_flags.txt"
LIST = Path(recognised.__file__).with_name("recognised.txt")
DOCUMENTED = (
    "--moe-token-capacity-factor", "--bias-activation-fusion", "--external-cuda-graph", "--cuda-graph-scope",
    "--moe-enable-deepep", "--moe-router-padding-for-fp8", "--moe-hybridep-num-sms", "--moe-deepep-num-sms",
    "--offload-optimizer-states", "--use-rotary-position-embeddings", "--recompute-activations",
)  # fmt: skip
"""Names from documentation and earlier Megatron versions."""


def listed_names(*, common_only: bool = False) -> list[str]:
    """Names in the list. Common ones have priority A or B, or occur in a recipe of the Model Zoo."""
    names, is_common = [], False
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            is_common = line.startswith(("[A", "[B")) or "zoo" in line
        elif not line.startswith("#") and (is_common or not common_only):
            names += map(with_dashes, line.split())
    return names


def decided(name: str) -> bool:
    return REGISTRY.find(name) is not None or name in old_names() or find_recognised(name) is not None


def test_every_name_has_a_decision():
    names = listed_names()
    assert len(set(names)) == len(names) == 957
    assert [name for name in names if not decided(name)] == []


def refused(name: str) -> bool:
    known = find_recognised(name)
    return known is not None and known[0].refused


def test_no_common_flag_is_rejected_permanently():
    assert [name for name in listed_names(common_only=True) if refused(name)] == []


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


def test_rejected_names_come_with_their_reasons():
    rejected = {name: known for name, known in recognised_flags().items() if known.refused}
    expected = [f"{name} {known.reason} (command line)" for name, known in rejected.items()]
    assert sorted(texts_of(" ".join(f"{name} 3" for name in rejected))) == sorted(expected)
    assert texts_of(" ".join(f"{name} false" for name in rejected)) == []


def test_ignored_names_come_with_their_reasons():
    ignored = {name: known for name, known in recognised_flags().items() if not known.refused}
    notes = plan_of(" ".join(f"{name} 3" for name in ignored)).notes
    found = [note.removeprefix("without effect: ") for note in notes if note.startswith("without effect: ")]
    by_reason = {reason.removesuffix(")"): words for words, _, reason in (note.partition(" (") for note in found)}
    for name, known in ignored.items():
        assert f"{name} 3" in by_reason[known.reason].split(", "), name


def test_flags_without_effect_share_one_line_per_reason():
    notes = plan_of("--transformer-impl local --train-sync-interval 3 --use_flash_attn --no-rope-fusion").notes
    listed = [note.partition(" (")[0] for note in notes if note.startswith("without effect: ")]
    assert listed == [
        "without effect: --transformer-impl local, --use_flash_attn, --no-rope-fusion",
        "without effect: --train-sync-interval 3",
    ]


def test_the_negation_of_a_rejected_switch_is_accepted():
    assert plan_of("--no-rl-use-sequence-packing --no_perform_rl_step --dsa-indexer-scoring-relu").notes == ()


def test_a_recognised_name_in_a_file_is_reported_once_and_unset_by_null(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("otel-enabled: true\nrope-fusion: true\nperform-rl-step: false\nlogging-level: $UNSET\n")
    second.write_text("otel-enabled: null\nrope-fusion: false\n")
    notes = plan_of(f"--config {first} {second}").notes
    listed = [note.partition(" (")[0] for note in notes if note.startswith("without effect: ")]
    assert listed == ["without effect: --rope-fusion false", "without effect: --logging-level"]


@pytest.mark.parametrize("value", ["null", "false"])
def test_a_later_file_unsets_a_rejected_flag(tmp_path, value):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("perform-rl-step: true\n")
    second.write_text(f"perform-rl-step: {value}\n")
    with pytest.raises(FlagErrors, match="--perform-rl-step"):
        plan_of(f"--config {first}")
    assert plan_of(f"--config {first} {second}").notes == ()


def test_help_and_search_find_recognised_names():
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
