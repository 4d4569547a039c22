"""The `.bin/.idx` format: bytes, reading, writing, and damaged files."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_moe.config.exit_codes import DataProblem, EnvironmentProblem
from megatron_moe.data.indexed import IndexedTokens, IndexedWriter, token_dtype
from tests.helpers.tiny_data import random_documents, write_tokens


def index_by_hand(lengths: list[int], bounds: list[int], *, code: int, itemsize: int) -> bytes:
    """Bytes of an index, assembled from its offset table."""
    out = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
    out += len(lengths).to_bytes(8, "little") + len(bounds).to_bytes(8, "little")
    for length in lengths:
        out += length.to_bytes(4, "little", signed=True)
    place = 0
    for length in lengths:
        out += place.to_bytes(8, "little")
        place += length * itemsize
    for bound in bounds:
        out += bound.to_bytes(8, "little")
    return out


@pytest.mark.parametrize(
    ("dtype", "code", "itemsize"),
    [(np.uint8, 1, 1), (np.int8, 2, 1), (np.int16, 3, 2), (np.int32, 4, 4), (np.int64, 5, 8), (np.uint16, 8, 2)],
)
def test_written_bytes_are_those_of_the_format(tmp_path: Path, dtype: type, code: int, itemsize: int) -> None:
    documents = [[1, 2, 3], [], [4], [5, 6]]
    prefix = write_tokens(tmp_path / "a", documents, dtype)
    assert Path(f"{prefix}.idx").read_bytes() == index_by_hand(
        [3, 0, 1, 2], [0, 1, 2, 3, 4], code=code, itemsize=itemsize
    )
    expected = b"".join(number.to_bytes(itemsize, "little") for number in (1, 2, 3, 4, 5, 6))
    assert Path(f"{prefix}.bin").read_bytes() == expected


def test_documents_of_several_sequences_have_their_bounds(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for sequences in ([[1, 2], [3]], [[4, 5, 6]]):
            for sequence in sequences:
                writer.add_sequence(sequence)
            writer.end_document()
    index = (tmp_path / "a.idx").read_bytes()
    assert index == index_by_hand([2, 1, 3], [0, 2, 3], code=8, itemsize=2)
    assert IndexedTokens(tmp_path / "a").document_bounds.tolist() == [0, 2, 3]


@pytest.mark.parametrize("mmap", [True, False])
def test_sequences_are_read_in_full_and_in_part(tmp_path: Path, mmap: bool) -> None:
    documents = random_documents(3, [5, 0, 1, 17, 64])
    tokens = IndexedTokens(write_tokens(tmp_path / "a", documents), mmap=mmap)
    assert len(tokens) == 5
    assert tokens.num_tokens == 87
    assert tokens.sequence_lengths.tolist() == [5, 0, 1, 17, 64]
    for number, document in enumerate(documents):
        np.testing.assert_array_equal(tokens.get(number), document)
        for offset in range(len(document) + 1):
            np.testing.assert_array_equal(tokens.get(number, offset), document[offset:])
            np.testing.assert_array_equal(tokens.get(number, 0, offset), document[:offset])
    tokens.close()


@pytest.mark.parametrize("mmap", [True, False])
def test_reading_past_the_end_of_a_sequence_asserts(tmp_path: Path, mmap: bool) -> None:
    tokens = IndexedTokens(write_tokens(tmp_path / "a", [[1, 2, 3], [4]]), mmap=mmap)
    with pytest.raises(AssertionError, match="length=4"):
        tokens.get(0, 0, 4)


@pytest.mark.parametrize("mmap", [True, False])
def test_a_data_set_without_sequences_or_tokens_can_be_opened(tmp_path: Path, mmap: bool) -> None:
    assert len(IndexedTokens(write_tokens(tmp_path / "none", []), mmap=mmap)) == 0
    assert IndexedTokens(write_tokens(tmp_path / "empty", [[]]), mmap=mmap).num_tokens == 0


def test_smallest_dtype_follows_the_vocabulary() -> None:
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def patched(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(bytes(data))


AT_LENGTHS, AT_POINTERS, AT_BOUNDS = 34, 34 + 4 * 3, 34 + 12 * 3
BROKEN = {
    "foreign magic": (0, b"TOKENS\x00\x00\x00", "offset 0"),
    "version 2": (9, (2).to_bytes(8, "little"), "version 2 at offset 9, expected 1"),
    "dtype code 0": (17, b"\x00", "dtype code 0 at offset 17, expected 1 to 8"),
    "dtype code 9": (17, b"\x09", "dtype code 9 at offset 17"),
    "floating point": (17, b"\x07", r"dtype code 7 \(float32\) at offset 17, but token ids are integers"),
    "another dtype": (17, b"\x04", "points to byte"),
    "too many sequences": (18, (4).to_bytes(8, "little"), "4 sequences"),
    "absurd count": (18, (2**63).to_bytes(8, "little"), "sequences"),
    "too few bounds": (26, (3).to_bytes(8, "little"), "3 document bounds"),
    "negative length": (
        AT_LENGTHS + 4,
        struct.pack("<i", -2),
        "length -2 of sequence 1 at offset 38, expected 0 or more",
    ),
    "changed length": (AT_LENGTHS, struct.pack("<i", 2), r"sequence 1 points to byte 6 \(offset 54\), expected 4"),
    "pointer past the end": (AT_POINTERS + 16, struct.pack("<q", 99), r"sequence 2 points to byte 99 \(offset 62\)"),
    "first bound not 0": (AT_BOUNDS, struct.pack("<q", 1), "span 1 to 3, expected 0 to 3"),
    "last bound too small": (AT_BOUNDS + 24, struct.pack("<q", 2), "span 0 to 2, expected 0 to 3"),
    "falling bounds": (AT_BOUNDS + 8, struct.pack("<q", 3), "bound 2 at offset 86 is 2, expected at least 3"),
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_index_is_rejected_with_file_offset_and_remedy(tmp_path: Path, name: str, mmap: bool) -> None:
    offset, content, sentence = BROKEN[name]
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
    patched(tmp_path / "a.idx", offset, content)
    with pytest.raises(DataProblem, match=sentence) as problem:
        IndexedTokens(prefix, mmap=mmap)
    assert "a.idx" in str(problem.value)
    assert "preprocess_data.py" in str(problem.value)


def test_index_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
    whole = (tmp_path / "a.idx").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "a.idx").write_bytes(whole[:size])
        with pytest.raises(DataProblem, match=f"a.idx: {size} bytes"):
            IndexedTokens(prefix)


def test_index_with_bytes_after_its_end_is_refused(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
    with open(tmp_path / "a.idx", "ab") as index:
        index.write(b"\x00")
    with pytest.raises(DataProblem, match="describes 102"):
        IndexedTokens(prefix)
    with open(tmp_path / "a.idx", "ab") as index:
        index.write(b"\x00\x00")
    with pytest.raises(DataProblem, match="multimodal"):
        IndexedTokens(prefix)


@pytest.mark.parametrize("size", [0, 1, 11, 13])
def test_bin_of_another_size_is_refused_at_open(tmp_path: Path, size: int) -> None:
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
    os.truncate(tmp_path / "a.bin", size)
    with pytest.raises(DataProblem, match=f"a.bin: {size} bytes, but a.idx describes 12"):
        IndexedTokens(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    prefix = write_tokens(tmp_path / "a", [[1]])
    Path(f"{prefix}{suffix}").unlink()
    with pytest.raises(DataProblem, match=f"a{suffix} does not exist"):
        IndexedTokens(prefix)


def test_bin_that_shrinks_while_it_is_read_is_reported(tmp_path: Path) -> None:
    tokens = IndexedTokens(write_tokens(tmp_path / "a", [[1, 2, 3], [4]]), mmap=False)
    os.truncate(tmp_path / "a.bin", 4)
    with pytest.raises(DataProblem, match="ends at byte 4"):
        tokens.get(0)


def test_a_failed_write_leaves_no_files_and_keeps_existing_ones(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [[1, 2]])
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(prefix, np.uint16) as writer:
        writer.add_sequence([7])
        raise RuntimeError("stop")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert IndexedTokens(prefix).get(0).tolist() == [1, 2]


def test_a_writer_killed_between_its_files_leaves_no_stale_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_tokens(tmp_path / "a", [[1, 2]])
    rename = os.replace

    def rename_then_die(source: Path, target: str) -> None:
        rename(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", rename_then_die)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "a", [[3], [4]])
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    with pytest.raises(DataProblem, match="0.5 aaa.*.idx does not exist"):
        IndexedTokens("0.5 " + 300 * "a")
    with pytest.raises(DataProblem, match="a.idx does not exist"):
        IndexedTokens(prefix)


def test_files_are_visible_only_after_the_writer_exits(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_sequence([7])
        writer.end_document()
        assert not (tmp_path / "a.bin").exists()
        assert not (tmp_path / "a.idx").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_id_that_does_not_fit_the_dtype_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(DataProblem, match="token id 65536 of sequence 1"),
        IndexedWriter(tmp_path / "a", np.uint16) as writer,
    ):
        writer.add_sequence([65535])
        writer.end_document()
        writer.add_sequence([1, 65536])
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_prefix_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot write .*file/a.bin"):
        IndexedWriter(tmp_path / "file" / "a", np.uint16)


def test_the_sampled_content_changes_with_the_tokens_and_the_size(tmp_path: Path) -> None:
    def content(name: str, documents: list) -> str:
        return IndexedTokens(write_tokens(tmp_path / name, documents)).sample_content()

    assert content("a", [[1, 2, 3]]) == content("b", [[1], [2, 3]])
    assert content("a", [[1, 2, 3]]) != content("c", [[1, 2, 4]])
    assert content("d", [[]]) == "0 bytes, sampled crc32 00000000"
    large = np.arange(1_000_000) % 50_000
    assert content("e", [large]) == content("f", [large])
    assert len({content("e", [large]), content("g", [large + 1]), content("h", [large[:-1]])}) == 3
    for place in (0, len(large) - 1):
        changed = large.copy()
        changed[place] += 1
        assert content("e", [large]) != content("i", [changed]), "the first and the last block are sampled"


def test_identity_changes_with_the_data(tmp_path: Path) -> None:
    one = IndexedTokens(write_tokens(tmp_path / "a", [[1, 2, 3], [4]])).identity
    assert one == IndexedTokens(write_tokens(tmp_path / "b", [[1, 2, 3], [4]])).identity
    assert one != IndexedTokens(write_tokens(tmp_path / "c", [[1, 2], [3, 4]])).identity
    assert one != IndexedTokens(write_tokens(tmp_path / "d", [[1, 2, 3], [4]], np.int32)).identity
