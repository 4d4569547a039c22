"""tools/plan.py: output, written recipes and exit codes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from arguments.errors import Finished
from arguments.read import read_plan
from megatron_moe.config.exit_codes import ExitCode
from tests.arguments.test_hf_source import QWEN, folder_of
from tools import plan

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --seq-length 64 --vocab-size 96 "
    "--micro-batch-size 1 --max-position-embeddings 64 --train-iters 2 --bf16"
)


def test_recipe_written_by_fit_can_be_read(tmp_path: Path, capsys):
    sizes = "--micro-batch-size 4 --seq-length 5120 --moe-expert-wgrad-interval 1"
    words = f"--fit --recipe m8 --gpu h100 {sizes} --tokens 1e9 --gpu-hour-price 2 --write".split()
    assert plan.main([*words, str(tmp_path)]) == ExitCode.OK
    output = capsys.readouterr().out
    assert "does not fit: 99.0 of 79.2 GiB" in output and "moments in bf16" in output
    assert re.search(r"^or (2|4|8|16) GPUs: TP1 CP1 PP1x1 EP\d+ ETP1 MBS4", output, re.MULTILINE), output
    assert "time: estimate ± 20%: " in output and " GPU hours, cost " in output and "1 B tokens" in output
    assert "estimate ±: the largest deviation measured" in output and "--write DIR" not in output
    assert {path.name for path in tmp_path.iterdir()} == {"fit.yaml", "fit-2.yaml", "fit-3.yaml"}
    assert "force" not in (tmp_path / "fit.yaml").read_text(), "the benchmark m8 forces the routing"
    read = read_plan(["--config", str(tmp_path / "fit.yaml"), "--vocab-size", "163840"], {}, lambda config: 163840)
    assert read.precision.exp_avg_dtype == "bf16" and read.memory.recompute.recompute_modules


def test_no_fitting_layout_exits_with_memory_code(capsys):
    words = ["--recipe", "mixtral-8x7b-h100-64", "--gpu", "h100", "--gpus", "1", "--micro-batch-size", "1"]
    assert plan.main(words) == ExitCode.MEMORY
    assert "no layout fits 1 H100 with any memory options\n16 H100 would be enough" in capsys.readouterr().out


def test_a_model_without_a_tokenizer_is_planned(capsys):
    words = f"{SMALL} --global-batch-size 8 --gpu h100 --gpus 2 --best 1"
    assert plan.main(words.split()) == ExitCode.OK
    output = capsys.readouterr().out
    assert re.search(r"model: [\d,]+ parameters, [\d,]+ active, 2 layers; ", output) and " MiB of 79.2 GiB" in output
    assert "the fastest layouts on 2 H100" in output and "--write DIR writes these plans" in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--recipe q6 --no-such-flag 1", "--no-such-flag"),
        ("--recipe no-such", "there is no recipe 'no-such'"),
        ("--num-layers 4", "--hidden-size is required"),
        ("--recipe q6 --num-attention-heads 30", "4 query groups do not divide 30 heads"),
        ("--recipe q6 --proxy", "--proxy is not supported by the planner"),
        ("--recipe q6 --gpus 9 --nodes 2", "--gpus 9 and --nodes 2 contradict each other"),
        ("--recipe m27 --fp32-residual-connection", "does not know the layers of --fp32-residual-connection"),
        ("--fit --recipe q6 --gpus 3 --tensor-model-parallel-size 2", "does not divide 3 ranks"),
        ("--fit --recipe q6 --micro-batch-size 1000000", "is not a multiple of 1000000"),
    ],
)
def test_invalid_requests_are_rejected(words: str, sentence: str, capsys):
    assert plan.main(words.split()) == ExitCode.CONFIG
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("size", ["--gpus 16", "--world-size 16", "--nodes 2"])
def test_cluster_options_equal_those_of_a_dry_run(size: str, tmp_path: Path, capsys):
    words = f"--recipe mixtral-8x7b-h100-64 --gpu H200 {size} --moe-token-dispatcher-type alltoall"
    words = [*words.split(), "--best", "1", "--write"]
    assert plan.main([*words, str(tmp_path)]) == ExitCode.OK
    assert "on 16 H200" in capsys.readouterr().out
    with pytest.raises(Finished) as caught:
        read_plan(["--config", str(tmp_path / "plan-01.yaml"), "--dry-run=json"], {})
    output = json.loads(caught.value.text)
    assert (output["ranks"]["world_size"], output["device"]["kind"]) == (16, "h200")
    assert caught.value.code == ExitCode.OK and output["memory"]["fits"]


@pytest.mark.parametrize("words", ["--gpus 0", "--gpus -4", "--best 0", "--imbalance 0", "--imbalance nan"])
def test_invalid_numbers_are_rejected(words: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        plan.main(["--recipe", "q6", *words.split()])
    assert "at least 1" in capsys.readouterr().err


def test_unwritable_folder_is_reported(tmp_path: Path, capsys):
    (tmp_path / "file").write_text("in the way")
    words = ["--recipe", "q6", "--fit", "--micro-batch-size", "1", "--write", str(tmp_path / "file" / "plans")]
    assert plan.main(words) == ExitCode.ENVIRONMENT
    assert "cannot be written" in capsys.readouterr().err


def test_a_hugging_face_folder_is_planned_and_the_recipe_says_what_is_missing(tmp_path: Path, capsys):
    folder = folder_of({**QWEN, "num_hidden_layers": 4}, tmp_path / "hf")
    words = f"--load hf:{folder} --gpu h100 --gpus 2 --best 1 --write {tmp_path}".split()
    assert plan.main(words) == ExitCode.OK
    output, written = capsys.readouterr().out, (tmp_path / "plan-01.yaml").read_text()
    for text in (output, written.replace("\n#  ", "")):
        assert "4 layers; global batch of 2 sequences of 4,096 tokens; bf16; 2 H100" in text
        assert "model: 3.11 B parameters, 850 M active" in text
    assert "--hidden-size 2048" in output, "the flags that are taken"
    assert "\ntrain-iters" not in written and "# The length of the run is not known" in written
    assert f"not known: start a plan with pretrain_moe.py --config {tmp_path}/FILE --train-iters N" in output
    assert "\nglobal-batch-size: 2\n" in written, "the batch that was planned"
    assert f'load: "hf:{folder}"\n' in written and "learning rate is 0" not in written
    assert plan.main([*words, "--tokens", "8193", "--lr", "0"]) == ExitCode.OK
    assert "--train-iters N" not in capsys.readouterr().out
    written = (tmp_path / "plan-01.yaml").read_text()
    assert "train-iters: 2\n" in written and "not known" not in written and "# The learning rate is 0" in written
    use = ["--config", str(tmp_path / "plan-01.yaml"), "--mock-data", "--world-size", "2", "--dry-run"]
    with pytest.raises(Finished) as finished:
        read_plan([*use, "--tokenizer-type", "NullTokenizer", "--vocab-size", "151936"], {})
    assert finished.value.code in (ExitCode.OK, ExitCode.NOT_READY)
    assert plan.main([*words, "--hidden-size", "1024"]) == ExitCode.CONFIG
    assert "--hidden-size 1024 contradicts 2048" in capsys.readouterr().err


def test_tokens_keep_the_unit_of_the_learning_rate_schedule(tmp_path: Path, capsys):
    length = "--train-samples 6400 --lr-warmup-samples 640 --lr-decay-samples 3200 --tokens 4e6"
    words = f"--fit {length} --gpus 1 --global-batch-size 16 --lr 1 --mock-data --write {tmp_path}".split()
    assert plan.main([*SMALL.replace("--train-iters 2 ", "").split(), *words]) == ExitCode.OK
    written = tmp_path / "fit.yaml"
    assert "\ntrain-samples: 62512\n" in written.read_text(), "4e6 tokens in whole batches of 16 x 64"
    with pytest.raises(Finished):
        read_plan(["--config", str(written), "--dry-run"], {})


def test_a_plan_for_a_custom_gpu_keeps_its_figures(tmp_path: Path, capsys):
    """The written file gives the same GPU, node and step time without the flags; `--gpu` selects another type."""
    figures = "--gpu-memory 47.25 --gpu-tflops 149.7 --gpu-bandwidth 1234.5 --link-bandwidth 27 --gpus-per-node 4"
    words = f"--fit {figures} --gpus 16 --global-batch-size 16 --lr 1 --mock-data --write".split()
    assert plan.main([*SMALL.split(), *words, str(tmp_path)]) == ExitCode.OK
    described = "47.25 GiB, 150 TFLOP/s in bf16, memory with 1,234 GB/s, links with 27 GB/s"
    assert described in capsys.readouterr().out

    path = tmp_path / "fit.yaml"
    about = yaml.safe_load(path.read_text())["about"]
    assert about == {
        "gpu": "h100", "gpus": 16, "gpus-per-node": 4,
        "gpu-memory": 47.25, "gpu-tflops": 149.7, "gpu-bandwidth": 1234.5, "link-bandwidth": 27,
    }  # fmt: skip
    again, with_flags, h100 = (
        dry_run(f"--config {path} {more}") for more in ("", f"--world-size 16 {figures}", "--gpu h100 --world-size 16")
    )
    assert again == with_flags and again["device"]["figures"] == described
    assert again["ranks"]["ranks_per_node"] == 4 and h100["ranks"]["ranks_per_node"] == 8
    assert h100["device"]["figures"] is None and h100["device"]["memory_gib"] == 79.2
    assert plan.main(["--config", str(path), "--fit"]) == ExitCode.OK
    assert described in capsys.readouterr().out


def dry_run(words: str) -> dict[str, Any]:
    """Values of a dry run in JSON, without its command line."""
    with pytest.raises(Finished) as answer:
        read_plan([*words.split(), "--dry-run", "json"], {}, lambda config: 96)
    return {name: value for name, value in json.loads(answer.value.text).items() if name != "command_line"}
