"""Cached index arrays are rebuilt if they are missing or incomplete."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.data.cache import digest_of, load_or_build

INPUTS = {"class": "Test", "seed": 3, "documents": [0, 5]}


class Builder:
    """Builder of index arrays that counts its calls."""

    def __init__(self, shift: int = 0) -> None:
        self.count = 0
        self.shift = shift

    def __call__(self) -> dict[str, np.ndarray]:
        self.count += 1
        return {
            "order": np.arange(10, dtype=np.uint32) + np.uint32(self.shift),
            "starts": np.arange(6, dtype=np.int64).reshape(3, 2),
        }


def load(folder: Path | None, builder: Builder, inputs: dict | None = None) -> dict[str, np.ndarray]:
    arrays = load_or_build(folder, "Kind-train", inputs or INPUTS, builder)
    expected = Builder(builder.shift)()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype
    return arrays


def test_second_load_reads_what_the_first_built(tmp_path: Path) -> None:
    builder = Builder()
    load(tmp_path / "deep" / "cache", builder)
    load(tmp_path / "deep" / "cache", builder)
    assert builder.count == 1
    digest = digest_of(INPUTS)
    assert sorted(path.name for path in (tmp_path / "deep" / "cache").iterdir()) == [
        f"{digest}-Kind-train-description.txt",
        f"{digest}-Kind-train-order.npy",
        f"{digest}-Kind-train-starts.npy",
    ]


def test_the_description_holds_the_inputs(tmp_path: Path) -> None:
    load(tmp_path, Builder())
    text = (tmp_path / f"{digest_of(INPUTS)}-Kind-train-description.txt").read_text()
    assert json.loads(text)["inputs"] == INPUTS


def test_other_inputs_have_another_entry(tmp_path: Path) -> None:
    load(tmp_path, Builder())
    other = Builder(shift=1)
    load(tmp_path, other, {**INPUTS, "seed": 4})
    assert other.count == 1


def test_without_a_folder_nothing_is_cached() -> None:
    builder = Builder()
    load(None, builder)
    load(None, builder)
    assert builder.count == 2


@pytest.mark.parametrize("suffix", ["description.txt", "order.npy", "starts.npy"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "foreign"])
def test_a_damaged_entry_is_rebuilt(tmp_path: Path, suffix: str, damage: str) -> None:
    load(tmp_path, Builder())
    path = tmp_path / f"{digest_of(INPUTS)}-Kind-train-{suffix}"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        path.write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])
    else:
        path.write_bytes({"empty": b"", "cut": content[:-5], "foreign": b'{"a": [1]}'}[damage])
    second = Builder()
    load(tmp_path, second)
    load(tmp_path, second)
    assert second.count == 1


def test_an_incomplete_entry_is_not_used(tmp_path: Path) -> None:
    def build() -> dict[str, np.ndarray]:
        # The second array cannot be stored, so the first array's file exists but the description does not.
        return {**Builder()(), "starts": np.array([None], dtype=object)}

    with pytest.raises(ValueError, match="Object arrays"):
        load_or_build(tmp_path, "Kind-train", INPUTS, build)
    assert [path.name for path in tmp_path.iterdir()] == [f"{digest_of(INPUTS)}-Kind-train-order.npy"]
    builder = Builder()
    load(tmp_path, builder)
    assert builder.count == 1


def test_unwritable_folder_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="--data-cache-path"):
        load_or_build(tmp_path / "file" / "cache", "Kind", INPUTS, Builder())


@pytest.mark.filterwarnings("ignore")  # numpy warns about headers that look like those of old versions
def test_arbitrary_bytes_are_not_an_entry(tmp_path: Path) -> None:
    load(tmp_path, Builder())
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path, content in whole.items():
        flipped = [content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in range(len(content))]
        for damaged in (b"PK\x03\x04" + content[4:], b"[" * 100_000, b"\xff" * 100, *flipped):
            path.write_bytes(damaged)
            load(tmp_path, Builder())
        path.write_bytes(content)
