"""Decides whether to restart a run that ended: `python tools/requeue.py --run-dir DIR --exit-code N --since T`.

Called by job scripts. Prints the decision with its reason; exit code 0: restart, 1: do not restart. Needs no torch.
`--since` is the time at which the ended run was started, in seconds since the epoch; an older status.json is ignored.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.resilience.requeue import decide_and_record
from tools._common import run_main, tool_parser


def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with the run's status.json")
    parser.add_argument("--exit-code", type=int, required=True, help="exit code of torchrun or srun")
    parser.add_argument("--since", type=float, default=0.0, help="start time of the ended run, seconds since the epoch")
    parser.add_argument(
        "--patience",
        type=int,
        default=3,
        help="number of launches without a new checkpoint after which the run is not restarted (default: 3)",
    )
    options = parser.parse_args(argv)
    try:
        decision = decide_and_record(
            options.run_dir, options.exit_code, since=options.since, now=time.time(), patience=options.patience
        )
    except OSError as error:  # without a history, runs without progress would be restarted endlessly
        print(f"leave it: the history of {options.run_dir} cannot be written ({error.strerror}); fix the folder")
        return 1
    print(f"{'start again' if decision.restart else 'leave it'}: {decision.reason}")
    if decision.suspect_host:
        print(f"suspected host: {decision.suspect_host}")
    return 0 if decision.restart else 1


if __name__ == "__main__":
    run_main(main)
