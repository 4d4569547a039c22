"""A Hugging Face folder is read tensor by tensor, and what was read does not stay in memory."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_moe.checkpoint.huggingface.folder import HFFolder
from megatron_moe.config.exit_codes import CheckpointProblem

MEGABYTE = 1 << 20


def resident(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_pages_of_a_file_go_with_the_tensors_read_from_it(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save_file({f"t{n}": torch.full((MEGABYTE // 4,), float(n)) for n in range(16)}, path)
    with ExitStack() as stack:
        source = HFFolder(tmp_path, {}, stack)
        assert [source.tensor(f"t{n}").sum().item() for n in range(16)] == [n * MEGABYTE / 4 for n in range(16)]
        assert resident(path) < 4 * MEGABYTE
        kept = source.tensor("t3")
        assert kept.sum().item() == 3 * MEGABYTE / 4 and resident(path) >= MEGABYTE // 2


def test_a_tensor_in_two_files_is_refused(tmp_path: Path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"twice": torch.zeros(1), name: torch.zeros(1)}, tmp_path / name)
    index = {"weight_map": {"twice": "a.safetensors", "b.safetensors": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with ExitStack() as stack, pytest.raises(CheckpointProblem, match=r"b.safetensors holds tensors.*\n  twice"):
        HFFolder(tmp_path, {}, stack)


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a.safetensors"]}, {"weight_map": {"a": 3, "b": "x"}}])
def test_an_index_without_file_names_is_named(index: dict, tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with ExitStack() as stack, pytest.raises(CheckpointProblem, match=r"index.json has no weight_map"):
        HFFolder(tmp_path, {}, stack)
