"""Reads every byte of checkpoints and says what is wrong where: `python tools/check_checkpoint.py runs/my/checkpoints`

Takes checkpoints, folders of checkpoints and run folders. Exit code 0: all are sound; 5: one is not, or there is none.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.checkpoint.directory import (
    Candidate,
    as_checkpoint,
    list_checkpoints,
)
from megatron_moe.checkpoint.load import RUN_FOLDER_CHECKPOINTS
from megatron_moe.checkpoint.verify import VerifiedCheckpoint, examine_checkpoint
from megatron_moe.config.exit_codes import CheckpointProblem, ExitCode
from megatron_moe.train.train_state import check_train_state
from tools._common import run_main

_HEADINGS = ("checkpoint", "tensors", "files", "GB", "seconds", "state")
_MAX_SHOWN = 20


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="checkpoints, folders of checkpoints, run folders")
    parser.add_argument("--newest", action="store_true", help="only the newest checkpoint of every folder")
    options = parser.parse_args(argv)
    try:
        found = [each for folder in options.folders for each in _checkpoints(folder, newest=options.newest)]
    except CheckpointProblem as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    width = max(len(str(each.path)) for each in found)
    print(_line(_HEADINGS, width))
    sound = True
    for candidate in found:
        started = time.monotonic()
        examined = examine_checkpoint(candidate.path, check_train_state)
        print(_line(_cells(examined, time.monotonic() - started), width))
        _print_details(examined)
        sound = sound and examined.sound
    return int(ExitCode.OK if sound else CheckpointProblem.code)


def _checkpoints(folder: Path, *, newest: bool) -> tuple[Candidate, ...]:
    itself = as_checkpoint(folder)
    if itself is not None and folder.is_dir():
        return (itself,)
    found = list_checkpoints(folder) or list_checkpoints(folder / RUN_FOLDER_CHECKPOINTS)
    if not found:
        raise CheckpointProblem(f"{folder} holds no checkpoint iter_NNNNNNN; give a checkpoint or a folder of them")
    return found[:1] if newest else found


def _cells(examined: VerifiedCheckpoint, seconds: float) -> tuple[str, ...]:
    state = "sound" if examined.sound else f"DAMAGED, problems: {len(examined.problems)}"
    manifest = examined.manifest
    counts = ("-", "-") if manifest is None else (str(len(manifest.tensors)), str(len(manifest.files)))
    return (str(examined.path), *counts, f"{examined.num_bytes / 1e9:.3f}", f"{seconds:.1f}", state)


def _line(cells: Sequence[str], width: int) -> str:
    first, *figures, state = cells
    return f"{first:<{width}}  " + "  ".join(f"{cell:>8}" for cell in figures) + f"  {state}"


def _print_details(examined: VerifiedCheckpoint) -> None:
    for problem in examined.problems[:_MAX_SHOWN]:
        print(f"    {problem}")
    if len(examined.problems) > _MAX_SHOWN:
        print(f"    and {len(examined.problems) - _MAX_SHOWN} more")
    for remark in examined.remarks:
        print(f"    (harmless: {remark})")


if __name__ == "__main__":
    run_main(main)
