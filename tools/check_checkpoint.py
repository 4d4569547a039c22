"""Verifies every byte of checkpoints and lists all errors: `python tools/check_checkpoint.py runs/my/checkpoints`

Accepts checkpoints, folders of checkpoints and run folders. A checkpoint with NaN or infinite values is invalid, too.
Exit code 0: all checkpoints are valid; 5: a checkpoint is invalid, or no checkpoint was found.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading torch", file=sys.stderr, flush=True)

from megatron_moe.checkpoint.directory import find_checkpoints
from megatron_moe.checkpoint.verify import VerificationReport, verify_checkpoint
from megatron_moe.config.exit_codes import CheckpointProblem, ExitCode
from megatron_moe.config.text import num_bytes_text
from megatron_moe.train.train_state import check_train_state
from tools._common import reports_errors, run_main, tool_parser

_HEADINGS = ("checkpoint", "tensors", "files", "size", "seconds", "state")
_MAX_SHOWN = 20


@reports_errors
def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="checkpoints, folders of checkpoints, run folders")
    parser.add_argument("--newest", action="store_true", help="check only the newest checkpoint of every folder")
    options = parser.parse_args(argv)
    by_folder = [find_checkpoints(folder) for folder in options.folders]
    found = [candidate for folder in by_folder for candidate in (folder[:1] if options.newest else folder)]
    width = max(len(str(candidate.path)) for candidate in found)
    print(_line(_HEADINGS, width))
    valid = True
    for candidate in found:
        started = time.monotonic()
        report = verify_checkpoint(candidate.path, check_train_state, check_finite=True)
        print(_line(_cells(report, time.monotonic() - started), width))
        _print_details(report)
        valid = valid and report.valid
    return ExitCode.OK if valid else CheckpointProblem.code


def _cells(report: VerificationReport, seconds: float) -> tuple[str, ...]:
    state = "valid" if report.valid else f"INVALID, problems: {len(report.problems)}"
    manifest = report.manifest
    counts = ("-", "-") if manifest is None else (str(len(manifest.tensors)), str(len(manifest.files)))
    return (str(report.path), *counts, num_bytes_text(report.num_bytes), f"{seconds:.1f}", state)


def _line(cells: Sequence[str], width: int) -> str:
    first, *numbers, state = cells
    return f"{first:<{width}}  " + "  ".join(f"{cell:>8}" for cell in numbers) + f"  {state}"


def _print_details(report: VerificationReport) -> None:
    for problem in report.problems[:_MAX_SHOWN]:
        print(f"    {problem}")
    if len(report.problems) > _MAX_SHOWN:
        print(f"    and {len(report.problems) - _MAX_SHOWN} more")
    for remark in report.remarks:
        print(f"    (harmless: {remark})")


if __name__ == "__main__":
    run_main(main)
