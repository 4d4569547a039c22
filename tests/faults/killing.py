"""Repeatedly kills ranks during saves in one folder and verifies the checkpoints that remain.

python -m tests.faults.killing --folder DIR --moments 25 --random 100 --seed 0

Four forked ranks resume from the newest checkpoint and save repeatedly. Every second launch saves asynchronously; in
every third save, the disk of one rank is full. In `--moments` launches, the first rank is killed (SIGKILL) before its
n-th file operation; in `--random` launches, one or all ranks are killed at a random time. After every launch, all
visible checkpoints are verified. Prints counts as JSON; every key of `HARM` must be 0.
"""

import argparse
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_moe.checkpoint.directory import list_checkpoints
from megatron_moe.checkpoint.load import find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import TensorBox, TensorShard
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.parallel import ParallelConfig
from tests.helpers.checkpoint_files import FaultyStorage, disk_full, verify
from tests.helpers.contexts import context_of_rank

NUM_RANKS = 4
WIDTH = 1 << 14
PEERS_LEAVE_SECONDS = 60.0
HARM = ("damaged", "steps_back", "stuck", "wrong_values")
FAILED, WRONG_VALUES = 1, 3


class KillingStorage(FaultyStorage):
    """Kills this process before operation `kill_at`, counted from `arm()`."""

    def __init__(self, kill_at: int | None) -> None:
        super().__init__(fail=lambda n, op, path: disk_full(n, op, path) if self.full and op == "write" else None)
        self.full = False
        self._kill_after = kill_at
        self._armed = 1 << 30

    def arm(self) -> None:
        self._armed = len(self.moments)

    def _moment(self, operation: str, path: Path) -> None:
        if self._kill_after is not None and len(self.moments) - self._armed == self._kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._moment(operation, path)


@dataclass
class Found:
    """Counts of outcomes over all launches."""

    starts: int = 0
    killed: int = 0
    committed: int = 0
    disk_full: int = 0
    swept: int = 0
    damaged: int = 0
    steps_back: int = 0
    stuck: int = 0
    wrong_values: int = 0


def values(iteration: int) -> dict[str, torch.Tensor]:
    """Expected global state at an iteration."""
    base = torch.arange(NUM_RANKS * WIDTH, dtype=torch.float32).view(NUM_RANKS, WIDTH)
    return {"model.weight": base + iteration, "master.weight": base.double() * iteration, "exp_avg.weight": -base}


def part(state: dict[str, torch.Tensor], rank: int) -> dict[str, TensorShard]:
    """Slices the state: one row per rank, and the step count on every rank."""
    rows = {k: TensorShard(tuple(t.shape), (TensorBox((rank, 0), t[rank : rank + 1]),)) for k, t in state.items()}
    return rows | {"optimizer.step_count": TensorShard.whole(torch.tensor(1))}


def rank_main(rank: int, folder: Path, start: int, kill_at: int | None, news: int) -> None:
    """Main function of one rank of one launch; writes one line per outcome to the pipe `news`."""
    method = f"file://{folder}/meet-{start}"
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=PEERS_LEAVE_SECONDS)
    )
    context = context_of_rank(ParallelConfig(world_size=NUM_RANKS), rank, dtype=torch.float32)
    storage, said = KillingStorage(kill_at if rank == 0 else None), list[str]()

    def report(word: str, iteration: int) -> None:
        if rank == 0:
            os.write(news, f"{word} {iteration}\n".encode())

    save_folder = folder / "save"
    saver = CheckpointSaver(save_folder, context, keep_last=2, stop_after=100, storage=storage, say=said.append)
    for line in said:
        report("swept" if line.startswith("removed stale") else "said", 0)
    iteration = 0
    source = find_checkpoint(CheckpointConfig(save=save_folder), context, say=said.append)
    if source is not None:
        state = {key: torch.zeros_like(value) for key, value in values(0).items()}
        iteration = load_checkpoint(source, part(state, rank), context, say=said.append).iteration
        expected = values(iteration)
        if not all(torch.equal(state[key][rank], expected[key][rank]) for key in state):
            os._exit(WRONG_VALUES)
    report("resumed", iteration)
    storage.arm()
    while True:
        iteration += 1
        storage.full = iteration % 3 == 0 and kill_at is None and rank == iteration % NUM_RANKS
        saved = _save(saver, iteration, rank, in_background=start % 2 == 1)
        report("committed" if saved else "failed", iteration)


def _save(saver: CheckpointSaver, iteration: int, rank: int, *, in_background: bool) -> bool:
    if not in_background:
        return saver.save(iteration, part(values(iteration), rank), {"iteration": iteration}) is not None
    ended = saver.start(iteration, part(values(iteration), rank), {"iteration": iteration})
    while ended is None:
        time.sleep(0.001)  # in place of a training step
        ended = saver.poll()
    return ended.path is not None


def forked(folder: Path, start: int, kill_at: int | None, news: int) -> list[int]:
    """Forks the ranks and returns their process ids."""
    children = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            try:
                rank_main(rank, folder, start, kill_at, news)
            except BaseException:  # noqa: BLE001  a rank whose peer was killed
                os._exit(FAILED)
        children.append(child)
    return children


class Starts:
    """Runs consecutive launches in one folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.found = Found()
        self.newest = 0
        """Newest iteration known to be committed."""
        self._chance = random.Random(seed)

    def one(self, kill_at: int | None) -> None:
        """Launches and kills four ranks, then checks the folder."""
        number, self.found.starts = self.found.starts, self.found.starts + 1
        reading, writing = os.pipe()
        children = forked(self.folder, number, kill_at, writing)
        os.close(writing)
        with os.fdopen(reading) as news:
            if kill_at is None:
                for _ in range(self._chance.randint(1, 5)):  # after up to a few saves
                    self._listen(news.readline())
                time.sleep(self._chance.uniform(0.0, 0.25))
                every = self._chance.random() < 0.5
                for child in children if every else [self._chance.choice(children)]:
                    os.kill(child, signal.SIGKILL)
            self._wait(children)
            for line in news.read().splitlines():
                self._listen(line)
        self._examine()

    def _listen(self, line: str) -> None:
        word, iteration = (line.split() + ["none", "0"])[:2]
        match word:
            case "resumed":
                self.found.steps_back += int(iteration) < self.newest
            case "committed":
                self.found.committed += 1
                self.newest = max(self.newest, int(iteration))
            case "failed":
                self.found.disk_full += 1
            case "swept":
                self.found.swept += 1

    def _wait(self, children: list[int]) -> None:
        """Waits until all ranks have ended; those that were not killed detect the lost peer."""
        handles = {os.pidfd_open(child): child for child in children}
        deadline = time.monotonic() + 2 * PEERS_LEAVE_SECONDS
        while handles:
            ended, _, _ = select.select(list(handles), [], [], max(0.0, deadline - time.monotonic()))
            if not ended:
                self.found.stuck += 1
                for child in handles.values():
                    os.kill(child, signal.SIGKILL)
                deadline += PEERS_LEAVE_SECONDS
            for handle in ended:
                _, status = os.waitpid(handles.pop(handle), 0)
                os.close(handle)
                self.found.killed += os.WIFSIGNALED(status)
                self.found.wrong_values += os.WIFEXITED(status) and os.WEXITSTATUS(status) == WRONG_VALUES

    def _examine(self) -> None:
        visible = list_checkpoints(self.folder / "save")
        self.found.damaged += sum(bool(verify(candidate.path)) for candidate in visible)
        self.found.steps_back += (visible[0].iteration if visible else 0) < self.newest


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; must be empty")
    parser.add_argument("--moments", type=int, default=25, help="launches killed at one of the first file operations")
    parser.add_argument("--random", type=int, default=10, help="launches killed at a random time")
    parser.add_argument("--seed", type=int, default=0, help="seed of times and killed ranks")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    starts = Starts(options.folder, options.seed)
    for kill_at in [*range(options.moments), *[None] * options.random]:
        starts.one(kill_at)
    print(json.dumps(asdict(starts.found)))


if __name__ == "__main__":
    main(sys.argv[1:])
