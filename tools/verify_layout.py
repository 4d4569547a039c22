"""Checks that a layout trains like one rank: `python tools/verify_layout.py --recipe NAME [--nproc N] [--proxy FLAGS]`

Shrinks the model as pretrain_moe.py --proxy does, and the layout to at most 8 ranks (more than one per parallel axis if
possible). Trains a few steps in double precision with this layout (gloo) and on one rank, and compares losses, metrics,
gradient norms, gradients, weights and token counts. Flags after `--proxy` are not changed.

Exit code 0: equal; 12: different; 2: invalid flags; 11: a rank failed.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading torch", file=sys.stderr, flush=True)

from arguments.launch import environ_of_rank_0
from arguments.proxy.fold import Sizes, fold, lost_axes, smallest_fold
from arguments.read import layout_to_fold, read_plan
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.run import RunPlan
from megatron_moe.layout_check.injected_errors import InjectedError
from megatron_moe.layout_check.record import STEADY_EPS
from megatron_moe.layout_check.table import summary
from megatron_moe.layout_check.verify import verify_layout
from tools._common import positive, reports_errors, run_main, tool_parser

MOST_RANKS = 8
STEPS = 3
PROOF = (
    *("--fp64", "--device", "cpu", "--kernel-backend", "reference", "--init-method", "unit_gain"),
    *("--moe-router-dtype", "fp64", "--no-moe-router-force-load-balancing", "--lr-warmup-iters", "0"),
    *("--adam-eps", str(STEADY_EPS), "--eval-iters", "0"),
)
"""Flags added to the run with the layout and to the one-rank run. Unit-gain weights let every module affect results."""
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0", "--moe-input-jitter-eps", "0")
"""Flags added if cp > 1: with context parallelism, random masks and jitter differ from those of a single rank."""
WHOLE_MATRICES = ("--muon-tp-mode", "duplicated")
"""Flags that replace blockwise Muon if tp > 1, because its updates depend on the number of tensor-parallel ranks."""


@reports_errors
def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Prints the reduced layout, the comparison and the result; returns the exit code."""
    options, flags = _parser().parse_known_args(argv)
    plan, rewrites = _folded(options, flags, environ)
    print("\n".join(rewrites))
    started = time.monotonic()
    injected_error = InjectedError.parse(options.inject) if options.inject else None
    found = verify_layout(plan, num_steps=options.steps, timeout=options.timeout, injected_error=injected_error)
    print(summary(found))
    if options.every:
        print(found.text(every=True))
    print(f"{plan.parallel.world_size} ranks, {options.steps} steps: {time.monotonic() - started:.0f} s")
    return ExitCode.OK if found.all_equal else ExitCode.DRIFT


def _folded(options: argparse.Namespace, flags: Sequence[str], environ: Mapping[str, str]) -> tuple[RunPlan, list[str]]:
    """Plan of the reduced run, and lines for the user about rewritten flags and axes that are not verified."""
    place = flags.index("--proxy") if "--proxy" in flags else len(flags)
    rewritten, pinned = flags[:place], flags[place + 1 :]
    proof = [*PROOF, "--train-iters", str(options.steps)]
    max_ranks = options.nproc or MOST_RANKS
    layout = layout_to_fold([*rewritten, "--proxy", *proof, *pinned], environ_of_rank_0(environ, max_ranks))
    ranks = options.nproc or smallest_fold(layout, MOST_RANKS)[0]
    if fold(layout, ranks).cp > 1:
        proof += NO_DROPOUT
    plan = read_plan([*rewritten, "--proxy", *proof, *pinned], environ_of_rank_0(environ, ranks))
    replaced = plan.optimizer.muon.muon_tp_mode == "blockwise" and plan.parallel.tp > 1
    if replaced:
        proof += WHOLE_MATRICES
        plan = read_plan([*rewritten, "--proxy", *proof, *pinned], environ_of_rank_0(environ, ranks))
    found = Sizes(**{axis: getattr(plan.parallel, axis) for axis in layout.sizes.axes})
    lines = [note for note in plan.notes if note.startswith("proxy:")]
    lines.append(f"folded to {ranks} ranks: {found}; stages {plan.layout}")
    if replaced and plan.optimizer.muon.muon_tp_mode != "blockwise":
        lines.append("NOT verified, because its results depend on tp: --muon-tp-mode blockwise (here: duplicated)")
    lost = lost_axes(layout.sizes, found)
    if lost:
        lines.append(f"NOT verified, because {ranks} ranks are too few: {', '.join(lost)}")
    return plan, lines


def layout_of(flags: Sequence[str], environ: Mapping[str, str]) -> RunPlan:
    """Plan of the reduced run of a command line."""
    options, words = _parser().parse_known_args(flags)
    return _folded(options, words, environ)[0]


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__, allow_abbrev=False)
    parser.add_argument(
        "--nproc", type=positive, help=f"ranks to fold to (default: the fewest with all axes, at most {MOST_RANKS})"
    )
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"training steps to compare (default: {STEPS})")
    parser.add_argument("--every", action="store_true", help="one line per parameter, layer and step")
    parser.add_argument("--inject", metavar="ERROR", help="inject an error, such as scale-expert-grads:2")
    parser.add_argument(
        "--timeout", type=positive, default=300, help="time limit of the ranks in seconds (default: 300)"
    )
    return parser


if __name__ == "__main__":
    run_main(lambda argv: main(argv, os.environ))
