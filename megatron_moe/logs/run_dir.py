"""The run folder and its provenance files.

The provenance files are run.yaml (every value with its origin), command.txt (command line of every launch) and
environment.txt (versions, machine and source commit). The folder also contains log.txt, metrics.jsonl (one object per
report), status.json (state of the run), tensorboard/ (scalars), plots/ (loss.png and expert_load.png) and checkpoints/.
"""

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import torch

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.imports import installed_version

_PACKAGES = (
    "triton", "numpy", "safetensors", "sentencepiece", "tokenizers", "tiktoken", "pyyaml", "tensorboard",
    "wandb", "rich", "matplotlib", "transformer-engine", "grouped-gemm", "flash-attn-4",
)  # fmt: skip
_VARIABLE_PREFIXES = ("CUDA_", "CUBLAS_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "SLURM_JOB_ID", "TRITON_")
_SOURCE = Path(__file__).resolve().parents[2]


def prepare_folder(folder: Path, rank: int, *, option: str = "--run-dir") -> None:
    """Creates a folder and checks that it is writable. Raises EnvironmentProblem, which names the flag `option`, if it
    cannot be written."""
    probe = folder / f".probe-{rank}"
    with _writing(folder, probe, option):
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("writable\n")
        probe.unlink()


@contextmanager
def _writing(folder: Path, path: Path, option: str = "--run-dir") -> Iterator[None]:
    """Context manager that converts an OSError of its body, which writes `path`, into an EnvironmentProblem."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"the folder {folder} cannot be written: {error.strerror or error} ({error.filename or path}); "
            f"choose another with {option}, or fix its permissions or disk space"
        ) from error


def write_provenance(folder: Path, *, run_yaml: str, command_line: str, device: torch.device) -> None:
    """Writes run.yaml and environment.txt and appends to command.txt.

    Raises EnvironmentProblem if one of the files cannot be written.
    """
    command = f"# {datetime.now():%Y-%m-%d %H:%M:%S} in {Path.cwd()}\n{command_line}\n"
    for name, mode, text in (
        ("run.yaml", "w", run_yaml),
        ("command.txt", "a", command),
        ("environment.txt", "w", environment_text(device)),
    ):
        with _writing(folder, folder / name), open(folder / name, mode) as file:
            file.write(text)


def environment_text(device: torch.device) -> str:
    """Text of environment.txt: versions, machine, source commit and relevant variables, as lines `name: value`."""
    rows = {
        "time": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads",
        "device": _device_name(device),
        "source": _source_state(),
        "package torch": torch.__version__,  # names the build, which the package's metadata may omit
    }
    rows |= {f"package {name}": version for name in _PACKAGES if (version := installed_version(name)) is not None}
    variables = sorted(name for name in os.environ if name.startswith(_VARIABLE_PREFIXES))
    rows |= {f"variable {name}": os.environ[name] for name in variables}
    return "".join(f"{name}: {value}\n" for name, value in rows.items())


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    memory = properties.total_memory / 2**30
    return f"{properties.name}, {memory:.1f} GiB, {torch.cuda.device_count()} on this host, CUDA {torch.version.cuda}"


def _source_state() -> str:
    """Git commit of this source tree and whether it has local changes, as text."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return "not a git checkout"
    return f"commit {commit}{', with local changes' if _git('status', '--porcelain', '--untracked-files=no') else ''}"


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(_SOURCE), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
