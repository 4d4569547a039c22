"""Prints or compares checkpoints: `python tools/inspect_checkpoint.py runs/my/checkpoints [--against OTHER]`

Prints the iteration, the parallel layout and settings of the run that wrote the checkpoint, and a table of all tensors
with norms. With `--against`, prints the differences between two checkpoints. Exit code 0: printed, or all tensors are
equal; 12: tensors differ; 5: a checkpoint is damaged or missing.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading torch", file=sys.stderr, flush=True)

from megatron_moe.checkpoint.directory import find_checkpoints
from megatron_moe.checkpoint.statistics import OpenCheckpoint, TensorDifference
from megatron_moe.checkpoint.verify import sizes_by_kind
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.text import aligned_columns, num_bytes_text
from tools._common import reports_errors, run_main, tool_parser

_HEADINGS = ("tensor", "dtype", "shape", "pieces", "norm", "rms", "max abs", "nonfinite")
_RIGHT = range(3, len(_HEADINGS))
"""Indices of the right-aligned columns."""
_SETTING = re.compile(r"\s+(?P<name>[a-z0-9-]+): (?P<value>.*?)\s+# (?P<origin>.*)")


@reports_errors
def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    checkpoint = OpenCheckpoint(find_checkpoints(options.checkpoint)[0].path)
    if options.against is not None:
        return _compare(checkpoint, OpenCheckpoint(find_checkpoints(options.against)[0].path), options.only)
    print(*_summary(checkpoint, every=options.settings), sep="\n")
    print(*aligned_columns(list(_rows(checkpoint, options.only, norms=not options.no_norms)), _RIGHT), sep="\n")
    return ExitCode.OK


def _summary(checkpoint: OpenCheckpoint, *, every: bool) -> Iterator[str]:
    manifest = checkpoint.manifest
    sizes = ", ".join(f"{kind} {num_bytes_text(size)}" for kind, size in sizes_by_kind(manifest).items())
    yield f"{checkpoint.path}: iteration {manifest.iteration}, written by {manifest.writer}"
    yield f"layout: {' '.join(f'{axis} {size}' for axis, size in manifest.ranks.items())}"
    yield f"{len(manifest.tensors)} tensors in {len(manifest.files)} files: {sizes}"
    settings = _settings(checkpoint)
    given = {name: value for name, (value, origin) in settings.items() if every or origin != "default"}
    yield f"settings{'' if every else ' given'}:" if given else "the checkpoint has no settings of a run"
    for name, value in given.items():
        yield f"  {name}: {value}"
    yield ""


def _settings(checkpoint: OpenCheckpoint) -> dict[str, tuple[str, str]]:
    """Settings of the run from run.yaml: name -> (value, origin of the value, such as "default")."""
    lines = (checkpoint.text("run.yaml") or "").splitlines()
    found = [match for line in lines if (match := _SETTING.fullmatch(line))]
    return {match["name"]: (match["value"], match["origin"]) for match in found}


def _rows(checkpoint: OpenCheckpoint, only: str, *, norms: bool) -> Iterator[tuple[str, ...]]:
    yield _HEADINGS if norms else _HEADINGS[:4]
    for key, entry in checkpoint.manifest.tensors.items():
        if not re.search(only, key):
            continue
        row: tuple[str, ...] = (key, entry.dtype, "x".join(map(str, entry.shape)) or "scalar", str(len(entry.pieces)))
        if norms:
            stats = checkpoint.statistics(key)
            row += (f"{stats.norm:.6g}", f"{stats.rms:.4g}", f"{stats.largest:.4g}", str(stats.num_nonfinite))
        yield row


def _compare(a: OpenCheckpoint, b: OpenCheckpoint, only: str) -> ExitCode:
    print(f"{a.path}: iteration {a.manifest.iteration}\n{b.path}: iteration {b.manifest.iteration}")
    settings_a, settings_b = _settings(a), _settings(b)
    for name in sorted({*settings_a, *settings_b}):
        value_a, value_b = (settings.get(name, ("-", ""))[0] for settings in (settings_a, settings_b))
        if value_a != value_b:
            print(f"  {name}: {value_a} and {value_b}")
    keys = [key for key in dict.fromkeys((*a.manifest.tensors, *b.manifest.tensors)) if re.search(only, key)]
    differing = [found for key in keys if (found := a.difference(key, b))]
    if differing:
        rows = [("tensor", "difference", "max abs", "relative"), *map(_difference_row, differing)]
        print(*aligned_columns(rows, _RIGHT), sep="\n")
    print(f"{len(keys) - len(differing)} of {len(keys)} tensors are equal")
    return ExitCode.DRIFT if differing else ExitCode.OK


def _difference_row(found: TensorDifference) -> tuple[str, ...]:
    numbers = (f"{found.largest:.4g}", f"{found.relative:.4g}") if found.kind == "values" else ("-", "-")
    return (found.key, found.kind, *numbers)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="checkpoint, folder of checkpoints (the newest), or run folder")
    parser.add_argument("--against", type=Path, metavar="OTHER", help="compare with another checkpoint")
    parser.add_argument(
        "--only",
        type=_pattern,
        default="",
        metavar="PATTERN",
        help="print only tensors that match this regular expression",
    )
    parser.add_argument("--no-norms", action="store_true", help="print the manifest only, without reading weights")
    parser.add_argument(
        "--settings", action="store_true", help="print all settings of the run, not only those that were given"
    )
    return parser


if __name__ == "__main__":
    run_main(main)
