"""tools/compare_losses.py: what it reads, what it calls equal, how it ends."""

import json
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from tools.compare_losses import main


def run_of(folder: Path, *losses: object) -> str:
    """A run folder whose steps had these losses."""
    folder.mkdir()
    rows = [{"iteration": number, "lm loss": loss} for number, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_equal_curves_are_equal_and_others_differ_from_a_step_on(tmp_path, capsys):
    runs = [run_of(tmp_path / name, 2.0, last) for name, last in (("a", 1.5), ("b", 1.5), ("c", 1.6))]
    assert main(runs[:2]) == ExitCode.OK
    assert main(runs[1:]) == ExitCode.NUMERICS
    assert main([*runs[1:], "--rtol", "0.1"]) == ExitCode.OK
    assert "differ by more than 0 from iteration 2 on" in capsys.readouterr().out


def test_a_loss_that_was_not_finite_differs_from_everything(tmp_path, capsys):
    """metrics.jsonl has null in its place."""
    good, bad = run_of(tmp_path / "good", 2.0, 1.5, 1.4), run_of(tmp_path / "bad", 2.0, None, 1.4)
    assert main([good, bad]) == main([bad, good]) == ExitCode.NUMERICS
    assert "from iteration 2 on" in capsys.readouterr().out


def test_what_is_no_curve_is_refused(tmp_path, capsys):
    good, texts = run_of(tmp_path / "good", 2.0), run_of(tmp_path / "texts", "two")
    for other, sentence in ((texts, "values that are not numbers"), (str(tmp_path / "none"), "does not exist")):
        assert main([good, other]) == ExitCode.DATA
        assert sentence in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_told(tmp_path, capsys):
    good = run_of(tmp_path / "good", 2.0)
    (tmp_path / "file").write_text("in the way")
    assert main([good, good, "--plot", str(tmp_path / "file" / "a.png")]) == ExitCode.ENVIRONMENT
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([good, good, "--plot", "a.xyz"])
