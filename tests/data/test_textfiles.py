"""Text files as documents."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from megatron_moe.config.exit_codes import DataProblem, EnvironmentProblem
from megatron_moe.data.textfiles import BadLine, TextRecord, parse_record, read_documents, read_records, write_whole

TEXTS = ["one\nline", "zwei ß", "three"]
JSONL = "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(TEXTS)).encode()
PLAIN = "one\nline\n<|endoftext|>\nzwei ß\n<|endoftext|>\nthree\n".encode()


def written(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        content = gzip.compress(content[:20]) + gzip.compress(content[20:])
    elif path.suffix == ".zst":
        compress = zstandard.ZstdCompressor().compress
        content = compress(content[:20]) + compress(content[20:])
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "noending"])
def test_jsonl_is_read_plain_and_compressed_in_several_members(tmp_path: Path, name: str) -> None:
    assert list(read_documents([written(tmp_path / name, JSONL)], "text")) == TEXTS


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_plain_text_is_cut_at_separator_lines(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, PLAIN)
    assert list(read_documents([path], "text")) == ["one\nline\n", "zwei ß\n", "three\n"]
    assert [record.line for record in read_records(path)] == [1, 4, 6]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.zst"])
def test_a_byte_order_mark_is_ignored(tmp_path: Path, name: str) -> None:
    mark = "\ufeff".encode()
    content = PLAIN if ".txt" in name else JSONL
    expected = list(read_documents([written(tmp_path / name, content)], "text"))
    path = written(tmp_path / name, mark + content)
    assert list(read_documents([path], "text")) == expected
    assert [record.line for record in read_records(path)][0] == 1
    separated = written(tmp_path / "b.txt", mark + b"<|endoftext|>\na\n" + mark + b"b")
    assert list(read_documents([separated], "text")) == ["", "a\n\ufeffb"], "only at the start of a file"


def test_plain_text_without_separator_is_one_document(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"a\n\nb <|endoftext|>\n")
    assert list(read_documents([path], "text")) == ["a\n\nb <|endoftext|>\n"]


def test_blank_jsonl_lines_are_skipped_but_numbered(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'\n{"text": "a"}\n  \n{"text": "b"}')
    assert [(record.line, parse_record(record, ["text"])) for record in read_records(path)] == [(2, ["a"]), (4, ["b"])]


def test_several_keys_give_several_texts() -> None:
    record = TextRecord(Path("a.jsonl"), 1, b'{"q": "a", "x": 1, "a": "b"}')
    assert parse_record(record, ["a", "q"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "a"', "not JSON"),
        (b"plain words", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"text": "ab\\ud83d"}', r'unpaired surrogate .ud83d at position 2 of the text under "text"'),
        (b'["a"]', "the line is not a JSON object"),
        (b'{"txt": "a"}', 'no text under the key "text" .the line has txt'),
        (b'{"text": 3}', 'the value of the key "text" is not a JSON string'),
        (b"{}", 'no text under the key "text" .the line has no key'),
        (b'{"text": "\xff"}', "not UTF-8 .byte 10"),
    ],
)
def test_a_malformed_line_is_reported_with_its_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(BadLine, match=reason):
        parse_record(TextRecord(Path("a.jsonl"), 1, content), ["text"])
    path = written(tmp_path / "a.jsonl", b'{"text": "a"}\n' + content + b"\n")
    with pytest.raises(DataProblem, match=f"a.jsonl, line 2: {reason}"):
        list(read_documents([path], "text"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_damaged_compression_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = written(tmp_path / name, JSONL)
    path.write_bytes(path.read_bytes()[:-9] if damage == "cut" else b"not compressed at all")
    with pytest.raises(DataProblem, match=name):
        list(read_documents([path], "text"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_cut_anywhere_is_noticed(tmp_path: Path, name: str) -> None:
    packed = (gzip.compress if name.endswith("gz") else zstandard.ZstdCompressor().compress)(JSONL * 20)
    for size in range(1, len(packed)):
        (tmp_path / name).write_bytes(packed[:size])
        with pytest.raises(DataProblem, match=name):
            list(read_records(tmp_path / name))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataProblem, match="absent.jsonl: No such file"):
        list(read_documents([tmp_path / "absent.jsonl"], "text"))


def test_write_whole_creates_folders_and_leaves_no_temporary_files(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "file", b"content")
    assert [path.read_bytes() for path in (tmp_path / "new").iterdir()] == [b"content"]


def test_write_whole_names_an_unwritable_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "a", tmp_path / "folder"):
        with pytest.raises(EnvironmentProblem, match=f"cannot write {path}"):
            write_whole(path, b"content")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
