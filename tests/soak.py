"""Soak test: a run under random faults must end bitwise equal to an undisturbed one.

python -m tests.soak                        20 minutes on 4 ranks; the table goes to benchmarks/ (`make soak`)
python -m tests.soak --faults 5 --seed 3    five faults instead of a duration

Launches one command line repeatedly and interrupts each launch by a random fault: signals, `--inject`, or damage to the
newest checkpoint between two launches. The last launch, and a second run, are undisturbed.
Exit code 1 if weights, optimizer or losses of the two differ in one bit, an incomplete checkpoint was visible, or an
exit code was not one that `config/exit_codes.py` promises.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_moe.checkpoint.directory import list_checkpoints
from megatron_moe.config.exit_codes import ExitCode
from tests.end_to_end.tiny_run import arguments, losses, make_data
from tests.helpers.checkpoint_files import verify
from tests.helpers.forked_ranks import Ranks
from tests.helpers.reports import store
from tests.helpers.soak_faults import FAULTS, Fault, damage

RANKS = 4
SAVE_INTERVAL = 10
MORE_ITERATIONS = 20
"""Iterations of the last, undisturbed launch after the newest checkpoint."""
FLAGS = f"""
--train-iters 1000000 --lr-decay-iters 2000 --eval-iters 0 --save-interval {SAVE_INTERVAL} --keep-last-checkpoints 3
--exit-signal-handler --step-deadline 10 --check-weight-hash-across-dp-replicas-interval {SAVE_INTERVAL // 2}
--no-plots --log-interval 1 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
""".split()


@dataclass
class FaultCounts:
    """Effects of one kind of fault."""

    times: int = 0
    codes: set[int] = field(default_factory=set)
    lost: int = 0
    """Largest number of iterations repeated after a restart."""
    seconds: float = 0.0
    """Longest time from the fault to the end of the last rank."""


class Soak:
    """One soak test in a separate folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.run = folder / "run"
        self.data = make_data(folder)
        self.counts: dict[str, FaultCounts] = {}
        self.problems: list[str] = []
        self.damaged: set[int] = set()
        """Iterations of deliberately damaged checkpoints."""

    def inject_fault(self) -> None:
        """Launches the run with one fault, or damages the checkpoint folder between two launches."""
        before = self.newest()
        fault = self.random.choice([fault for fault in FAULTS if before or not fault.needs_checkpoint])
        found = self.counts.setdefault(fault.name, FaultCounts())
        found.times += 1
        if fault.damage:
            path = damage(fault.damage, self.run / "checkpoints", self.random)
            if path is not None and not verify(path):
                self.problems.append(f"{fault.name}: {path.name} is not detected as damaged")
            if path is not None:
                self.damaged.add(int(path.name.removeprefix("iter_")))
            return
        codes, seconds, reached = self._start(fault, before)
        if codes is None:
            self.problems.append(f"{fault.name}: the ranks had to be killed")
            return
        found.codes |= set(codes)
        found.seconds = max(found.seconds, seconds)
        after = self.newest()
        found.lost = max(found.lost, reached - after)
        wrong = set(codes) - fault.codes
        if wrong:
            self.problems.append(f"{fault.name}: codes {codes}, expected only {sorted(fault.codes)}")
        if after < before:
            self.problems.append(f"{fault.name}: the newest checkpoint went back from {before} to {after}")
        self._check_visible(fault.name)

    def finish(self) -> int:
        """Runs the last launch without faults; returns its last iteration."""
        end = self.newest() + MORE_ITERATIONS
        self._undisturbed(self.run, end)
        undisturbed = self.folder / "undisturbed"
        self._undisturbed(undisturbed, end)
        self.problems += differences(self.run, undisturbed, end)
        leftovers = [
            path.name for path in (self.run / "checkpoints").iterdir() if path.name.startswith((".tmp", ".old"))
        ]
        self.problems += [f"not removed: {name}" for name in leftovers]
        return end

    def newest(self) -> int:
        """Iteration of the newest undamaged checkpoint."""
        there = [found.iteration for found in list_checkpoints(self.run / "checkpoints")]
        return max((iteration for iteration in there if iteration not in self.damaged), default=0)

    def _start(self, fault: Fault, before: int) -> tuple[list[int] | None, float, int]:
        """Launches the run with a fault and waits until all ranks have ended.

        Returns exit codes of all ranks (None if they had to be killed), seconds from the fault to the last exit, and
        the last reported iteration.
        """
        inject = []
        if fault.inject:
            soon = before + self.random.randint(1, 2 * SAVE_INTERVAL)
            if fault.inject.endswith(":save"):
                soon = (before // SAVE_INTERVAL + 1) * SAVE_INTERVAL
            kind, _, phase = fault.inject.partition(":")
            rank = self.random.randrange(RANKS)
            inject = ["--inject", f"{kind}@{rank}:{soon}" + (f":{phase}" if phase else "")]
        ranks = Ranks([arguments(self.data, self.run, *FLAGS, *inject)] * RANKS, self.folder / "said")
        if fault.signal is not None:
            ranks.wait_until_trained(self.run, 0 if fault.anywhere else before + 1)
            ranks.sleep(self.random.uniform(0.0, 2.0))
            ranks.send(fault.signal, self.random.sample(range(RANKS), fault.num_ranks))
        if fault.survives:
            ranks.wait_until_trained(self.run, before + 3 * SAVE_INTERVAL)
            ranks.send(15, range(RANKS))
        begun = time.monotonic()
        codes = ranks.wait()
        seconds = time.monotonic() - begun
        reached = max(losses(self.run), default=0) if (self.run / "metrics.jsonl").exists() else 0
        self.damaged = {iteration for iteration in self.damaged if self._still_damaged(iteration)}
        return codes, seconds, reached

    def _still_damaged(self, iteration: int) -> bool:
        """True unless the checkpoint was deleted or written again."""
        found = self.run / "checkpoints" / f"iter_{iteration:07d}"
        return found.exists() and bool(verify(found))

    def _undisturbed(self, run: Path, end: int) -> None:
        flags = [*FLAGS, "--exit-interval", str(end)]
        if run != self.run:
            flags += ["--save-interval", "1000000"]
        ranks = Ranks([arguments(self.data, run, *flags)] * RANKS, self.folder / "said")
        codes = ranks.wait(patience=600)
        if codes != [0] * RANKS:
            self.problems.append(f"a start that nobody disturbed ended with {codes}: {ranks.said()[-1500:]}")

    def _check_visible(self, after: str) -> None:
        for found in list_checkpoints(self.run / "checkpoints"):
            problem = verify(found.path)
            if problem and found.iteration not in self.damaged:
                self.problems.append(f"after {after}: {found.path.name} is visible but incomplete: {problem[0]}")


def differences(run: Path, undisturbed: Path, end: int) -> list[str]:
    """Differences between the last checkpoints and losses of two runs."""
    found = []
    folders = [each / "checkpoints" / f"iter_{end:07d}" for each in (run, undisturbed)]
    names = {path.name for folder in folders for path in folder.glob("*.safetensors")}
    if not names:
        found.append(f"no checkpoint of iteration {end}")
    for name in sorted(names):
        ours, theirs = (folder / name for folder in folders)
        if not (ours.exists() and theirs.exists() and ours.read_bytes() == theirs.read_bytes()):
            found.append(f"{name} of iteration {end} differs from the undisturbed run's")
    if losses(run) != losses(undisturbed):
        found.append("the losses in metrics.jsonl differ from the undisturbed run's")
    if sorted(losses(run)) != list(range(1, end + 1)):
        found.append("metrics.jsonl does not have every iteration")
    return found


def report(soak: Soak, end: int, minutes: float, command: str) -> str:
    """Formats the results as a Markdown table."""
    rows = [
        f"| {name} | {metrics.times} | {', '.join(map(str, sorted(metrics.codes))) or '-'} | {metrics.lost} | "
        f"{metrics.seconds:.1f} |"
        for name, metrics in sorted(soak.counts.items())
    ]
    faults = sum(metrics.times for metrics in soak.counts.values())
    verdict = "Weights, optimizer and losses are those of an undisturbed run, bit for bit."
    if soak.problems:
        verdict = "\n".join(["**Failed:**", "", *(f"- {problem}" for problem in soak.problems)])
    return "\n".join(
        [
            "# A run under random faults",
            "",
            f"`{command}`: {faults} faults in {minutes:.1f} minutes, {end} iterations in the end.",
            f"{RANKS} ranks (gloo), a checkpoint every {SAVE_INTERVAL} iterations.",
            "",
            verdict,
            "",
            "| fault | times | exit codes of ranks | most iterations lost | "
            "longest from the signal, or else the start, to the end of the last rank, s |",
            "|---|---:|---|---:|---:|",
            *rows,
        ]
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="A run under random faults.")
    parser.add_argument("--minutes", type=float, default=20.0, help="duration")
    parser.add_argument("--faults", type=int, help="number of faults instead of a duration")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the faults")
    parser.add_argument("--store", action="store_true", help="store the table in benchmarks/")
    given = parser.parse_args(argv)
    print(f"seed {given.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    begun = time.monotonic()
    soak = Soak(folder, given.seed)
    number = 0
    while not soak.problems:
        minutes = (time.monotonic() - begun) / 60
        if number == given.faults or (given.faults is None and minutes > given.minutes):
            break
        soak.inject_fault()
        number += 1
        print(f"{minutes:5.1f} min, fault {number}, checkpoint {soak.newest()}", flush=True)
    end = soak.finish() if not soak.problems else soak.newest()
    command = f"python -m tests.soak {' '.join(argv)}".strip()
    table = report(soak, end, (time.monotonic() - begun) / 60, f"{command} (seed {given.seed})")
    print(table)
    if given.store:
        print(store("soak", table))
    if soak.problems:
        print(f"the run is kept in {folder}")
        return int(ExitCode.BUG)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
