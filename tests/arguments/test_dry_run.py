"""The dry run: its report of every recipe, what it needs, what it refuses, and that it is the plan that runs."""

import json
from typing import Any

import pytest

from arguments.dry_run.text import report
from arguments.errors import Finished, FlagErrors
from arguments.read import read_plan
from arguments.recipes.find import recipe_names
from megatron_moe.specs.exitcodes import EnvironmentProblem
from tests.command_lines import SMALL, VOCAB_SIZE, calls_of, vocab_size_of, words
from tools.write_dry_runs import DOCUMENT, FOLDER, numbers, with_example

UPDATE = "run python tools/write_dry_runs.py, and look at the difference"
DEEPSEEK = "--recipe deepseek-v3-h100-1024"


def answer_to(text: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(Finished) as caught:
        read_plan(text.split(), environ or {}, vocab_size_of=vocab_size_of)
    return caught.value.text


def facts(text: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer_to(f"{text} --dry-run=json", environ))
    return found


@pytest.mark.parametrize("name", recipe_names())
def test_the_report_of_a_recipe_is_the_stored_one(name):
    assert numbers(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8"), UPDATE


def test_no_report_is_left_of_a_recipe_that_is_gone():
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == recipe_names(), UPDATE


def test_the_example_of_the_guide_is_todays():
    document = DOCUMENT.read_text(encoding="utf-8")
    assert document == with_example(document), UPDATE


def test_text_and_json_say_the_same():
    assert answer_to(f"{DEEPSEEK} --dry-run") == report(facts(DEEPSEEK))


def test_lines_fit_a_terminal():
    assert max(map(len, answer_to(f"{DEEPSEEK} --dry-run").splitlines())) <= 120


def test_it_is_little_work_and_needs_no_torch():
    """DeepSeek-V3 on 1,024 GPUs, 1.28 million calls: a third of a second, see tools/bench_startup.py."""
    text, calls = calls_of([*DEEPSEEK.split(), "--dry-run"])
    assert "1,024 H100" in text and calls < 1_500_000


def test_the_recipe_says_for_which_machine_unless_the_command_line_does():
    assert facts(DEEPSEEK)["ranks"]["world_size"] == 1024
    changed = facts(f"{DEEPSEEK} --world-size 2048 --gpu gb200")
    assert (changed["ranks"]["world_size"], changed["device"]["kind"]) == (2048, "gb200")
    assert changed["ranks"]["ranks_per_nvlink_domain"] == 64
    launched = {"RANK": "0", "WORLD_SIZE": "512", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    assert facts(DEEPSEEK, launched)["ranks"]["world_size"] == 512


def test_a_layout_that_is_impossible_is_refused_as_ever():
    with pytest.raises(FlagErrors) as caught:
        read_plan(f"{DEEPSEEK} --world-size 12 --dry-run".split(), {})
    assert any("does not divide 12 ranks" in problem.what for problem in caught.value.problems)


def test_what_keeps_a_plan_from_training_is_told_and_counted():
    told = facts(DEEPSEEK)
    assert any(line.startswith("--fp8-format e4m3 is not available yet") for line in told["cannot_train_yet"])
    assert told["time"]["products_in"] == "fp8"
    with pytest.raises(FlagErrors):
        read_plan(DEEPSEEK.split(), {"RANK": "0", "WORLD_SIZE": "1024", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"})


def test_data_may_be_missing_but_not_the_architecture():
    line = " ".join(words(SMALL, without="--data-path"))
    assert facts(line)["cannot_train_yet"] == ["there is no training data"]
    with pytest.raises(FlagErrors) as caught:
        read_plan([*words(SMALL, without="--num-layers"), "--dry-run"], {}, vocab_size_of=vocab_size_of)
    assert [problem.what for problem in caught.value.problems] == ["--num-layers is required"]


def test_recompute_offload_and_formats_change_the_bytes():
    line = "--recipe qwen3-30b-a3b-h100-32 --moe-token-dispatcher-type alltoall"
    plain = facts(line)["memory"]
    recomputed = facts(f"{line} --recompute-granularity selective --recompute-modules moe_act layernorm")["memory"]
    offloaded = facts(f"{line} --fine-grained-activation-offloading --offload-modules expert_fc1")["memory"]
    lean = facts(f"{line} --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")["memory"]
    assert recomputed["total_gib"] < plain["total_gib"]
    assert offloaded["host_gib"] > 1 and offloaded["total_gib"] < plain["total_gib"]
    assert lean["heaviest"]["gib"]["moments"] == plain["heaviest"]["gib"]["moments"] / 2


def test_differences_from_the_recipe_are_listed():
    told = facts(f"{DEEPSEEK} --micro-batch-size 2")["differences"]
    assert told == ["--micro-batch-size 2 (command line); recipe: 1"]


def missing(spec: object) -> int:
    raise EnvironmentProblem("the tokenizer is not here")


def test_a_tokenizer_that_cannot_be_read_asks_for_the_size():
    with pytest.raises(FlagErrors) as caught:
        read_plan(["--recipe", "quickstart", "--dry-run"], {}, vocab_size_of=missing)
    (problem,) = caught.value.problems
    assert problem.what == "the tokenizer is not here" and "--vocab-size" in problem.remedy


@pytest.mark.parametrize(
    ("more", "without", "size", "assumed"),
    [
        ("--vocab-size 4096", "", 4096, ""),
        ("--padded-vocab-size 5120", "", 5120, ""),
        (
            "--vocab-file v --merge-file m",
            "--tokenizer-type --tokenizer-model",
            50257,
            "; the figures assume 50,257 tokens, as in GPT-2",
        ),
        ("--vocab-file v --merge-file m --vocab-size 999", "--tokenizer-type --tokenizer-model", 999, ""),
    ],
)
def test_a_missing_tokenizer_is_one_line_among_the_problems(more: str, without: str, size: int, assumed: str):
    """Where the size of the vocabulary is known."""
    argv = [*words(SMALL, f"--data-path {without}"), *more.split()]
    with pytest.raises(Finished) as caught:
        read_plan([*argv, "--dry-run=json"], {}, vocab_size_of=missing)
    told = json.loads(caught.value.text)
    assert told["cannot_train_yet"] == ["there is no training data", f"the tokenizer is not here{assumed}"]
    with pytest.raises(Finished) as caught:
        read_plan([*argv, "--vocab-size", str(size), "--dry-run=json"], {}, vocab_size_of=lambda spec: size)
    assert json.loads(caught.value.text)["model"] == told["model"]


def test_a_size_is_all_that_must_be_known_of_a_tokenizer():
    whole = facts(" ".join(words(SMALL)))["model"]
    for without in ("--tokenizer-type", "--tokenizer-type --tokenizer-model --data-path"):
        line = " ".join(words(SMALL, without=without))
        assert facts(f"{line} --vocab-size {VOCAB_SIZE}")["model"] == whole


@pytest.mark.parametrize("kind", ["", "--tokenizer-type NullTokenizer"])
def test_a_size_that_nobody_knows_is_asked_for(kind):
    with pytest.raises(FlagErrors) as caught:
        answer_to(f"{' '.join(words(SMALL, without='--tokenizer-type'))} {kind} --dry-run")
    (problem,) = caught.value.problems
    assert problem.what == "the vocabulary size is not known" and "--vocab-size" in problem.remedy


def test_what_is_told_is_what_runs():
    """The plan of a launch of that size has the same layout, sizes and batch."""
    line = "--recipe m27"
    launched = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    plan = read_plan(line.split(), launched, vocab_size_of=vocab_size_of)
    told = facts(line)
    assert told["schedule"]["layout"] == str(plan.layout)
    assert told["ranks"]["world_size"] == plan.parallel.world_size
    assert told["schedule"]["global_batch_size"] == plan.batch.global_size
    assert plan.blockers == ()
