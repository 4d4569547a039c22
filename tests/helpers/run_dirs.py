"""Creates run folders with the files that runs write."""

import json
from dataclasses import asdict
from pathlib import Path

from megatron_moe.resilience.run_status import STATUS, StatusReport


def make_run(folder: Path, seconds: tuple[float, ...], *, state: str | None = "finished", **more: float) -> Path:
    """Creates a run folder whose metrics have the given iteration times."""
    folder.mkdir(parents=True)
    rows = [
        {"iteration": i, "iteration-time": s, "world-size": 2, "lm loss": 5.0 - i, "throughput": 10 / s, **more}
        for i, s in enumerate(seconds, 1)
    ]
    rows.append({"iteration": len(seconds), "lm loss validation": 2.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if state is not None:
        (folder / STATUS).write_text(json.dumps(asdict(StatusReport(state=state))))  # type: ignore[arg-type]
    return folder
