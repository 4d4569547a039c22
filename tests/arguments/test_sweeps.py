"""Grids of runs."""

import pytest

from arguments.errors import FlagErrors
from arguments.flags import Registry
from arguments.jobs.sweeps import Point, axis_of, points

REGISTRY = Registry.declared()


def grid(*settings: str) -> list[Point]:
    return points([axis_of(setting.split("|"), REGISTRY) for setting in settings], REGISTRY)


def test_every_combination_once_the_last_flag_fastest():
    assert [point.flags for point in grid("lr|1e-3|1e-4|1e-3", "micro-batch-size|1|2")] == [
        ("--lr", lr, "--micro-batch-size", size) for lr in ("1e-3", "1e-4") for size in ("1", "2")
    ]


def test_no_flags_are_one_run():
    assert grid() == [Point("", ())]


def test_switches_are_switched():
    assert [point.flags for point in grid("sequence_parallel|on|off")] == [
        ("--sequence-parallel",),
        ("--no-sequence-parallel",),
    ]


def test_a_spelling_that_switches_off_keeps_its_meaning():
    assert [point.flags for point in grid("no-load-optim|on|off")] == [("--no-load-optim",), ("--load-optim",)]


def test_a_flag_has_one_list_of_values():
    with pytest.raises(FlagErrors, match="--set no-bf16 is given twice|--set bf16 is given twice"):
        grid("bf16|on", "lr|1e-3", "no-bf16|on")


def test_names_are_folders_and_differ():
    names = [point.name for point in grid("moe-layer-freq|[0]+[1]|[0]-[1]|([0]+[1]", "lr|1e-3")]
    assert names == [
        "moe-layer-freq=_0_+_1_,lr=1e-3",
        "moe-layer-freq=_0_-_1_,lr=1e-3",
        "moe-layer-freq=_0_+_1_,lr=1e-3,again=1",
    ]


def test_a_value_of_several_words_is_several():
    assert grid("rampup-batch-size|2 2 8")[0].flags == ("--rampup-batch-size", "2", "2", "8")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("no-such|1", "there is no flag --no-such"),
        ("lrr|1", "Try: did you mean --lr"),
        ("lr", "has no values"),
        ("lr=1,2", "Try: --set lr 1 2"),
    ],
)
def test_what_is_no_axis_is_refused(setting, message):
    with pytest.raises(FlagErrors, match=message):
        grid(setting)
