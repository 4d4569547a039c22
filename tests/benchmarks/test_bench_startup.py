"""Benchmark of answers without torch: a table with one row per command, printed and stored."""

from pathlib import Path

import pytest

from benchmarks.harness import bench_startup


def test_a_question_is_a_row_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "table.md"
    words = ["--repeats", "1", "--output", str(output), "--question=--help", "--question=--num-layers 4"]
    bench_startup.main(words)
    head, _, helped, refused = capsys.readouterr().out.splitlines()
    assert head.startswith("| command |")
    assert helped.startswith("| `--help` | ") and helped.endswith("| 0 |")
    assert refused.startswith("| `--num-layers 4` | ") and refused.endswith("| 2 |")
    assert refused in output.read_text()
