"""Runs a tiny training with injected faults; one program for all scenarios, so that torch is loaded once.

python -m tests.faults.scenarios FOLDER DATA NAME ...     writes FOLDER/outcomes.json
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.end_to_end.tiny_run import arguments
from tests.helpers.forked_ranks import Ranks

SCENARIOS = {
    "kill": ["--inject kill@1:3"],
    "exception": ["--inject exception@1:3:backward"],
    "segfault": ["--inject segfault@1:3:forward"],
    "exit": ["--inject exit@1:3"],
    "memory": ["--inject out-of-memory@1:3:forward"],
    "nan once": ["--inject nan-once@1:3"],
    "repeated": ["--inject nan-grad@1:3", "--inject nan-grad@1:3"],
    "flipped bit": ["--inject bit-flip@1:3 --check-weight-hash-across-dp-replicas-interval 1"],
    "full disk": ["--inject disk-full@0:2:save"],
    "async save": ["--async-save"],
    "different flags": [""],
    "signal in backward": ["--exit-signal-handler --inject terminate@1:2:backward"],
    "signal in save": ["--exit-signal-handler --inject terminate@1:2:save"],
    "signal at the end": ["--exit-signal-handler --inject terminate@1:4:exit"],
    "hang in save": ["--inject hang@1:2:save --save-deadline 6"],
    "slow": [
        "--inject slow@1:1 --log-straggler --log-progress --rerun-mode report_stats "
        "--distributed-timeout-seconds-after-init 60"
    ],
}
"""Name -> flags of consecutive launches."""
NIGHTLY = (
    *("segfault", "exit", "memory", "async save"),
    *("signal in backward", "signal in save", "signal at the end", "hang in save"),
)
"""Scenarios that resemble those of CI, or tests in one process, in another phase."""
DIFFERING = {"different flags": ["--lr", "0.5"]}
"""Name -> additional flags of the last rank."""
NUM_RANKS = 3
FLAGS = "--train-iters 4 --global-batch-size 6 --eval-iters 0 --save-interval 2 --no-plots --step-deadline 60".split()


def main(folder: Path, data: str, names: Sequence[str]) -> None:
    outcomes: dict[str, list[dict]] = {}
    for name in names:
        run = folder / name.replace(" ", "-")
        outcomes[name] = []
        for flags in SCENARIOS[name]:
            if outcomes[name]:
                time.sleep(2.0)  # a launcher restarts later; reports of the last second could be of the same start
            argv = arguments(data, run, *FLAGS, *flags.split())
            outcomes[name].append(outcome(run, argv, DIFFERING.get(name, [])))
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


def outcome(run: Path, argv: Sequence[str], last: Sequence[str]) -> dict:
    """Outcome of one launch. `last`: additional flags of the last rank."""
    said = run.with_name(run.name + "-said")
    ranks = Ranks([argv] * (NUM_RANKS - 1) + [[*argv, *last]], said)
    codes = ranks.wait(patience=300.0, follow=120.0)
    texts = [(said / f"{rank}.txt").read_text(errors="replace") for rank in range(NUM_RANKS)]
    return {"codes": codes, "said": texts, "status": json.loads((run / "status.json").read_text())}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
