"""Files of data paths, which replace `--data-path` and the paths per split."""

import json
from pathlib import Path

import pytest

from tests.helpers.command_lines import plan_of, texts_of


def write(folder: Path, content: str) -> Path:
    path = folder / "list"
    path.write_text(content)
    return path


def test_a_list_file_replaces_data_path(tmp_path):
    path = write(tmp_path, "0.3 one\n0.7 'a b'\n")
    plan = plan_of(f"--data-args-path {path}", "--data-path")
    assert plan.data.data_path == ("0.3", "one", "0.7", "a b")
    assert 'data-path: [0.3, one, 0.7, "a b"]' in plan.resolved_yaml
    assert str(path) in plan.resolved_yaml


@pytest.mark.parametrize("train", [["0.3", "one", 0.7, "two"], "0.3 one 0.7 two"])
def test_a_list_file_with_splits_replaces_the_paths_of_each_split(tmp_path, train):
    path = write(tmp_path, json.dumps({"train": train, "valid": ["three"]}))
    data = plan_of(f"--per-split-data-args-path {path}", "--data-path --split").data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (
        ("0.3", "one", "0.7", "two"),
        ("three",),
        (),
    )


@pytest.mark.parametrize(
    ("option", "content", "sentence"),
    [
        ("--data-args-path", "a 'b", "quote that is not closed"),
        ("--per-split-data-args-path", "{", "Expecting property name"),
        ("--per-split-data-args-path", "[]", "must map train, valid, test to lists"),
        ("--per-split-data-args-path", '{"dev": []}', "must map train, valid, test to lists"),
        ("--per-split-data-args-path", '{"train": [[]]}', "only weights and prefixes"),
    ],
)
def test_an_empty_list_file_is_rejected(tmp_path, option, content, sentence):
    path = write(tmp_path, content)
    assert any(f"{option} {path}" in text and sentence in text for text in texts_of(f"{option} {path}", "--data-path"))


def test_a_missing_list_file_or_repeated_flag_is_rejected(tmp_path):
    (text,) = texts_of("--data-args-path nowhere")
    assert text == "--data-args-path nowhere cannot be read: No such file or directory"
    (text,) = texts_of(f"--data-args-path {write(tmp_path, 'other')}")
    assert text.endswith("conflicts with --data-path; give one of them")
    assert texts_of(f"--data-args-path {write(tmp_path, 'corpus_text_document')}") == []


@pytest.mark.parametrize(("seq_length", "documents"), [(8192, 100_000), (2048, 100_000), (256, 12_500), (16, 1_000)])
def test_short_sequences_need_fewer_mock_documents(seq_length: int, documents: int):
    plan = plan_of(f"--mock-data --seq-length {seq_length} --max-position-embeddings {seq_length}")
    assert plan.data.mock_documents == documents
