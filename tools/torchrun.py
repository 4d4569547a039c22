"""torchrun that exits with the code of the rank that failed first: `python tools/torchrun.py ARGUMENTS-OF-TORCHRUN`.

torchrun itself exits with 1 for every failure, so a rank that was killed before it wrote status.json could not be
distinguished from a rejected command line. As in shells, the code of a rank that signal n ended is 128 + n; so is that
of torchrun itself, after it has passed a signal to its ranks and they have ended.
"""

import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback until torchrun handles it
    if sys.stderr.isatty():
        print("loading torch", file=sys.stderr, flush=True)

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(argv: Sequence[str]) -> int:
    try:
        torchrun(list(argv))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
