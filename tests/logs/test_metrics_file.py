"""metrics.jsonl survives kills, resumes and any JSON reader."""

import json

import pytest

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.logs.metrics_file import (
    encode,
    read_metrics,
    truncate_metrics,
)

RECORDS = [{"iteration": i, "lm loss": 3.5 - i} for i in (1, 2, 3)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(map(encode, RECORDS)))
    return path


def test_records_come_back_as_they_were(path):
    assert read_metrics(path) == RECORDS


def test_a_torn_last_line_is_skipped(path):
    path.write_bytes(path.read_bytes()[:-5])
    assert read_metrics(path) == RECORDS[:2]


def test_a_last_record_without_its_newline_counts(path):
    path.write_bytes(path.read_bytes()[:-1])
    assert read_metrics(path) == RECORDS


@pytest.mark.parametrize("line", [b'{"iteration": 1', b"[1]", b"nonsense", b""])
def test_a_broken_line_elsewhere_is_refused_with_its_number(path, line):
    first, *rest = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, line, *rest]))
    with pytest.raises(DataProblem, match="metrics.jsonl: line 2 is not a JSON object"):
        read_metrics(path)


def test_a_resumed_run_drops_later_records_and_the_torn_line(path):
    with open(path, "ab") as file:
        file.write(b'{"iteration": 4, "lm')
    truncate_metrics(path, 2)
    assert path.read_bytes() == b"".join(map(encode, RECORDS[:2]))
    assert [each.name for each in path.parent.iterdir()] == ["metrics.jsonl"]


def test_truncating_what_is_not_there_makes_nothing(tmp_path):
    truncate_metrics(tmp_path / "metrics.jsonl", 5)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_not_finite_become_null_and_vectors_are_rounded():
    line = encode({"lm loss": float("nan"), "load": [1.0, float("inf"), 0.12345678], "count": 3.0, "time": "now"})
    assert line.endswith(b"\n")
    text = line.decode()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text) == {"lm loss": None, "load": [1, None, 0.123457], "count": 3, "time": "now"}


def test_scalars_keep_all_their_digits():
    assert json.loads(encode({"lm loss": 0.1 + 0.2}))["lm loss"] == 0.1 + 0.2
