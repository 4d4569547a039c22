"""Checkpoint manifest: its checksum, its schema, and rejection of malicious manifests before any allocation."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe.checkpoint.manifest import (
    CorruptCheckpoint,
    FileEntry,
    FormatTooNewError,
    Manifest,
    TensorEntry,
    TensorPiece,
    checksum,
    decode,
    encode,
)

HEAD = 96
SMALL = Manifest(
    iteration=7,
    writer="test 1",
    ranks={"dp": 2},
    files={
        "model-00000-of-00001.safetensors": FileEntry(size=HEAD + 64 + 6, head=HEAD, crc32="00000001"),
        "train_state.json": FileEntry(size=12, head=12, crc32="00000002"),
    },
    tensors={
        "model.a.weight": TensorEntry(
            "F32",
            (4, 4),
            (
                TensorPiece("model-00000-of-00001.safetensors", HEAD, (0, 0), (4, 1), "00000003"),
                TensorPiece("model-00000-of-00001.safetensors", HEAD + 16, (0, 1), (4, 3), "00000004"),
            ),
        ),
        "model.b.bias": TensorEntry(
            "BF16", (3,), (TensorPiece("model-00000-of-00001.safetensors", HEAD + 64, (0,), (3,), "00000005"),)
        ),
    },
)
BODY = {key: value for key, value in json.loads(encode(SMALL)).items() if key != "crc32"}
FILE = "model-00000-of-00001.safetensors"


def sealed(body: Any) -> bytes:
    """Builds a manifest with this content and a valid checksum, as an attacker could."""
    text = json.dumps(body, separators=(",", ":")).encode()[:-1]
    return text + f',"crc32":"{checksum(text)}"}}\n'.encode()


def changed(*path: str | int, to: Any) -> dict:
    """Copies the small manifest with one value replaced."""
    body = copy.deepcopy(BODY)
    inner = body
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return body


def test_a_manifest_round_trips() -> None:
    assert decode(encode(SMALL)) == SMALL
    assert decode(sealed(BODY)) == SMALL


def test_a_manifest_is_plain_json() -> None:
    assert json.loads(encode(SMALL))["tensors"]["model.b.bias"]["dtype"] == "BF16"


def test_every_flipped_bit_is_detected() -> None:
    data = encode(SMALL)
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(CorruptCheckpoint):
                decode(bytes(flipped))


def test_every_truncation_is_detected() -> None:
    data = encode(SMALL)
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpoint):
            decode(data[:length])


def test_a_later_format_version_is_distinguished_from_damage() -> None:
    with pytest.raises(FormatTooNewError, match="format version 2 by 'test 1'; this program reads up to 1"):
        decode(sealed(changed("version", to=2)))


A, B = ("tensors", "model.a.weight"), ("tensors", "model.b.bias")
HOSTILE = {
    "path traversal": (changed("files", "../../etc/passwd", to={"size": 1, "head": 1, "crc32": "0" * 8}), "file name"),
    "absolute path": (changed("files", "/etc/passwd", to={"size": 1, "head": 1, "crc32": "0" * 8}), "file name"),
    "hidden file": (changed("files", ".lock", to={"size": 1, "head": 1, "crc32": "0" * 8}), "file name"),
    "itself as a file": (changed("files", "manifest.json", to={"size": 1, "head": 1, "crc32": "0" * 8}), "file name"),
    "piece elsewhere": (changed(*A, "pieces", 0, "file", to="../x"), "file name"),
    "piece in an unlisted file": (changed(*A, "pieces", 0, "file", to="other.safetensors"), "unlisted file"),
    "tensor name with a path": (changed("tensors", "model./etc/x", to=BODY["tensors"]["model.b.bias"]), "tensor name"),
    "huge shape": (changed(*A, "shape", to=[1 << 60, 4]), "integer from 0"),
    "shape that overflows": (changed(*A, "shape", to=[1 << 40, 1 << 40]), "cover"),
    "negative size": (changed(*A, "shape", to=[-4, 4]), "integer from 0"),
    "negative start": (changed(*A, "pieces", 0, "start", to=-1), "integer from 0"),
    "boolean size": (changed(*A, "pieces", 0, "start", to=True), "integer from 0"),
    "fractional size": (changed(*A, "pieces", 0, "start", to=96.0), "integer from 0"),
    "too many dims": (changed(*A, "shape", to=[1] * 50), "more than 8 sizes"),
    "box outside": (changed(*A, "pieces", 1, "offset", to=[0, 2]), "exceeds"),
    "box of other dims": (changed(*A, "pieces", 1, "offset", to=[0]), "dims"),
    "overlapping boxes": (
        changed(*A, "pieces", 1, to={**BODY["tensors"]["model.a.weight"]["pieces"][1], "offset": [0, 0]}),
        "exactly once",
    ),
    "missing box": (changed(*A, "pieces", to=BODY["tensors"]["model.a.weight"]["pieces"][:1]), "exactly once"),
    "no boxes": (changed(*A, "pieces", to=[]), "no pieces"),
    "two tensors in the same bytes": (changed(*B, "pieces", 0, "start", to=HEAD), "begins at byte"),
    "tensor in the header": (changed(*B, "pieces", 0, "start", to=0), "begins at byte"),
    "tensor past the end": (changed(*B, "pieces", 0, "start", to=HEAD + 66), "begins at byte"),
    "bytes of no tensor": (changed("files", FILE, "size", to=HEAD + 1000), "begins at byte"),
    "header longer than the file": (changed("files", FILE, "head", to=HEAD + 1000), "its head of"),
    "header of a gigabyte": (
        changed("files", FILE, to={"size": 1 << 31, "head": 1 << 30, "crc32": "0" * 8}),
        "its head of",
    ),
    "unknown element type": (changed(*A, "dtype", to="pickle"), "unknown element type"),
    "checksum in capitals": (changed(*B, "pieces", 0, "crc32", to="ABCDEF01"), "not a crc32"),
    "tensors as a list": (changed("tensors", to=[]), "not of type dict"),
    "files as a text": (changed("files", to="x"), "not of type dict"),
    "pieces as a text": (changed(*A, "pieces", to="abc"), "not of type list"),
    "piece as a number": (changed(*A, "pieces", to=[1]), "not of type str"),
    "iteration as a text": (changed("iteration", to="7"), "integer from 0"),
    "another format": (changed("format", to="another checkpoint"), "its format is 'another checkpoint'"),
    "a number as format": (changed("format", to=1), "its format is 1"),
    "everything a list": ([1, 2], "invalid JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_inconsistent_manifest_with_a_valid_checksum_is_rejected(name: str) -> None:
    body, sentence = HOSTILE[name]
    with pytest.raises(CorruptCheckpoint, match=sentence):
        decode(sealed(body))


@pytest.mark.parametrize(
    "text",
    [
        b'{"version":1,"version":1',
        b'{"version":' + b"[" * 100_000,
        b'{"version":' + b"9" * 10_000,
        b'{"version":NaN',
        b'{"version":1e400',
        b'{"a":"\xff"',
        b"[1",
        b"",
    ],
    ids=["duplicate name", "deep nesting", "huge number", "nan", "infinite", "no utf-8", "no object", "empty"],
)
def test_invalid_json_is_rejected(text: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode(text + f',"crc32":"{checksum(text)}"}}\n'.encode())


def places(value: Any, path: tuple = ()) -> list[tuple]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, item in inner for place in places(item, (*path, key))]


JUNK = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, 1, 95, 96, 97, 112, 160, 166, 1 << 48]),
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-2, 300), max_size=10),
    st.dictionaries(st.sampled_from(["size", "head", "crc32", "file", "../x"]), st.integers(-1, 300), max_size=3),
)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(path=st.sampled_from(places(BODY)), junk=JUNK)
def test_a_random_change_is_rejected_or_leaves_the_manifest_consistent(path: tuple, junk: Any) -> None:
    try:
        manifest = decode(sealed(changed(*path, to=junk)))
    except (CorruptCheckpoint, FormatTooNewError):
        return
    for name, file in manifest.files.items():
        assert "/" not in name and not name.startswith(".")
        stored = sum(e.num_bytes(p) for e in manifest.tensors.values() for p in e.pieces if p.file == name)
        assert file.head + stored == file.size <= SMALL.files[FILE].size
    for entry in manifest.tensors.values():
        assert {piece.file for piece in entry.pieces} <= set(manifest.files)
