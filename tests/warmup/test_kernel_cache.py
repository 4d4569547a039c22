"""Folder of compiled kernels."""

import os
from pathlib import Path

import pytest
import torch

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.warmup.kernel_cache import prepare_cache_folder, remove_damaged


@pytest.fixture(autouse=True)
def without_variable(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "restored by pytest")
    monkeypatch.delenv("TRITON_CACHE_DIR")


def test_each_node_has_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node17")
    assert prepare_cache_folder(tmp_path / "kernels") == tmp_path / "kernels" / "node17"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "kernels" / "node17")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert prepare_cache_folder(None) == tmp_path / "mine", "the environment variable wins"


def test_a_folder_that_cannot_be_written_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    with pytest.raises(EnvironmentProblem, match="use --kernel-cache-dir with another folder"):
        prepare_cache_folder(None)


def test_a_user_without_a_home_folder_needs_the_flag(tmp_path, monkeypatch):
    def no_home() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert prepare_cache_folder(tmp_path).parent == tmp_path
    monkeypatch.delenv("TRITON_CACHE_DIR")
    with pytest.raises(EnvironmentProblem, match="Could not determine home directory.; use --kernel-cache-dir"):
        prepare_cache_folder(None)


def test_a_folder_that_others_could_write_is_rejected(tmp_path, monkeypatch):
    folder = prepare_cache_folder(tmp_path)
    folder.chmod(0o777)
    with pytest.raises(EnvironmentProblem, match=rf"{folder} may be written by every user \(mode 777\); use "):
        prepare_cache_folder(tmp_path)
    folder.chmod(0o700)
    prepare_cache_folder(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(EnvironmentProblem, match=r"belongs to the user with id \d+, not to this one \(12345\)"):
        prepare_cache_folder(tmp_path)


@pytest.mark.parametrize("name", ["kernel.json", "__grp__kernel.json", "kernel.cubin", "launcher.so"])
def test_entries_with_truncated_files_are_removed(tmp_path, name):
    library = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"  # cubins are ELF files as well
    content = b'{"a": "kernel of many words"}' if name.endswith("json") else library.read_bytes()
    for entry, size in (("whole", len(content)), ("cut", len(content) // 2), ("empty", 0)):
        (tmp_path / entry).mkdir()
        (tmp_path / entry / name).write_bytes(content[:size])
        (tmp_path / entry / "kernel.ptx").write_text("text")
    assert remove_damaged(tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert remove_damaged(tmp_path) == 0
