"""tools/compare_losses.py: curves, tolerance and exit codes."""

import json
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from tools.compare_losses import main


def run_of(folder: Path, *losses: object) -> str:
    """Run folder with these losses, one per step."""
    folder.mkdir()
    rows = [{"iteration": number, "lm loss": loss} for number, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_first_differing_iteration_is_reported(tmp_path, capsys):
    runs = [run_of(tmp_path / name, 2.0, last) for name, last in (("a", 1.5), ("b", 1.5), ("c", 1.6))]
    assert main(runs[:2]) == ExitCode.OK
    assert main(runs[1:]) == ExitCode.NUMERICS
    assert main([*runs[1:], "--rtol", "0.1"]) == ExitCode.OK
    assert "differ by more than 0 from iteration 2 on" in capsys.readouterr().out


def test_non_finite_loss_differs_from_everything(tmp_path, capsys):
    """Non-finite losses are null in metrics.jsonl."""
    good, bad = run_of(tmp_path / "good", 2.0, 1.5, 1.4), run_of(tmp_path / "bad", 2.0, None, 1.4)
    assert main([good, bad]) == main([bad, good]) == ExitCode.NUMERICS
    assert "from iteration 2 on" in capsys.readouterr().out


def test_invalid_curves_are_rejected(tmp_path, capsys):
    good, texts = run_of(tmp_path / "good", 2.0), run_of(tmp_path / "texts", "two")
    for other, sentence in ((texts, "values that are not numbers"), (str(tmp_path / "none"), "does not exist")):
        assert main([good, other]) == ExitCode.DATA
        assert sentence in capsys.readouterr().err


def test_unwritable_plot_is_reported(tmp_path, capsys):
    good = run_of(tmp_path / "good", 2.0)
    (tmp_path / "file").write_text("in the way")
    assert main([good, good, "--plot", str(tmp_path / "file" / "a.png")]) == ExitCode.ENVIRONMENT
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([good, good, "--plot", "a.xyz"])
