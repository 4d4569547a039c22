"""tools/summarize_run.py as a program."""

from megatron_moe.config.exit_codes import ExitCode
from tests.helpers.run_dirs import make_run
from tools.summarize_run import main


def test_a_table_is_printed_and_written(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a", (1.0,))
    make_run(tmp_path / "runs" / "b", (2.0,))
    out = tmp_path / "table.md"
    assert main([str(tmp_path / "runs"), "--format", "markdown", "--output", str(out)]) == ExitCode.OK
    assert capsys.readouterr().out == out.read_text()
    assert [line.split(" | ")[0] for line in out.read_text().splitlines()[2:]] == ["| a", "| b"]


def test_a_folder_without_runs_is_a_data_problem(tmp_path, capsys):
    assert main([str(tmp_path)]) == ExitCode.DATA
    assert "holds no run" in capsys.readouterr().err
