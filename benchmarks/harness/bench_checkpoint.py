"""Compares saving and loading of checkpoints with torch.distributed.checkpoint: same state, ranks and disk, in
alternating runs.

python benchmarks/harness/bench_checkpoint.py --gigabytes 2 --ranks 2 4 --repeats 3 --output-dir benchmarks

Every rank is a gloo process on the CPU and holds its share of weights in bf16, master weights and two moments in fp32.
Folders are created under `--folder`. Files are read from the page cache, as after a crash of the processes but not of
the host. Both programs write every file to the device before a save is complete. Neither deletes earlier checkpoints in
the measured time, and the order alternates with every repeat. Loaded values are compared with the saved ones. Times are
medians in seconds, from the start of the first rank to the end of the last one.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import date
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from megatron_moe.checkpoint.load import find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import TensorBox, TensorShard, tensor_key
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.parallel import ParallelConfig, ProcessInfo
from megatron_moe.parallel.context import ParallelContext

KINDS = (
    ("model", torch.bfloat16),
    ("master", torch.float32),
    ("exp_avg", torch.float32),
    ("exp_avg_sq", torch.float32),
)
BYTES_PER_PARAMETER = 14
COLUMNS = 2048
NUM_PARAMETERS = 16

OURS, DCP, BLOCKED, DCP_BLOCKED = "save", "save, dcp", "async-save, blocked", "async-save, blocked, dcp"
ASYNC, DCP_ASYNC, LOAD, DCP_LOAD = "async-save, whole", "async-save, whole, dcp", "load", "load, dcp"
ROWS = (
    ("save", OURS, DCP),
    ("background save: time for which training is blocked", BLOCKED, DCP_BLOCKED),
    ("background save: time until it is complete", ASYNC, DCP_ASYNC),
    ("load", LOAD, DCP_LOAD),
)
Times = dict[str, list[float]]
Result = TypeVar("Result")


class Bench:
    """Measurements of one rank."""

    def __init__(self, rank: int, num_ranks: int, num_bytes: int, folder: Path) -> None:
        self.folder = folder
        launch = ProcessInfo(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks)
        self.context = ParallelContext(ParallelConfig(), launch, torch.device("cpu"), torch.float32, seed=1234)
        rows = num_bytes // (BYTES_PER_PARAMETER * NUM_PARAMETERS * COLUMNS * num_ranks)
        drawn = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rank))
        self.local = {
            tensor_key(kind, f"layer{n}"): drawn.roll(k + n * len(KINDS), 0).to(dtype)
            for n in range(NUM_PARAMETERS)
            for k, (kind, dtype) in enumerate(KINDS)
        }
        mesh = init_device_mesh("cpu", (num_ranks,))
        self.theirs = {key: DTensor.from_local(data, mesh, [Shard(0)]) for key, data in self.local.items()}
        shape, offset = (rows * num_ranks, COLUMNS), (rows * rank, 0)
        self.ours = {key: TensorShard(shape, (TensorBox(offset, data),)) for key, data in self.local.items()}
        self.saver = CheckpointSaver(folder / "ours", self.context, say=lambda line: None)
        self.number = 0
        # The background thread of torch.distributed.checkpoint runs collectives. They need their own process group, so
        # that they cannot interleave with collectives of the main thread.
        self.their_group = dist.new_group(backend="gloo")
        self.times: Times = {}

    def repeat(self) -> None:
        """Runs every measurement once."""
        self.number += 1
        for turns in ((self._plain, self._plain_theirs), (self._background, self._background_theirs)):
            for turn in turns if self.number % 2 else reversed(turns):
                turn()
            self._clear()

    def _plain(self) -> None:
        self._timed(OURS, self._save)
        self._loaded(LOAD, self._load)

    def _plain_theirs(self) -> None:
        self._timed(DCP, lambda: dcp.save(self.theirs, checkpoint_id=self._place("plain")))
        self._loaded(DCP_LOAD, lambda: dcp.load(self.theirs, checkpoint_id=self._place("plain")))

    def _background(self) -> None:
        self._timed(BLOCKED, self._start)
        self._timed(ASYNC, self.saver.wait)
        self.times[ASYNC][-1] += self.times[BLOCKED][-1]

    def _background_theirs(self) -> None:
        pending = self._timed(DCP_BLOCKED, self._start_theirs)
        self._timed(DCP_ASYNC, pending.result)
        self.times[DCP_ASYNC][-1] += self.times[DCP_BLOCKED][-1]

    def _place(self, kind: str) -> Path:
        return self.folder / f"dcp-{kind}-{self.number}"

    def _save(self) -> None:
        assert self.saver.save(2 * self.number, self.ours, {}) is not None

    def _start(self) -> None:
        assert self.saver.start(2 * self.number + 1, self.ours, {}) is None

    def _start_theirs(self) -> Future[object]:
        pending = dcp.async_save(self.theirs, checkpoint_id=self._place("async"), process_group=self.their_group)
        assert isinstance(pending, Future), f"an answer without stages is a {type(pending).__name__}"
        return pending

    def _load(self) -> None:
        source = find_checkpoint(CheckpointConfig(save=self.folder / "ours"), self.context)
        assert source is not None
        load_checkpoint(source, self.ours, self.context)

    def _timed(self, name: str, call: Callable[[], Result]) -> Result:
        dist.barrier()
        begin = time.perf_counter()
        result = call()
        dist.barrier()
        self.times.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    def _loaded(self, name: str, call: Callable[[], object]) -> None:
        sums = [_sum(data) for data in self.local.values()]
        for data in self.local.values():
            data.zero_()
        self._timed(name, call)
        assert [_sum(data) for data in self.local.values()] == sums, (
            f"{name}: the loaded values differ from the saved ones"
        )

    def _clear(self) -> None:
        """Removes all checkpoints of the benchmark."""
        dist.barrier()
        if self.context.is_first:
            for path in (*self.folder.glob("dcp-*"), *self.folder.glob("ours/iter_*")):
                shutil.rmtree(path)
        dist.barrier()


def _sum(data: Tensor) -> int:
    words = torch.int16 if data.dtype == torch.bfloat16 else torch.int32
    return int(data.view(words).sum(dtype=torch.int64))


def rank_main(rank: int, num_ranks: int, num_bytes: int, repeats: int, folder: Path) -> None:
    """Runs the benchmark as one rank. Rank 0 writes its times to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)
    bench = Bench(rank, num_ranks, num_bytes, folder)
    for _ in range(repeats):
        bench.repeat()
    bench.saver.close()
    if rank == 0:
        torch.save(bench.times, folder / "times.pt")
    dist.destroy_process_group()


def measured(num_ranks: int, num_bytes: int, repeats: int, where: Path | None) -> Times:
    """Runs the ranks and returns, for every measurement, its times in seconds, one per repeat."""
    with tempfile.TemporaryDirectory(dir=where, prefix="bench-checkpoint-") as name:
        folder = Path(name)
        mp.spawn(rank_main, (num_ranks, num_bytes, repeats, folder), nprocs=num_ranks)
        times: Times = torch.load(folder / "times.pt", weights_only=True)
        return times


def table(num_ranks: int, num_bytes: int, times: Times) -> str:
    """Formats medians in seconds, followed by all values in parentheses."""
    lines = [
        f"## {num_ranks} ranks",
        "",
        "| | this program | torch.distributed.checkpoint | ratio |",
        "|---|---|---|---|",
    ]
    for what, ours, theirs in ROWS:
        mine, other = statistics.median(times[ours]), statistics.median(times[theirs])
        cells = [_cell(times[name], num_bytes, rate=what in ("save", "load")) for name in (ours, theirs)]
        lines.append(f"| {what} | {cells[0]} | {cells[1]} | {other / mine:.2f} |")
    share = statistics.median(times[BLOCKED]) / statistics.median(times[OURS])
    return "\n".join([*lines, "", f"A background save blocks for {share:.0%} of the time of a plain one."])


def _cell(seconds: list[float], num_bytes: int, *, rate: bool) -> str:
    median = statistics.median(seconds)
    speed = f", {num_bytes / 1e9 / median:.2f} GB/s" if rate else ""
    return f"{median:.2f} s{speed} ({' '.join(f'{each:.2f}' for each in seconds)})"


def main(argv: Sequence[str]) -> None:
    """Prints the tables and writes them to `--output-dir`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the state over all ranks, in GB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--repeats", type=int, default=3, help="of every way")
    parser.add_argument(
        "--folder", type=Path, help="folder for the checkpoints during the run (default: that of temporary files)"
    )
    parser.add_argument("--output-dir", type=Path, help="folder for <date>-<machine>-checkpoint.md")
    options = parser.parse_args(argv)
    num_bytes = int(options.gigabytes * 1e9)
    parts = []
    for num_ranks in options.ranks:
        parts.append(table(num_ranks, num_bytes, measured(num_ranks, num_bytes, options.repeats, options.folder)))
        print(parts[-1], flush=True)
    machine = f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, torch {torch.__version__}, gloo, CPU"
    head = (
        f"# Checkpoints against torch.distributed.checkpoint\n\n{options.gigabytes:g} GB of state (bf16 weights, fp32 "
        f"masters and moments) over gloo processes; {machine}. Medians of {options.repeats} runs in turns, all of them "
        f"in parentheses. Both write to the device before a save is complete, and delete nothing in that time. Both "
        f"compute a crc32 of every byte that they save, only this program verifies it on loading. Where the ratio is "
        f"above 1, this program takes less time."
    )
    report = "\n\n".join([head, *parts, f"    python benchmarks/harness/bench_checkpoint.py {' '.join(argv)}"]) + "\n"
    if options.output_dir:
        path = options.output_dir / f"{date.today()}-{os.cpu_count()}-cores-checkpoint.md"
        path.write_text(report, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
