"""Starts of a tiny run that are broken by `--inject`, all in one program, so that torch is loaded once.

python -m tests.faults.scenarios FOLDER DATA     writes FOLDER/outcomes.json
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.end_to_end.tiny_run import arguments
from tests.forked_ranks import Ranks

SCENARIOS = {
    "kill": ["--inject kill@1:3"],
    "exception": ["--inject exception@1:3:backward"],
    "segfault": ["--inject segfault@1:3:forward"],
    "exit": ["--inject exit@1:3"],
    "memory": ["--inject out-of-memory@1:3:forward"],
    "once": ["--inject nan-once@1:3"],
    "again and again": ["--inject nan-grad@1:3", "--inject nan-grad@1:3"],
    "bit": ["--inject bit-flip@1:3 --check-weight-hash-across-dp-replicas-interval 1"],
    "disk": ["--inject disk-full@0:2:save"],
    "background": ["--async-save"],
    "slow": [
        "--inject slow@1:1 --log-straggler --log-progress --rerun-mode report_stats "
        "--distributed-timeout-seconds-after-init 60"
    ],
}
"""name -> flags of one start after the other."""
NUM_RANKS = 3
FLAGS = "--train-iters 4 --global-batch-size 6 --eval-iters 0 --save-interval 2 --no-plots --step-deadline 20".split()


def main(folder: Path, data: str) -> None:
    outcomes = {}
    for name, starts in SCENARIOS.items():
        run = folder / name.replace(" ", "-")
        outcomes[name] = [outcome(run, arguments(data, run, *FLAGS, *flags.split())) for flags in starts]
    run = folder / "unlike"
    alike = arguments(data, run, *FLAGS)
    outcomes["unlike"] = [outcome(run, alike, [*alike, "--lr", "0.5"])]
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


def outcome(run: Path, argv: Sequence[str], last: Sequence[str] | None = None) -> dict:
    """How one start ends; `last`: what the last rank is started with, if not with the same."""
    said = run.with_name(run.name + "-said")
    ranks = Ranks([argv] * (NUM_RANKS - 1) + [argv if last is None else last], said)
    codes = ranks.wait()
    texts = [(said / f"{rank}.txt").read_text(errors="replace") for rank in range(NUM_RANKS)]
    return {"codes": codes, "said": texts, "status": json.loads((run / "status.json").read_text())}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
