"""tools/plan.py: what it prints, what it writes, how it ends."""

from pathlib import Path

from arguments.read import read_plan
from megatron_moe.specs.exitcodes import ExitCode
from tools import plan


def test_fit_leaves_a_recipe_that_reads_back(tmp_path: Path, capsys):
    assert plan.main(["--fit", "--recipe", "m8", "--gpu", "h100", "--write", str(tmp_path)]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "does not fit: 94.5 of 79.2 GiB" in told and "moments in bf16" in told
    read = read_plan(["--config", str(tmp_path / "fit.yaml"), "--vocab-size", "163840"], {}, lambda spec: 163840)
    assert read.precision.exp_avg == "bf16" and read.memory.recompute.granularity == "selective"


def test_what_fits_nowhere_says_so(capsys):
    words = ["--recipe", "deepseek-v3-h100-1024", "--gpu", "h100", "--gpus", "2"]
    assert plan.main(words) == ExitCode.MEMORY
    assert "nothing fits" in capsys.readouterr().out


def test_wrong_flags_are_refused(capsys):
    assert plan.main(["--recipe", "q6", "--no-such-flag", "1"]) == ExitCode.CONFIG
    assert "--no-such-flag" in capsys.readouterr().err
