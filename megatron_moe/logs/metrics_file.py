"""metrics.jsonl: one JSON object per report, and how it is read and mended.

Every record has "iteration" and "samples"; the other keys are the tags of `tags.py`. What is not
finite is null.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_moe.config.exit_codes import DataProblem

Record = dict[str, Any]


def encode(record: Mapping[str, Any]) -> bytes:
    """One line of the file."""
    content = {key: _plain(value) for key, value in record.items()}
    return (json.dumps(content, allow_nan=False, ensure_ascii=False) + "\n").encode()


def read_metrics(path: Path) -> list[Record]:
    """The records in file order. A torn last line, left by a kill, is skipped.

    Raises DataProblem when another line is not a JSON object.
    """
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_object(line))
        except ValueError as error:
            # After the final newline comes an empty piece; a torn line takes its place.
            if number < len(lines):
                message = f"{path}: line {number} is not a JSON object; remove the line or the file"
                raise DataProblem(message) from error
    return records


def truncate_metrics(path: Path, iteration: int) -> None:
    """Drops records after `iteration`, which a resumed run reports again, and a torn last line. Replaces atomically."""
    if not path.exists():
        return
    kept = [encode(record) for record in read_metrics(path) if record["iteration"] <= iteration]
    aside = path.with_name(path.name + ".partial")
    aside.write_bytes(b"".join(kept))
    os.replace(aside, path)


def _object(line: bytes) -> Record:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"not an object: {record}")
    return record


def _plain(value: Any) -> Any:
    """Vectors rounded to six digits and whole numbers without a point: a record holds layers x experts of them."""
    if isinstance(value, list):
        return [_plain(float(f"{element:.6g}")) for element in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value
