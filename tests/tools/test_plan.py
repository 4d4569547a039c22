"""tools/plan.py: what it prints, what it writes, how it ends."""

from pathlib import Path

from arguments.read import read_plan
from megatron_moe.specs.exitcodes import ExitCode
from tools import plan


def test_fit_leaves_a_recipe_that_reads_back(tmp_path: Path, capsys):
    words = "--fit --recipe m8 --gpu h100 --micro-batch-size 4 --moe-expert-wgrad-interval 1 --write".split()
    assert plan.main([*words, str(tmp_path)]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "does not fit: 98.6 of 79.2 GiB" in told and "moments in bf16" in told
    read = read_plan(["--config", str(tmp_path / "fit.yaml"), "--vocab-size", "163840"], {}, lambda spec: 163840)
    assert read.precision.exp_avg == "bf16" and read.memory.recompute.granularity == "selective"


def test_what_fits_nowhere_says_so(capsys):
    words = ["--recipe", "deepseek-v3-h100-1024", "--gpu", "h100", "--gpus", "2"]
    assert plan.main(words) == ExitCode.MEMORY
    assert "nothing fits" in capsys.readouterr().out


def test_wrong_flags_are_refused(capsys):
    assert plan.main(["--recipe", "q6", "--no-such-flag", "1"]) == ExitCode.CONFIG
    assert "--no-such-flag" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_planned(capsys):
    """As one from a published config.json is."""
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --seq-length 64 --vocab-size 96"
    run = "--micro-batch-size 1 --global-batch-size 8 --max-position-embeddings 64 --train-iters 2 --bf16"
    assert plan.main([*model.split(), *run.split(), "--gpu", "h100", "--gpus", "2", "--best", "1"]) == ExitCode.OK
    assert "the fastest layouts on 2 H100" in capsys.readouterr().out
