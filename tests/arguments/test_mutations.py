"""Random mutations of command lines: the result is a plan or an error report, never a traceback."""

import random
from pathlib import Path

import pytest

from arguments.deprecated import old_names
from arguments.errors import Finished, FlagErrors
from arguments.flags import Registry
from arguments.huggingface import AnotherModel
from arguments.read import read_plan
from arguments.recognised import recognised_flags
from arguments.values import allowed_values
from tests.helpers.command_lines import SMALL, VOCAB_SIZE, words

REGISTRY = Registry.declared()
OPTIONS = sorted({*REGISTRY.spellings, *old_names(), *recognised_flags(), "--nonsense", "--"})
ANSWERS = ("--help", "--find")
VALUES = (
    "0", "1", "2", "3", "7", "-1", "0.5", "1e-6", "1e99", "-0", "inf", "nan", "999999999999999999999", "", " ", "x",
    "'", '"', "true", "false", "null", "none", "fp32", "fp64", "rope", "auto", "1,2", "1 2", "[0]*3", "([0]*1+[1]*3)",
    "[[1]]", "[1]*-1", "(((((", "2**9", "__import__('os')", "a=b", "=", "-", "--", "E|t*4|L", "Et*3|(tt|)*29m|L",
    "99,1,0", "0,0,0", "/nowhere", "é", "\u0000", "$HOME", "${A}",
)  # fmt: skip
ENVIRONMENTS = (
    {},
    {},
    {},
    {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"},
    {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    {"RANK": "x", "WORLD_SIZE": ""},
    {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "-4", "SLURM_STEP_ID": "0"},
)


def mutated(draw: random.Random) -> list[str]:
    """Applies a few random changes to the small command line."""
    found = words(SMALL)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        place = draw.randrange(len(found) + 1)
        match draw.randrange(8):
            case 0:
                found[place : place + 1] = []
            case 1:
                found[place : place + 1] = [draw.choice(VALUES)]
            case 2:
                found[place:place] = [draw.choice(OPTIONS), *draw.choices(VALUES, k=draw.randrange(3))]
            case 3:
                found += [draw.choice(OPTIONS), draw.choice(VALUES)]
            case 4:
                found += [f"{draw.choice(OPTIONS).replace('-', '_')}={draw.choice(VALUES)}"]
            case _:
                found += fitting(draw)
    return found


def fitting(draw: random.Random) -> list[str]:
    """Draws a flag with a value of its type, so that the command line passes the parser and the rules are checked."""
    flag = draw.choice(list(REGISTRY.flags.values()))
    if flag.is_switch:
        return [draw.choice((flag.option, flag.off_options[0]))]
    return [flag.option, draw.choice(allowed_values(flag.type) or ("1", "2", "8", "0.5", "64"))]


def answers(seed: int, number: int) -> int:
    """Number of mutated command lines that give a plan. Raises AssertionError unless the others give an error
    report."""
    draw, plans = random.Random(seed), 0
    for _ in range(number):
        argv = [word for word in mutated(draw) if not word.startswith(ANSWERS)]
        try:
            plan = read_plan(argv, draw.choice(ENVIRONMENTS), vocab_size_of=lambda config: VOCAB_SIZE)
        except (FlagErrors, AnotherModel, Finished) as ending:
            assert str(ending), argv
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} from {argv}") from error
        else:
            assert plan.model.layers, argv
            plans += 1
    return plans


def test_three_hundred_mutated_command_lines_give_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert answers(seed=1, number=300) > 7  # some mutations are small enough to give valid command lines


@pytest.mark.slow
def test_ten_thousand_mutated_command_lines_give_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert answers(seed=2, number=10_000) > 250


def test_dry_runs_with_a_flag_less_and_some_mutated_give_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Removes one flag and mutates others. Dry runs also report on invalid plans and must not fail on them."""
    monkeypatch.chdir(tmp_path)
    draw, num_reports = random.Random(3), 0
    for option in [word for word in words(SMALL) if word.startswith("--")] * 6:
        argv = [*words(SMALL, without=option), *fitting(draw), *fitting(draw), "--dry-run"]
        try:
            read_plan(argv, {}, vocab_size_of=lambda config: VOCAB_SIZE)
        except Finished:
            num_reports += 1
        except FlagErrors as refused:
            assert str(refused), argv
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} from {argv}") from error
    assert num_reports > 50
