"""Exported flags give the same settings for any values when they are read back."""

import json
import shlex
from dataclasses import replace
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arguments.environment import character_problem
from arguments.errors import Finished
from arguments.export import export, flags_text, json_text, yaml_text
from arguments.files import read_file
from arguments.flag import Flag
from arguments.flags import Registry
from arguments.parser import Setting, Settings, merge_settings, split
from arguments.read import read_plan
from arguments.values import LayerPattern, allowed_values, is_optional, without_none
from megatron_moe.config.run import RunPlan
from tests.helpers.check_cases import CASES
from tests.helpers.command_lines import SMALL, VOCAB_SIZE, plan_of, words

REGISTRY = Registry.declared()
FLAGS = [flag for flag in REGISTRY.flags.values() if flag.group != "start"]
ANY = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9)  # no argument contains a NUL


def _is_legible(text: str) -> bool:
    return all(character.isprintable() or ord(character) <= 0xFFFF for character in text)


LEGIBLE = ANY.filter(_is_legible)
"""Excludes characters that JSON escapes as surrogate pairs, which YAML reads as two characters."""
PRINTABLE = LEGIBLE.filter(lambda text: not character_problem(text))
"""Characters that an environment variable may contain."""
FRAMED = ANY.map(lambda text: f"a{text}z")
"""Any text between two letters, because leading and trailing whitespace is rejected."""
COMMAND_LINE_ONLY = ("forced_routing_of_data_is_requested", "forced_skew_is_possible")
"""Rules whose legal flags are accepted only on the command line, not in a file."""
LEGAL = list({case.rule: case for case in CASES if not case.environ and case.rule not in COMMAND_LINE_ONLY}.values())
"""One case per rule on one rank."""


def value_of(flag: Flag, text: st.SearchStrategy) -> st.SearchStrategy:
    """Strategy: any value that a flag accepts."""
    kind = without_none(flag.type)
    least, below = flag.declaration.least, flag.declaration.below
    if kind == LayerPattern:
        values = st.integers(0, 99) | st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
    elif get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
        item = scalar(get_args(kind)[0], least, below, text)
        values = st.lists(item.filter(bool), max_size=4, unique=flag.declaration.repeats).map(tuple)
    elif get_origin(kind) is tuple:
        values = st.tuples(*(scalar(item, least, below, text) for item in get_args(kind)))
    else:
        values = scalar(kind, least, below, text)
    return st.none() | values if is_optional(flag.type) else values


def scalar(kind: object, least: float | None, below: float | None, text: st.SearchStrategy) -> st.SearchStrategy:
    if allowed_values(kind):
        return st.sampled_from(get_args(kind) if get_origin(kind) is Literal else allowed_values(kind))
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(-(10**9) if least is None else int(least), 10**9 if below is None else int(below) - 1)
    if kind is float:
        least, most = -(2.0**127) if least is None else least, 2.0**127 if below is None else below
        return st.floats(least, most, exclude_max=True)
    return text


def settings_of(data: st.DataObject, text: st.SearchStrategy = ANY) -> Settings:
    chosen = data.draw(st.lists(st.sampled_from(FLAGS), max_size=12, unique_by=lambda flag: flag.name))
    return Settings(REGISTRY, {flag.name: Setting(data.draw(value_of(flag, text)), "here") for flag in chosen})


def same_values(before: Settings, after: Settings) -> bool:
    assert (after.problems, after.notes) == ([], [])
    known = [flag for flag in FLAGS if before.known(flag.name)]
    differing = [flag for flag in known if after.setting(flag.name).value != before.setting(flag.name).value]
    return [(flag.option, before.setting(flag.name), after.setting(flag.name)) for flag in differing] == []


def specs_of(plan: RunPlan) -> RunPlan:
    """Removes the record of where a plan's values came from, for comparisons."""
    return replace(plan, resolved_yaml="", command_line="", notes=())


def shell_words(text: str) -> list[str]:
    """Splits a command into words as a shell does, joining continued lines."""
    return shlex.split(text.replace(" \\\n", " "))


def printed(fmt: str, argv: list[str]) -> str:
    with pytest.raises(Finished) as caught:
        read_plan([*argv, "--print-config", fmt], {})
    return caught.value.text


@settings(max_examples=50)
@given(st.data())
def test_exported_yaml_reads_back_as_the_same_settings(tmp_path_factory, data):
    before = settings_of(data)
    environment = data.draw(st.dictionaries(st.sampled_from(["NCCL_A", "MEGATRON_B_C"]), PRINTABLE))
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(yaml_text(before, environment, ["a heading"]), encoding="utf-8")
    file = read_file(path, REGISTRY, {})
    assert (file.problems, file.environment) == ([], environment)
    assert same_values(before, merge_settings(REGISTRY, [file.flags]))


@settings(max_examples=50)
@given(st.data())
def test_exported_json_reads_back_as_the_same_settings(tmp_path_factory, data):
    before = settings_of(data, LEGIBLE)
    environment = data.draw(st.dictionaries(st.sampled_from(["NCCL_A", "MEGATRON_B_C"]), PRINTABLE))
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    text = json_text(before, environment)
    path.write_text(text, encoding="utf-8")
    assert set(json.loads(text)) > {"environment", "model", "data"}
    file = read_file(path, REGISTRY, {})
    assert (file.problems, file.environment) == ([], environment)
    assert same_values(before, merge_settings(REGISTRY, [file.flags]))


@settings(max_examples=200)
@given(st.data())
def test_an_exported_command_line_reads_back_as_the_same_settings(data):
    before = settings_of(data, FRAMED)
    given_words, problems = split(shell_words(flags_text(before)))
    assert problems == []
    assert same_values(before, merge_settings(REGISTRY, [given_words]))


def test_every_default_can_be_set_on_a_command_line():
    """Only the default None may have no spelling on the command line."""
    assert [flag.option for flag in FLAGS if is_optional(flag.type) and flag.default is not None] == []


def test_json_keeps_numbers_strings_and_lists():
    held = json.loads(printed("json", words(SMALL)))
    assert held["model"]["num-layers"] == 4
    assert held["moe"]["moe-layer-freq"] == "([0]*1+[1]*3)"
    assert held["moe"]["moe-aux-loss-coeff"] == [0.01]
    assert held["model"]["swiglu"] is True
    assert held["attention"]["window-size"] is None
    assert held["data"]["data-path"] == ["corpus_text_document"]


def test_an_exported_command_line_has_the_given_flags_in_order_of_groups():
    lines = printed("flags", words(SMALL)).split(" \\\n")
    assert lines[:2] == ["--num-layers 4", "--hidden-size 256"]
    assert "--moe-layer-freq '([0]*1+[1]*3)'" in lines
    assert "--no-add-bias-linear" in lines
    assert not any(line.startswith("--adam-beta1") for line in lines)


def test_an_unset_value_is_not_exported_as_a_flag(tmp_path):
    """run.yaml lists all unset flags as null."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model:\n  rotary-seq-len-interpolation-factor: null\n  padded-vocab-size: null\n", encoding="utf-8"
    )
    assert printed("flags", ["--config", str(path), *words(SMALL)]) == printed("flags", words(SMALL))


def test_bare_print_config_is_yaml():
    with pytest.raises(Finished) as caught:
        read_plan([*words(SMALL), "--print-config"], {})
    assert caught.value.text == printed("yaml", words(SMALL))


@pytest.mark.parametrize("fmt", ["yaml", "json", "flags"])
@pytest.mark.parametrize("case", LEGAL[::4], ids=lambda case: case.rule)
def test_a_plan_is_equal_after_export_in_every_format(tmp_path, case, fmt):
    """Checks that an exported plan is read back as an equal plan, whose export is the same text."""
    plan = plan_of(case.good, case.without)
    argv = [*words(SMALL, case.without), *shlex.split(case.good)]
    text = printed(fmt, argv)
    path = tmp_path / "exported"
    path.write_text(text, encoding="utf-8")
    repeated = shell_words(text) if fmt == "flags" else ["--config", str(path)]
    assert specs_of(read_plan(repeated, {}, vocab_size_of=lambda config: config.vocab_size or VOCAB_SIZE)) == specs_of(
        plan
    )
    if fmt != "yaml":  # comments in YAML say where every value came from, which differs
        assert printed(fmt, repeated) == text


def test_every_format_exports_empty_settings():
    assert [bool(export(Settings(REGISTRY), {}, fmt)) for fmt in ("yaml", "json", "flags")] == [True, True, True]
