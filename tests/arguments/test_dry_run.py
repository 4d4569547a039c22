"""`--dry-run`: its report for every recipe, its requirements and errors, and equality of its plan with the plan of the
run.
"""

import json
import re
import shlex
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from arguments.dry_run.report import report
from arguments.errors import Finished, FlagErrors
from arguments.read import read_plan
from arguments.recipes import recipe_names
from megatron_moe.config.exit_codes import DataProblem, EnvironmentProblem, ExitCode
from megatron_moe.config.transport import libraries
from pretrain_moe import main
from tests.helpers.command_lines import SMALL, VOCAB_SIZE, calls_of, vocab_size_of, words
from tools import plan
from tools.docs_gen import DRY_RUN_DOC, DRY_RUNS, REPORTED, TOTALS, dry_run, totals_row, with_example

UPDATE = "run python tools/docs_gen.py dry-runs, and review the difference"
GOLDEN_TOTALS = {line.split("\t")[0]: line for line in TOTALS.read_text(encoding="utf-8").splitlines()[1:]}
DEEPSEEK = "--recipe deepseek-v3-h100-1024"
NO_DATA = "there is no training data; give --data-path, --train-data-path or --mock-data"


def finished(text: str, environ: dict[str, str] | None = None) -> Finished:
    with pytest.raises(Finished) as caught:
        read_plan(shlex.split(text), environ or {}, vocab_size_of=vocab_size_of)
    return caught.value


def answer_to(text: str, environ: dict[str, str] | None = None) -> str:
    return finished(text, environ).text


def values(text: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer_to(f"{text} --dry-run=json", environ))
    return found


@pytest.mark.parametrize("name", REPORTED)
def test_the_report_of_a_recipe_equals_the_golden_file(name):
    assert dry_run(name) == (DRY_RUNS / f"{name}.txt").read_text(encoding="utf-8"), UPDATE


def test_golden_reports_and_totals_cover_the_listed_recipes():
    assert sorted(path.stem for path in DRY_RUNS.glob("*.txt")) == sorted(REPORTED)
    assert list(GOLDEN_TOTALS) == recipe_names(), UPDATE


@pytest.mark.parametrize("name", recipe_names())
def test_the_totals_of_a_recipe_equal_the_golden_table(name):
    assert totals_row(name) == GOLDEN_TOTALS[name], UPDATE


def test_the_example_in_the_guide_is_current():
    document = DRY_RUN_DOC.read_text(encoding="utf-8")
    assert document == with_example(document), UPDATE


def test_text_and_json_reports_agree():
    assert answer_to(f"{DEEPSEEK} --dry-run") == report(values(DEEPSEEK))


def test_lines_fit_a_terminal():
    assert max(map(len, answer_to(f"{DEEPSEEK} --dry-run").splitlines())) <= 120


def test_time_and_cost_are_estimated_with_their_error():
    time = values(f"{DEEPSEEK} --tokens 15e12 --gpu-hour-price 2")["time"]
    estimate, run = time["estimate"], time["run"]
    assert estimate["error"] == 0.3 and values("--recipe q6")["time"]["estimate"]["error"] == 0.2
    assert time["bound_ms"] < estimate["step_ms"] == pytest.approx(sum(estimate["parts_ms"].values()))
    assert run["iterations"] == -(-15e12 // time["tokens_per_step"])
    assert run["gpu_hours"] == pytest.approx(run["iterations"] * estimate["step_ms"] / 3.6e6 * 1024)
    assert (run["days"], run["cost"]) == pytest.approx((run["gpu_hours"] / 24 / 1024, 2 * run["gpu_hours"]))
    assert values(DEEPSEEK)["time"]["run"]["iterations"] == 50
    text = answer_to(f"{DEEPSEEK} --tokens 15e12 --gpu-hour-price 2 --dry-run")
    assert "estimate ± 30%: " in text and "± 30%: the largest deviation measured" in text
    assert "iterations, 15 T tokens: " in text and f", cost {run['cost']:,.0f}" in text
    short = answer_to("--recipe q6 --gpu-hour-price 2 --train-iters 1 --dry-run").splitlines()
    assert any(line.startswith("  1 iteration, ") and " seconds, " in line and ", cost 0.00" in line for line in short)


def test_what_does_not_fit_comes_with_ways_out(tmp_path, monkeypatch):
    line = f"{DEEPSEEK} --micro-batch-size 4"
    result = values(line)
    memory, text = result["memory"], report(result)
    assert len(memory["ways_out"]) == 3 and memory["enough_gpus"]["gpus"] == 2048
    assert all(way["total_gib"] < memory["device_gib"] - 3 for way in (*memory["ways_out"], memory["enough_gpus"]))
    assert "what fits instead" in text and "options that are on" not in text and "bf16, " not in text
    shown = text.partition("what fits instead")[2].splitlines()[1:5]
    enough = memory["enough_gpus"]
    ways = [(way["changes"], way) for way in memory["ways_out"]] + [(f"2,048 GPUs, {enough['changes']}", enough)]
    for row, (changes, way) in zip(shown, ways, strict=True):
        cells = (changes, f"{way['total_gib']:.1f} GiB", f"{way['step_ms'] / 1e3:.3g} s", f"{way['slower']:+.1%}")
        assert tuple(re.split("  +", row.strip())) == cells
    assert len({changes for changes, _ in ways}) == 4 and all(way["step_ms"] > 1e4 for _, way in ways[:3])
    command = memory["command"].split()
    assert memory["command"] in text and command[:2] == ["python", "tools/plan.py"]
    monkeypatch.chdir(tmp_path)
    assert plan.main(command[2:]) == ExitCode.OK
    found = values("--config plans/fit.yaml")
    assert found["memory"]["fits"] and found["ranks"]["world_size"] == 1024
    first = memory["ways_out"][0]
    assert found["memory"]["total_gib"] == pytest.approx(first["total_gib"])
    assert found["time"]["estimate"]["step_ms"] == pytest.approx(first["step_ms"])


def test_a_plan_that_fits_with_no_memory_option_is_reported():
    text = answer_to("--recipe q6 --gpu rtx4090 --dry-run")
    assert "no memory options suffice for this layout" in text
    assert "\n  python tools/plan.py --write plans --recipe q6 --gpu rtx4090 --gpus 1\n" in text


def test_other_gpus_are_described_by_their_figures():
    card = values("--recipe q6 --gpu rtx5090")
    assert (card["device"]["memory_gib"], card["device"]["bf16_tflops"]) == (31.4, 209.5)
    figures = "--gpu-memory 100 --gpu-tflops 500 --gpu-bandwidth 2000 --link-bandwidth 100"
    own, h200 = (values(f"--recipe m27 {more} --gpu h200") for more in (figures, ""))
    assert (own["device"]["memory_gib"], own["device"]["bf16_tflops"]) == (100, 500)
    head = report(own).splitlines()[:2]
    assert "custom GPU" in head[0] and "100 GiB, 500 TFLOP/s in bf16, memory with 2,000 GB/s, links with 100" in head[1]
    assert own["time"]["compute_ms"] == pytest.approx(h200["time"]["compute_ms"] * 989 / 500)
    ours, theirs = (each["time"]["estimate"]["parts_ms"] for each in (own, h200))
    assert ours["bandwidth"] == pytest.approx(theirs["bandwidth"] * 4.8 / 2)
    assert ours["expert parallel"] == pytest.approx(theirs["expert parallel"] * 450 / 100)
    with pytest.raises(FlagErrors, match="--gpu-memory without --dry-run"):
        read_plan("--recipe q6 --gpu-memory 40".split(), {})


def test_a_dry_run_is_fast_and_does_not_import_torch():
    """A dry run of DeepSeek-V3 on 1,024 GPUs makes 1.28 million calls in a third of a second (bench_startup.py)."""
    text, calls = calls_of([*DEEPSEEK.split(), "--dry-run"])
    assert "1,024 H100" in text and calls < 1_500_000


def test_the_recipe_sets_the_machine_unless_the_command_line_does():
    assert values(DEEPSEEK)["ranks"]["world_size"] == 1024
    changed = values(f"{DEEPSEEK} --world-size 2048 --gpu gb200")
    assert (changed["ranks"]["world_size"], changed["device"]["kind"]) == (2048, "gb200")
    assert changed["ranks"]["ranks_per_nvlink_domain"] == 64
    launched = {"RANK": "0", "WORLD_SIZE": "512", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    assert values(DEEPSEEK, launched)["ranks"]["world_size"] == 512


def test_an_impossible_layout_is_rejected():
    with pytest.raises(FlagErrors) as caught:
        read_plan(f"{DEEPSEEK} --world-size 12 --dry-run".split(), {})
    assert any("does not divide 12 ranks" in problem.what for problem in caught.value.problems)


def test_another_transport_replaces_deepep_across_hosts_unless_it_is_required():
    report, note = values(DEEPSEEK), "--moe-flex-dispatcher-backend deepep: it supports only the ranks of one host"
    assert report["cannot_train_yet"] == [] and report["experts"]["transport"] == "hierarchical"
    assert any(line.startswith(note) for line in report["notes"])
    assert report["time"]["gemms_in"] == "fp8"
    plan = read_plan(
        f"{DEEPSEEK} --vocab-size 129280 --tokenizer-type NullTokenizer --mock-data --device cuda".split(),
        {"RANK": "0", "WORLD_SIZE": "1024", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"},
    )
    assert f"# {note}" in plan.resolved_yaml and any(line.startswith(note) for line in plan.notes)
    with pytest.raises(FlagErrors, match="--moe-flex-require-backend, but --moe-flex-dispatcher-backend deepep"):
        read_plan(f"{DEEPSEEK} --moe-flex-require-backend --dry-run".split(), {}, vocab_size_of=vocab_size_of)


@pytest.mark.parametrize("ranks", [8, 16])
def test_only_with_check_packages_a_dry_run_depends_on_installed_packages(ready, monkeypatch, ranks):
    installed: set[str] = set()

    def find(name: str) -> object:
        return name if name in installed or name not in (*libraries(), "wandb") else None

    monkeypatch.setattr("arguments.read.find_spec", find)
    monkeypatch.setattr("arguments.dry_run.inputs.find_spec", find)
    line = (
        f"{ready} --vocab-size 1000 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --nodes 2 "
        f"--expert-model-parallel-size {ranks} --num-experts 16 --gpus-per-node 8 --global-batch-size 64 "
        "--wandb-project x --wandb-exp-name y"
    )
    required, checked = f"{line} --moe-flex-require-backend", f"{line} --check-packages"
    absent = values(line), values(required)
    refused = finished_or_refused(f"{required} --check-packages")
    report = values(checked)
    assert report["experts"]["transport"] == ("symmetric" if ranks == 8 else "hierarchical")
    assert any("the module hybrid_ep_cpp is not installed, so" in note for note in report["notes"])
    (sentence,) = report["missing_inputs"]
    assert sentence.startswith("--wandb-project needs the package wandb, which is not installed")
    assert "hybrid_ep_cpp is not installed" in refused
    installed |= {"hybrid_ep_cpp", "wandb"}
    present = values(line), values(required)
    assert absent == present and all(report["would_start"] for report in present)
    assert present[0]["experts"]["transport"] == "hybridep"
    assert any("where the module hybrid_ep_cpp is not installed" in note for note in present[0]["notes"])
    report = values(f"{required} --check-packages")
    assert report["would_start"] and not any("hybrid_ep_cpp" in note for note in report["notes"])


def finished_or_refused(text: str) -> str:
    with pytest.raises((Finished, FlagErrors)) as caught:
        read_plan(shlex.split(f"{text} --dry-run"), {}, vocab_size_of=vocab_size_of)
    return str(caught.value)


@pytest.fixture
def ready(tmp_path, monkeypatch) -> str:
    """Returns a command line whose files all exist."""
    monkeypatch.chdir(tmp_path)
    for name in ("corpus_text_document.idx", "corpus_text_document.bin", "x.model"):
        Path(name).touch()
    return shlex.join(words(SMALL))


def test_exit_code_0_means_that_the_run_would_start(ready):
    report = finished(f"{ready} --dry-run")
    assert report.code == ExitCode.OK and "would not start" not in report.text
    assert values(ready)["would_start"] and values("--recipe m27")["would_start"]
    assert values(DEEPSEEK)["would_start"] and finished(f"{DEEPSEEK} --dry-run").code == ExitCode.OK
    late = f"{ready} --decrease-batch-size-if-needed"
    assert not values(late)["would_start"] and finished(f"{late} --dry-run").code == ExitCode.NOT_READY
    argv = [*shlex.split(ready), "--vocab-size", "1000", "--dry-run"]
    assert main([*argv, "--tokenizer-type", "NullTokenizer"], {}) == ExitCode.OK
    assert main([*argv, "--tokenizer-type", "NullTokenizer", "--split", "a"], {}) == ExitCode.NOT_READY
    assert main(argv, {}) == ExitCode.NOT_READY  # the file of the tokenizer is empty


@pytest.mark.parametrize(
    ("more", "without", "sentence"),
    [
        ("", "--data-path", NO_DATA),
        ("--split 3,x", "", "--split 3,x is not a list of up to three weights; write it like 99,1,0"),
        ("--data-path 1 corpus_text_document 2 b", "", "2 of 4 files of --data-path do not exist, such as b.idx"),
        ("--data-path corpus", "", "2 of 2 files of --data-path do not exist, such as corpus.idx"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-30B-A3B", "", None),
        ("--load hf:none", "", "--load hf:none does not exist"),
        ("--load none --exit-on-missing-checkpoint", "", "--load none does not exist"),
        ("--load . --skip-train", "", "--load . holds no checkpoint"),
        ("--load none", "", None),
        (
            "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --gpu a100",
            "",
            "the recipe tensorwise needs a GPU of comput",
        ),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --gpu h100", "", "the recipe mxfp8 needs a GPU of compute capab"),
        (
            "--bf16 --fp4-format e2m1 --gpu h200",
            "",
            "the recipe nvfp4 needs a GPU of compute capability 10.0, but H200",
        ),
        ("--bf16 --fp4-format e2m1 --gpu h200 --emulate-low-precision", "", None),
        ("--pretrained-checkpoint none", "", "--pretrained-checkpoint none does not exist"),
    ],
)
def test_missing_and_wrong_inputs_are_reported_before_the_estimates(ready, more, without, sentence):
    line = f"{shlex.join(words(SMALL, without))} {more} --vocab-size 1000 --dry-run"
    report = finished(line)
    if sentence is None:
        assert report.code == ExitCode.OK
        return
    assert report.code == ExitCode.NOT_READY
    (found,) = values(line)["missing_inputs"]
    assert found.startswith(sentence) and values(line)["cannot_train_yet"] == []
    lines = report.text.splitlines()
    assert lines[3] == "missing or wrong, so that the run would not start" and lines[4].startswith(f"  {sentence}")


@pytest.mark.parametrize("more", ["--load none", "--load none --finetune", "--save . --load . --finetune"])
def test_a_start_from_random_weights_is_noted(ready, more):
    report = finished(f"{ready} {more} --save-interval 10 --dry-run")
    assert report.code == ExitCode.OK and "the run starts from random weights" in report.text


def test_a_missing_tokenizer_is_reported_once(ready):
    line = f"{shlex.join(words(SMALL, '--tokenizer-model'))} --vocab-size 1000 --dry-run"
    assert values(line)["missing_inputs"] == [
        "SentencePieceTokenizer cannot be used without a file; set --tokenizer-model"
    ]


def test_missing_inputs_come_before_missing_features(ready):
    text = answer_to(f"{ready} --split x --decrease-batch-size-if-needed --dry-run")
    assert (
        text.index("--split x")
        < text.index("ranks\n")
        < text.index("--decrease-batch-size-if-needed is not available yet")
    )


def test_a_second_start_reads_no_load_folder(ready):
    Path("runs/a/checkpoints/iter_0000001").mkdir(parents=True)
    assert finished(f"{ready} --load hf:none --dry-run").code == ExitCode.OK


def test_unsupported_layers_have_no_estimates():
    line = "--recipe m27 --fp32-residual-connection"
    report, text = values(line), answer_to(f"{line} --dry-run")
    assert report["unknown_layers"] and not report["would_start"]
    assert not {"model", "stages", "memory", "communication", "experts", "time"} & report.keys()
    assert "cannot be built yet, so figures that depend on its layers are left out" in text.splitlines()[0]
    assert "parameters" not in text and "GiB" not in text and "FLOP" not in text
    assert report["ranks"]["world_size"] >= 1 and report["schedule"]["microbatches"] >= 1


def test_flags_that_add_no_layer_keep_the_estimates(ready):
    assert values(f"{ready} --qk-clip --linear-conv-kernel-dim 8")["model"] == values(ready)["model"]


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("--recipe m27 --global-batch-size 4000000000000", None),
        (f"{DEEPSEEK} --global-batch-size 1048576000000", None),
        (f"{DEEPSEEK} --world-size 104857600 --global-batch-size 838860800", None),
        ("--recipe mixtral-8x7b-h100-64 --world-size 104857600 --global-batch-size 1048576000 --gpu gb200", None),
        (
            "--recipe mixtral-8x7b-h100-64 --world-size 99999999 --tensor-model-parallel-size 100000000",
            "100000000 ranks",
        ),
        (
            f"{shlex.join(words(SMALL, '--train-iters --lr-warmup-iters'))} --train-samples {2 * 10**12} "
            f"--rampup-batch-size 8 8 {10**12} --global-batch-size {4 * 10**12}",
            None,
        ),
        (
            f"{shlex.join(words(SMALL, '--train-iters --lr-warmup-iters'))} --train-samples {2 * 10**12} "
            f"--rampup-batch-size 4 4 {10**12} --global-batch-size 800",
            None,
        ),
        (
            f"{DEEPSEEK} --global-batch-size 8192000 --microbatch-group-size-per-virtual-pipeline-stage 64000",
            "groups of 64,000 microbatches",
        ),
        ("--recipe m27 --global-batch-size 8192000 --moe-expert-wgrad-interval 600000", "experts every 600,000"),
    ],
)
def test_any_batch_and_world_size_is_reported_or_rejected_within_two_seconds(line, refused):
    started = process_time()
    with pytest.raises(FlagErrors if refused else Finished, match=refused):
        read_plan(shlex.split(f"{line} --dry-run"), {}, vocab_size_of=vocab_size_of)
    assert process_time() - started < 2


@pytest.mark.parametrize("growth", ["--rampup-batch-size 4 4 8000", '--step-batch-size-schedule "0:4 512K:16"'])
def test_tokens_and_time_of_a_growing_batch_are_those_of_its_samples(growth):
    line = shlex.join([*words(SMALL, without="--train-iters --lr-warmup-iters"), "--train-samples", "16000"])
    plain, grown = (values(f"{line} {more}")["time"]["run"] for more in ("", growth))
    assert plain["tokens"] == 16000 * 128 and grown["iterations"] > 1.5 * plain["iterations"]
    for name in ("tokens", "gpu_hours"):
        assert grown[name] == pytest.approx(plain[name], rel=2e-3)
    assert values(f"{line} {growth} --tokens {grown['tokens']}")["time"]["run"] == grown
    assert values(f"{line} {growth} --tokens {grown['tokens'] + 1}")["time"]["run"]["iterations"] == (
        grown["iterations"] + 1
    )


@pytest.mark.parametrize("more", ["", "--nodes 3", "--gpus 24", "--world-size 24 --nodes 3"])
def test_a_file_sets_the_machine_like_a_recipe(ready, more):
    Path("plan.yaml").write_text("about: {gpu: H200, gpus: 24}")
    line = f"--config plan.yaml {ready} --global-batch-size 96"
    report = values(f"{line} {more}")
    assert (report["ranks"]["world_size"], report["ranks"]["nodes"], report["device"]["kind"]) == (24, 3, "h200")


def test_the_last_file_sets_the_machine_and_flags_override_it(ready):
    Path("a.yaml").write_text("about: {gpu: h200, gpus: 24}")
    Path("b.yaml").write_text("about: {gpus: 16}")
    line = f"{ready} --global-batch-size 64"
    report = values(f"--config a.yaml b.yaml {line}")
    assert (report["ranks"]["world_size"], report["device"]["kind"]) == (16, "h200")
    report = values(f"--config a.yaml b.yaml {line} --gpu gb200 --nodes 2")
    assert (report["ranks"]["world_size"], report["ranks"]["ranks_per_node"]) == (8, 4)
    report = values(f"--config a.yaml {line} --gpus 8 --nodes 4 --tensor-model-parallel-size 2 --sequence-parallel")
    assert report["ranks"]["groups"]["dp"]["where"] == "over 4 NVLink domains, 4 nodes"


@pytest.mark.parametrize(
    "size", ["--nodes 1 --gpus-per-node 16", "--gpus 16 --nodes 1", "--gpus 16 --gpus-per-node 16"]
)
def test_a_single_node_may_have_more_gpus_than_usual(ready, size):
    report = values(f"{ready} --global-batch-size 64 {size}")
    ranks = report["ranks"]
    assert (ranks["world_size"], ranks["nodes"], ranks["ranks_per_node"]) == (16, 1, 16)
    assert ranks["groups"]["dp"]["where"] == "inside a node"


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ("gpus: many", "a.yaml: `gpus` of `about` is 'many', not an integer of at least 1"),
        ("gpu: x9", "a.yaml: `gpu` of `about` is 'x9', not one of a100, h100, "),
        ("gpuz: 4", "a.yaml: `about` has no entry 'gpuz', only model, gpu, gpus"),
        ("gpu-memory: -2", "a.yaml: `gpu-memory` of `about` is '-2', not a positive number"),
    ],
)
def test_a_file_with_an_invalid_machine_is_rejected(ready, about, sentence):
    Path("a.yaml").write_text(f"about: {{{about}}}")
    with pytest.raises(FlagErrors) as caught:
        answer_to(f"--config a.yaml {ready} --dry-run")
    (problem,) = caught.value.problems
    assert problem.what.startswith(sentence)


def test_the_architecture_must_be_given():
    with pytest.raises(FlagErrors) as caught:
        read_plan([*words(SMALL, without="--num-layers"), "--dry-run"], {}, vocab_size_of=vocab_size_of)
    assert [problem.what for problem in caught.value.problems] == ["--num-layers is required"]


def test_recompute_offload_and_formats_change_the_bytes():
    line = "--recipe qwen3-30b-a3b-h100-32 --moe-token-dispatcher-type alltoall"
    plain = values(line)["memory"]
    recomputed = values(f"{line} --recompute-granularity selective --recompute-modules moe_act layernorm")["memory"]
    offloaded = values(f"{line} --fine-grained-activation-offloading --offload-modules expert_fc1")["memory"]
    lean = values(f"{line} --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")["memory"]
    assert recomputed["total_gib"] < plain["total_gib"]
    assert offloaded["host_gib"] > 1 and offloaded["total_gib"] < plain["total_gib"]
    assert lean["heaviest"]["gib"]["moments"] == plain["heaviest"]["gib"]["moments"] / 2


def test_differences_from_the_recipe_are_listed():
    report = values(f"{DEEPSEEK} --micro-batch-size 2")["differences"]
    assert report == ["--micro-batch-size 2 (command line); recipe: 1"]


def missing(config: object) -> int:
    raise DataProblem("the tokenizer is not here")


def test_an_unreadable_tokenizer_is_reported_with_the_vocab_size_flag():
    with pytest.raises(FlagErrors) as caught:
        read_plan([*words(SMALL), "--dry-run"], {}, vocab_size_of=missing)
    (problem,) = caught.value.problems
    assert problem.what == "the tokenizer is not here" and "--vocab-size" in problem.remedy


def test_the_quickstart_is_estimated_before_its_tokenizer_is_trained():
    with pytest.raises(Finished) as caught:
        read_plan(["--recipe", "quickstart", "--dry-run=json"], {}, vocab_size_of=missing)
    report = json.loads(caught.value.text)
    assert "the tokenizer is not here" in report["missing_inputs"]
    assert report["model"]["parameters"] > 3e6


@pytest.mark.parametrize(
    ("more", "without", "size", "assumed"),
    [
        ("--vocab-size 4096", "", 4096, ""),
        ("--padded-vocab-size 5120", "", 5120, ""),
        (
            "--vocab-file v --merge-file m",
            "--tokenizer-type --tokenizer-model",
            50257,
            "; the figures assume GPT-2's vocabulary of 50,257 tokens",
        ),
        ("--vocab-file v --merge-file m --vocab-size 999", "--tokenizer-type --tokenizer-model", 999, ""),
    ],
)
def test_a_missing_tokenizer_is_one_line_among_the_problems(more: str, without: str, size: int, assumed: str):
    """The report uses --vocab-size, or assumes a vocabulary size."""
    argv = [*words(SMALL, f"--data-path {without}"), *more.split()]
    with pytest.raises(Finished) as caught:
        read_plan([*argv, "--dry-run=json"], {}, vocab_size_of=missing)
    report = json.loads(caught.value.text)
    assert report["missing_inputs"] == [NO_DATA, f"the tokenizer is not here{assumed}"]
    with pytest.raises(Finished) as caught:
        read_plan([*argv, "--vocab-size", str(size), "--dry-run=json"], {}, vocab_size_of=lambda config: size)
    assert json.loads(caught.value.text)["model"] == report["model"]


def test_a_tokenizer_without_its_package_is_reported_with_check_packages(ready):
    def without_package(config: object) -> int:
        raise EnvironmentProblem("the package is not here")

    for flags, expected in (([], []), (["--check-packages"], ["the package is not here"])):
        with pytest.raises(Finished) as caught:
            argv = [*shlex.split(ready), "--vocab-size", "1000", "--dry-run=json", *flags]
            read_plan(argv, {}, vocab_size_of=without_package)
        assert json.loads(caught.value.text)["missing_inputs"] == expected


def test_a_vocabulary_size_replaces_the_tokenizer():
    whole = values(" ".join(words(SMALL)))["model"]
    for without in ("--tokenizer-type", "--tokenizer-type --tokenizer-model --data-path"):
        line = " ".join(words(SMALL, without=without))
        assert values(f"{line} --vocab-size {VOCAB_SIZE}")["model"] == whole


@pytest.mark.parametrize("kind", ["", "--tokenizer-type NullTokenizer"])
def test_dry_run_without_vocabulary_size_is_rejected(kind):
    with pytest.raises(FlagErrors) as caught:
        answer_to(f"{' '.join(words(SMALL, without='--tokenizer-type'))} {kind} --dry-run")
    (problem,) = caught.value.problems
    assert problem.what == "the vocabulary size is not known" and "--vocab-size" in problem.remedy


def test_dry_run_report_matches_the_launched_plan():
    """Layout, sizes and batch in the report equal those of a launch on the same number of ranks."""
    line = "--recipe m27"
    launched = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    plan = read_plan(line.split(), launched, vocab_size_of=vocab_size_of)
    report = values(line)
    assert report["schedule"]["layout"] == str(plan.layout)
    assert report["ranks"]["world_size"] == plan.parallel.world_size
    assert report["schedule"]["global_batch_size"] == plan.batch.global_batch_size
    assert plan.blockers == ()
