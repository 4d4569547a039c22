"""Run folder and provenance files."""

import pytest
import torch

from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode
from megatron_moe.logs.run_dir import environment_text, prepare_folder, write_provenance

CPU = torch.device("cpu")


def test_prepared_folder_is_empty(tmp_path):
    prepare_folder(tmp_path / "a" / "b", rank=0)
    prepare_folder(tmp_path / "a" / "b", rank=1)
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_unwritable_folder_is_rejected_with_path_reason_and_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem) as caught:
        prepare_folder(tmp_path / "file", rank=0)
    message = str(caught.value)
    assert caught.value.code is ExitCode.ENVIRONMENT
    assert str(tmp_path / "file") in message and "File exists" in message and "--run-dir" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", [".probe-0", "run.yaml", "command.txt", "environment.txt"])
def test_full_disk_is_rejected(tmp_path, name):
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(EnvironmentProblem, match="No space left on device"):
        prepare_folder(tmp_path, rank=0)
        write_provenance(tmp_path, run_yaml="seed: 1\n", command_line="one", device=CPU)


def test_provenance_keeps_all_commands(tmp_path):
    for command in ("one", "two"):
        write_provenance(tmp_path, run_yaml=f"command: {command}\n", command_line=command, device=CPU)
    assert (tmp_path / "run.yaml").read_text() == "command: two\n"
    commands = (tmp_path / "command.txt").read_text().splitlines()
    assert [line for line in commands if not line.startswith("#")] == ["one", "two"]


def test_environment_text(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    text = environment_text(CPU)
    rows = dict(line.split(": ", 1) for line in text.splitlines())
    assert rows["package torch"] == torch.__version__
    assert rows["variable NCCL_DEBUG"] == "WARN"
    assert {"time", "host", "system", "python", "cpu", "device", "source"} <= rows.keys()
    assert "secret" not in text
