"""torchrun that exits with the code of the rank that failed first: `python tools/torchrun.py ARGUMENTS-OF-TORCHRUN`.

torchrun itself exits with 1 for every failure, so a rank that was killed before it wrote status.json could not be
distinguished from a rejected command line. As in shells, the code of a rank that signal n ended is 128 + n.
"""

import sys
from collections.abc import Sequence

if __name__ == "__main__" and sys.stderr.isatty():
    print("loading torch", file=sys.stderr, flush=True)

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(argv: Sequence[str]) -> int:
    try:
        torchrun(list(argv))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
