"""Does the layout of a run give the numbers of one rank? `python tools/verify_layout.py --recipe NAME [--nproc N]`

Shrinks the run as `--proxy` does, folds its layout to at most 8 ranks so that every axis keeps more than one rank where
that is possible, trains a few steps in double precision on gloo processes and on one process, and compares losses,
metrics, gradient norms, gradients, weights and token counts. Flags behind `--proxy` stay as they are.

Exit code 0: equal; 12: not; 2: the flags are wrong; 11: a rank failed.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from arguments.errors import Finished
from arguments.proxy.fold import Sizes, fold, lost_axes, smallest_fold
from arguments.read import layout_to_fold, read_plan
from megatron_moe.config.exit_codes import ExitCode, RunError
from megatron_moe.config.run import RunPlan
from megatron_moe.layout_check.fault_seeds import FaultSeed
from megatron_moe.layout_check.record import STEADY_EPS
from megatron_moe.layout_check.verify import summary, verify_layout
from tools.output import leave
from tools.words import positive

MOST_RANKS = 8
STEPS = 3
PROOF = (
    *("--fp64", "--device", "cpu", "--kernel-backend", "reference", "--init-method", "unit_gain"),
    *("--moe-router-dtype", "fp64", "--no-moe-router-force-load-balancing", "--lr-warmup-iters", "0"),
    *("--adam-eps", str(STEADY_EPS), "--eval-iters", "0"),
)
"""Double precision from end to end, initial values that let every part matter, and a router that routes."""
SAME_DRAWS = ("--hidden-dropout", "0", "--attention-dropout", "0", "--moe-input-jitter-eps", "0")
"""Context-parallel ranks draw other numbers than one rank does, so nothing is drawn."""


@dataclass(frozen=True)
class Question:
    """A layout to verify."""

    argv: tuple[str, ...]
    """Of the run at full size."""
    pinned: tuple[str, ...]
    """Behind `--proxy`."""
    num_ranks: int | None
    num_steps: int
    inject: str | None
    every: bool
    timeout: float


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Prints what was folded, the table and the verdict; returns the exit code."""
    try:
        return int(_verify(_question(argv), environ))
    except Finished as answer:
        print(answer.text)
        return int(answer.code)
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)


def _verify(question: Question, environ: Mapping[str, str]) -> ExitCode:
    plan, rewrites = _folded(question, environ)
    print("\n".join(rewrites))
    started = time.monotonic()
    plant = FaultSeed.parse(question.inject) if question.inject else None
    found = verify_layout(plan, num_steps=question.num_steps, timeout=question.timeout, plant=plant)
    print(summary(found))
    if question.every:
        print(found.text(every=True))
    print(f"{plan.parallel.world_size} ranks, {question.num_steps} steps: {time.monotonic() - started:.0f} s")
    return ExitCode.OK if found.equal else ExitCode.DRIFT


def _folded(question: Question, environ: Mapping[str, str]) -> tuple[RunPlan, list[str]]:
    """The plan of the small run, and what became of the flags."""
    proof = [*PROOF, "--train-iters", str(question.num_steps)]
    some = question.num_ranks or MOST_RANKS
    wish = layout_to_fold([*question.argv, "--proxy", *proof, *question.pinned], {**environ, **_launch(some)})
    ranks = question.num_ranks or smallest_fold(wish, MOST_RANKS)[0]
    if fold(wish, ranks).cp > 1:
        proof += SAME_DRAWS
    plan = read_plan([*question.argv, "--proxy", *proof, *question.pinned], {**environ, **_launch(ranks)})
    found = Sizes(**{axis: getattr(plan.parallel, axis) for axis in wish.sizes.axes})
    lines = [note for note in plan.notes if note.startswith("proxy:")]
    lines.append(f"folded to {ranks} ranks: {found}; stages {plan.layout}")
    lost = lost_axes(wish.sizes, found)
    if lost:
        lines.append(f"NOT verified, since {ranks} ranks are too few: {', '.join(lost)}")
    return plan, lines


def _launch(num_ranks: int) -> dict[str, str]:
    """The environment of rank 0, as torchrun would set it."""
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {name: str(value) for name, value in names.items()}


def _question(argv: Sequence[str]) -> Question:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument(
        "--nproc", type=positive, help=f"ranks to fold to (as few as keep all axes, at most {MOST_RANKS})"
    )
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"training steps to compare ({STEPS})")
    parser.add_argument("--every", action="store_true", help="a line for every parameter, layer and step")
    parser.add_argument("--inject", metavar="ERROR", help="plant an error, such as scale-expert-grads:2")
    parser.add_argument("--timeout", type=positive, default=300, help="seconds that the ranks may take (300)")
    ours, words = parser.parse_known_args(argv)
    full, pinned = words, []
    if "--proxy" in words:
        place = words.index("--proxy")
        full, pinned = words[:place], words[place + 1 :]
    return Question(tuple(full), tuple(pinned), ours.nproc, ours.steps, ours.inject, ours.every, ours.timeout)


if __name__ == "__main__":
    leave(lambda argv: main(argv, os.environ))
