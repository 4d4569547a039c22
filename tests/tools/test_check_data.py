"""tools/check_data.py: statistics and problems of token files."""

from pathlib import Path

import numpy as np
import pytest

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.data.indexed import IndexedWriter
from tools.check_data import check_tokens, main

DOCUMENTS = ([[5, 6], [7, 99]], [[]], [[1, 2, 3, 99]], [[4]])
"""Documents as lists of sequences; 99 is the end-of-document id."""


def written(prefix: Path, documents=DOCUMENTS, dtype=np.int32) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    return prefix


def test_table_of_documents_lengths_and_ids(tmp_path: Path, capsys):
    prefix = written(tmp_path / "a")
    assert main([str(prefix), "--vocab-size", "100", "--eod", "99"]) == ExitCode.OK
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        f"{prefix}: valid",
        "tokens 9 of int32",
        "sequences 5",
        "documents 4, 1 of them empty",
        "tokens per document 0 min, 2.5 median, 2.2 mean, 4 max",
        "ids 1 to 99, 8 distinct",
        "vocabulary 100",
        "documents with end 2 end with id 99",
    ]


def test_ids_outside_the_vocabulary_are_located(tmp_path: Path, capsys):
    prefix = written(tmp_path / "a")
    assert main([f"{prefix}.bin", "--vocab-size", "7"]) == ExitCode.DATA
    said = capsys.readouterr().out
    assert "INVALID" in said
    assert "document 0, token 2: id 7, expected 0 to 6" in said
    assert "document 0, token 3: id 99, expected 0 to 6" in said
    assert "document 2, token 3: id 99, expected 0 to 6" in said
    assert said.count("expected 0 to 6") == 3


def test_tokens_after_an_empty_document_belong_to_the_next(tmp_path: Path):
    _, problems = check_tokens(written(tmp_path / "a", [[[1]], [[]], [[9, 1]], [[8]]]), 8, None)
    assert [line.split(":")[0] for line in problems] == ["document 2, token 0", "document 3, token 0"]


def test_negative_ids_are_reported_without_a_vocabulary(tmp_path: Path, capsys):
    assert main([str(written(tmp_path / "a", [[[1, -2]]]))]) == ExitCode.DATA
    assert "document 0, token 1: id -2, expected 0 or more" in capsys.readouterr().out


def test_first_problems_are_listed_and_the_rest_counted(tmp_path: Path):
    prefix = written(tmp_path / "a", [[[9] * 50]])
    _, problems = check_tokens(prefix, 9, None)
    assert len(problems) == 21 and problems[-1] == "and 30 more ids outside the vocabulary"


def test_files_longer_than_a_block_are_read_completely(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tools.check_data._BLOCK_TOKENS", 3)
    rows, problems = check_tokens(written(tmp_path / "a"), 99, None)
    assert [line.split(":")[0] for line in problems] == ["document 0, token 3", "document 2, token 3"]
    assert dict(rows)["ids"] == "1 to 99, 8 distinct"


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_truncated_file_is_damaged_and_the_next_is_checked(suffix: str, tmp_path: Path, capsys):
    torn, fine = written(tmp_path / "torn"), written(tmp_path / "fine")
    path = torn.with_suffix(suffix)
    path.write_bytes(path.read_bytes()[:-1])
    assert main([str(torn), str(fine)]) == ExitCode.DATA
    said = capsys.readouterr().out
    assert f"{torn}: DAMAGED" in said and f"{path}" in said and f"{fine}: valid" in said


def test_an_empty_pair_has_no_ids(tmp_path: Path, capsys):
    assert main([str(written(tmp_path / "a", []))]) == ExitCode.OK
    assert "documents              0" in capsys.readouterr().out


def test_vocabulary_of_a_tokenizer_without_a_file(tmp_path: Path, capsys):
    prefix = written(tmp_path / "a", ([[104, 105, 256]], [[300]]))
    assert main([str(prefix), "--tokenizer-type", "ByteTokenizer"]) == ExitCode.DATA
    said = capsys.readouterr().out
    assert "document 1, token 0: id 300, expected 0 to 256" in said and "1 end with id 256" in said


def test_invalid_tokenizers_are_rejected(tmp_path: Path, capsys):
    (tmp_path / "t.model").write_bytes(b"no model")
    words = [str(written(tmp_path / "a")), "--tokenizer-model", str(tmp_path / "t.model")]
    assert main([*words, "--tokenizer-type", "Llama2Tokenizer"]) == ExitCode.DATA
    assert "is not a SentencePiece model" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--tokenizer-type", "NoTokenizer"])
