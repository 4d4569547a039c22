"""Routing traces: files with the expert choices of every router call, and their replay in another run.

Every rank writes `router_trace_rank{R}.jsonl` in Megatron-LM's format, one JSON object per router call: step (the
iteration, from 1), stage ("pre_dispatch"), block ("decoder" or "mtp"), layer (from 1), mtp_idx (only in "mtp"), rank,
num_tokens, topk, and top_indices [T][K] (-1: no expert). Two fields are not in Megatron-LM's format: microbatch (its
index in the global batch), and part: [index, number] of the rank's share of a microbatch's tokens under sequence and
context parallelism.
"""

import errno
import json
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_moe.config.exit_codes import DataProblem, EnvironmentProblem
from megatron_moe.data.batch import ForcedRouting
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.streams import Event, make_host_copies

_INDICES = re.compile(rb'"top_indices":\s*(\[[-\d\s,\[\]]*\])')
_STEP = re.compile(rb'\{"step": (\d{1,18}),')
_FILE = "router_trace_rank{}.jsonl"
_LIMITS = (("step", 1, 1 << 31), ("layer", 1, 1 << 31), ("num_tokens", 0, 1 << 31), ("topk", 1, 1 << 15))
"""(required field of a record, minimum, exclusive maximum)."""
_MOST_PARTS = 1 << 20


class _TracedStep(NamedTuple):
    calls: Sequence[tuple[int, torch.Size]]
    """(layer, shape of the choices) of every router call."""
    ids: Tensor
    """int16, flat, in host memory: the choices of all calls."""
    copied: Event


class RoutingTrace:
    """Writes the expert choices of training steps to this rank's file, without synchronising with the device.

    `add` collects the choices of a step on the device, `end_step` starts one copy to host memory, and `write`, called
    once the results of the step are known, appends them to the file. At most three steps are held at a time. A run that
    resumes continues the files: records of the iterations that it repeats are removed.
    """

    def __init__(
        self,
        folder: Path,
        context: ParallelContext,
        *,
        num_experts: int,
        num_layers: int,
        mtp_calls: int = 1,
        last_iteration: int | None = None,
    ) -> None:
        """Opens or creates the file. Raises EnvironmentProblem if it is not a regular file or cannot be written.

        Args:
            num_layers: decoder layers of the model; routers of later layers belong to multi-token prediction.
            mtp_calls: calls of a multi-token prediction router per microbatch.
            last_iteration: last iteration to trace; None means that all are traced.
        """
        self.path = folder / _FILE.format(context.rank)
        self._context, self._num_layers, self._mtp_calls = context, num_layers, mtp_calls
        self._last_iteration = last_iteration
        self._copies = make_host_copies(context.device)
        self._current: list[tuple[int, Tensor]] | None = None
        """(layer, int16 choices) of the calls of the step in progress; None if it is not traced."""
        self._steps: dict[int, _TracedStep] = {}
        self._cells = _cells(num_experts)
        self._is_cut = False
        """True once existing files have been truncated before the first step of this run."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _open_regular(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._problem(error) from error

    def begin_step(self, iteration: int) -> None:
        """Starts to collect the choices of a step. Raises EnvironmentProblem if an earlier trace cannot be
        truncated."""
        if not self._is_cut:
            self._cut(iteration)
        self._current = [] if self._last_iteration is None or iteration <= self._last_iteration else None

    def add(self, layer: int, ids_TK: Tensor) -> None:
        """Copies the choices of one router call, on the device. Does nothing outside of a traced step."""
        if self._current is not None:
            self._current.append((layer, ids_TK.to(torch.int16)))

    def end_step(self, iteration: int) -> None:
        """Starts the copy of a step's choices to host memory."""
        collected, self._current = self._current, None
        if not collected:
            return
        calls = [(layer, ids_TK.shape) for layer, ids_TK in collected]
        ids = torch.cat([ids_TK.flatten() for _, ids_TK in collected])
        into = self._copies.host_buffer(ids.numel(), ids.dtype, exact=False)
        self._steps[iteration] = _TracedStep(calls, into, self._copies.to_host(into, ids, free_source=True))

    def discard_from(self, iteration: int) -> None:
        """Discards the collected choices of an iteration and of all later ones. Called before the run repeats these
        iterations."""
        self._steps = {number: step for number, step in self._steps.items() if number < iteration}

    def write(self, iteration: int) -> str | None:
        """Appends the choices of a step whose results the host has read. If that fails, tracing ends, and a line for
        the log is returned, otherwise None."""
        step = self._steps.pop(iteration, None)
        if step is None:
            return None
        self._copies.synchronize(step.copied)
        earlier: Counter[int] = Counter()
        choices = step.ids.split([shape.numel() for _, shape in step.calls])
        try:
            for (layer, shape), ids in zip(step.calls, choices, strict=True):
                self._file.write(self._record(iteration, layer, earlier[layer], ids.view(shape).numpy()))
                earlier[layer] += 1
            self._file.flush()
        except OSError as error:
            self._last_iteration, self._steps = 0, {}
            return (
                f"iteration {iteration}: the routing trace {self.path} cannot be written and ends here: {error}; free "
                "disk space, or limit the trace with --moe-routing-trace-max-training-iters"
            )
        return None

    def close(self) -> None:
        self._file.close()

    def _cut(self, iteration: int) -> None:
        """Removes the records from `iteration` on. Rank 0 also truncates files of ranks that do not exist in this
        run."""
        self._is_cut = True
        try:
            _cut_records(self._file, iteration)
            for rank, path in _trace_files(self.path.parent) if self._context.rank == 0 else ():
                if rank >= self._context.config.world_size:
                    with _open_regular(path, os.O_RDWR) as file:
                        _cut_records(file, iteration)
        except OSError as error:
            raise self._problem(error) from error

    def _problem(self, error: OSError) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"--moe-routing-trace-path {self.path.parent}: {error}; use a folder that can be written"
        )

    def _record(self, iteration: int, layer: int, number: int, ids_TK: Any) -> bytes:
        """Formats one line of the file. `number`: number of earlier calls of this router in the step."""
        dp, tp, cp = (self._context.group(name) for name in ("dp", "tp", "cp"))
        is_mtp = layer >= self._num_layers
        per_microbatch = self._mtp_calls if is_mtp else 1
        parts = tp.size if self._context.config.sequence_parallel else 1
        fields: dict[str, Any] = {
            "step": iteration,
            "stage": "pre_dispatch",
            "block": "mtp" if is_mtp else "decoder",
            "layer": 1 + layer - (self._num_layers if is_mtp else 0),
            "rank": self._context.rank,
            "num_tokens": ids_TK.shape[0],
            "topk": ids_TK.shape[1],
            "microbatch": number // per_microbatch * dp.size + dp.rank,
            "part": [cp.rank * parts + (tp.rank if parts > 1 else 0), cp.size * parts],
        }
        if is_mtp:
            fields["mtp_idx"] = layer - self._num_layers + number % per_microbatch
        head = json.dumps(fields).encode()
        return head[:-1] + b', "top_indices": ' + _encode(ids_TK, self._cells) + b"}\n"


def _open_regular(path: Path, flags: int) -> BinaryIO:
    """Opens a file. Raises OSError for links and pipes, which could lead elsewhere or block."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "links are not followed", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(handle, "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "r+b")


def _trace_files(folder: Path) -> list[tuple[int, Path]]:
    """Returns (rank, file) of the traces in a folder, by rank."""
    pattern = re.compile(re.escape(_FILE).replace(r"\{\}", r"(\d{1,9})"))
    found = [(pattern.fullmatch(path.name), path) for path in folder.glob(_FILE.format("*"))]
    return sorted((int(match[1]), path) for match, path in found if match)


def _cut_records(file: BinaryIO, iteration: int) -> None:
    """Truncates a trace file before its first record of `iteration` or later, or before its first incomplete record."""
    end = 0
    for line in file:
        step = _STEP.match(line)
        if step is None or not line.endswith(b"}\n") or int(step[1]) >= iteration:
            break
        end += len(line)
    file.seek(end)
    file.truncate()


def _cells(num_experts: int) -> Any:
    """Encoded texts "id," of the ids -1, 0, ..., E - 1, padded to equal width: uint8 [E + 1, width]."""
    width = max(2, len(str(num_experts - 1))) + 1
    text = "".join(f"{expert},".rjust(width) for expert in range(-1, num_experts))
    return np.frombuffer(text.encode(), np.uint8).reshape(num_experts + 1, width)


def _encode(ids_TK: Any, cells: Any) -> bytes:
    """Encodes ids as a JSON array [T][K], a hundred times as fast as the json module."""
    num_tokens, topk = ids_TK.shape
    lines = np.empty((num_tokens, topk * cells.shape[1] + 2), np.uint8)
    lines[:, 0] = ord("[")
    lines[:, 1:-1] = cells[ids_TK.astype(np.int64) + 1].reshape(num_tokens, topk * cells.shape[1])
    lines[:, -2], lines[:, -1] = ord("]"), ord(",")
    return b"[" + lines.tobytes()[:-1] + b"]"


class RoutingReplay:
    """Expert choices of a routing trace, for the routers and microbatches of one rank.

    Step n replays the choices of recorded step n. A run with more steps or microbatches than the trace begins again
    with the first recorded ones. Layers of multi-token prediction are not replayed.
    """

    def __init__(
        self,
        folder: Path,
        context: ParallelContext,
        *,
        layers: Sequence[int],
        num_experts: int,
        topk: int,
        num_tokens: int,
        num_microbatches: int,
        train_iters: int,
    ) -> None:
        """Reads the trace into host memory. Raises DataProblem if it does not fit the run.

        Args:
            layers: decoder layers whose routers this rank has.
            num_tokens: tokens of a whole microbatch, before sequence parallelism divides them.
            num_microbatches: microbatches per step of this rank.
        """
        self._device, self._layers = context.device, tuple(layers)
        dp, tp = context.group("dp"), context.group("tp")
        self._parts = (tp.rank, tp.size) if context.config.sequence_parallel else (0, 1)
        found = _read(folder, train_iters)
        self._num_steps = _number_of("steps", {step for step, *_ in found}, folder)
        recorded: dict[int, set[int]] = defaultdict(set)
        for step, microbatch, _ in found:
            recorded[step].add(microbatch)
        self._num_microbatches = [_number_of("microbatches", recorded[step], folder) for step in range(self._num_steps)]
        """Number of recorded microbatches of each step, which varies if the batch size does."""
        self._choices: dict[tuple[int, int], Tensor] = {}
        """(step, microbatch), each counted from 0 -> int16 [layers, T, K]."""
        for step, available in enumerate(self._num_microbatches):
            for microbatch in {(index * dp.size + dp.rank) % available for index in range(num_microbatches)}:
                per_layer = [_whole(found, (step, microbatch, layer), folder) for layer in self._layers]
                if len({ids_TK.shape for ids_TK in per_layer}) > 1:
                    raise DataProblem(f"--moe-routing-replay-path {folder}: layers recorded unequal numbers of tokens")
                whole_LTK = np.stack(per_layer)
                _check(whole_LTK, num_experts, topk, num_tokens, folder)
                index, number = self._parts
                share = num_tokens // number
                mine_LTK = torch.from_numpy(whole_LTK[:, index * share : (index + 1) * share].copy())
                self._choices[step, microbatch] = mine_LTK.pin_memory() if self._device.type == "cuda" else mine_LTK

    def choices(self, iteration: int, microbatch: int) -> ForcedRouting:
        """Choices on the device. `microbatch`: index in the global batch."""
        step = (iteration - 1) % self._num_steps
        own_LTK = self._choices[step, microbatch % self._num_microbatches[step]]
        ids_LTK = own_LTK.to(self._device, non_blocking=True).long()
        return ForcedRouting(ids=dict(zip(self._layers, ids_LTK.unbind(), strict=True)))


_RouterCall = tuple[int, int, int]
"""(step, microbatch, layer), each from 0."""


class _Recorded(NamedTuple):
    """Position of a record's top_indices in a file, so that a rank parses only those of its microbatches."""

    path: Path
    line: int
    start: int
    end: int
    shape: tuple[int, int]
    parts: int
    """Number of ranks that share the tokens of the microbatch."""

    def parse(self) -> Any:
        """Reads the recorded expert ids from the file, int16 [T, K]. Raises DataProblem if the line is damaged."""
        num_tokens, topk = self.shape
        try:
            with _open_regular(self.path, os.O_RDONLY) as file:
                file.seek(self.start)
                text = file.read(self.end - self.start).translate(None, b" \t")
            rows = text[2:-2].split(b"],[") if num_tokens else []
            if text[:2] + text[-2:] != b"[[]]" and (num_tokens or text != b"[]"):
                raise ValueError("it is not a list of lists")
            if len(rows) != num_tokens or any(row.count(b",") != topk - 1 for row in rows):
                raise ValueError("the lists have other lengths")
            return np.array(b",".join(rows).split(b",") if rows else [], dtype=np.int16).reshape(self.shape)
        except (OSError, ValueError, OverflowError) as error:
            raise DataProblem(
                f"line {self.line} of {self.path}: top_indices are not {num_tokens} lists of {topk} expert ids: {error}"
            ) from error


def _read(folder: Path, train_iters: int) -> dict[_RouterCall, dict[int, _Recorded]]:
    """Reads the records of decoder layers in the first `train_iters` recorded steps, grouped by part of the microbatch.
    Raises DataProblem."""
    files = _trace_files(folder)
    if not files:
        raise DataProblem(f"--moe-routing-replay-path {folder}: no file {_FILE.format('*')} there")
    num_ranks, first = 1 + files[-1][0], None
    found: dict[_RouterCall, dict[int, _Recorded]] = {}
    for rank, path in files:
        calls: Counter[tuple[int, int]] = Counter()
        for line, (fields, start, end) in enumerate(_records(path), start=1):
            first = fields["step"] if first is None else first
            step, layer = fields["step"] - first, fields["layer"] - 1
            if fields["block"] != "decoder" or not 0 <= step < train_iters:
                continue
            # Megatron-LM's traces have no microbatch; without tensor parallelism it is derived from the order
            microbatch = fields.get("microbatch", calls[step, layer] * num_ranks + rank)
            calls[step, layer] += 1
            part, parts = fields.get("part", (0, 1))
            recorded = _Recorded(path, line, start, end, (fields["num_tokens"], fields["topk"]), parts)
            other = found.setdefault((step, microbatch, layer), {}).setdefault(part, recorded)
            if other is not recorded:
                repeated = f"repeats line {other.line} of {other.path}"
                raise DataProblem(f"line {line} of {path} {repeated}; remove one of them")
    if not found:
        raise DataProblem(f"--moe-routing-replay-path {folder}: the files contain no records of decoder layers")
    return found


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yields (fields without top_indices, position and end of top_indices in the file) of every line. Raises
    DataProblem."""
    position, number = 0, 0
    try:
        with _open_regular(path, os.O_RDONLY) as lines:
            for line in lines:
                number += 1
                match = _INDICES.search(line)
                if match is None:
                    raise ValueError("it has no top_indices")
                fields = json.loads(line[: match.start(1)] + b"null" + line[match.end(1) :])
                _check_fields(fields)
                yield fields, position + match.start(1), position + match.end(1)
                position += len(line)
    except OSError as error:
        raise DataProblem(f"--moe-routing-replay-path {path.parent}: {error}; use the files of a trace") from error
    except (ValueError, RecursionError) as error:
        raise DataProblem(f"line {number} of {path} is not a record of a routing trace: {error}") from error


def _check_fields(fields: Any) -> None:
    """Raises ValueError for a missing field, or a value of another type or beyond its limits."""
    if not isinstance(fields, dict) or not isinstance(fields.get("block"), str):
        raise ValueError("it has no block")
    numbers = {name: (fields.get(name), least, limit) for name, least, limit in _LIMITS}
    if "microbatch" in fields:
        numbers["microbatch"] = fields["microbatch"], 0, 1 << 31
    if "part" in fields:
        part = fields["part"]
        if not isinstance(part, list) or len(part) != 2:
            raise ValueError(f"part is {part!r:.40}, not two numbers")
        numbers["number of parts"] = part[1], 1, _MOST_PARTS
        numbers["index of the part"] = part[0], 0, part[1] if type(part[1]) is int else 1
    for name, (value, least, limit) in numbers.items():
        if type(value) is not int or not least <= value < limit:
            raise ValueError(f"{name} is {value!r:.40}, not a whole number from {least} to {limit - 1}")


def _number_of(what: str, found: set[int], folder: Path) -> int:
    """Returns the number of recorded steps or microbatches. Raises DataProblem if they are not 0, 1, ..."""
    if max(found) + 1 != len(found):
        missing = next(number for number in range(len(found)) if number not in found)
        raise DataProblem(
            f"--moe-routing-replay-path {folder}: {what} 0 to {max(found)} are recorded without number {missing}; the "
            "files of some ranks may be missing"
        )
    return len(found)


def _whole(found: Mapping[_RouterCall, dict[int, _Recorded]], call: _RouterCall, folder: Path) -> Any:
    """Choices [T, K] of all tokens of a microbatch, joined from the parts of sequence-parallel ranks."""
    parts = found.get(call, {})
    if {recorded.parts for recorded in parts.values()} != {len(parts)}:
        step, microbatch, layer = call
        raise DataProblem(
            f"--moe-routing-replay-path {folder}: no record of layer {layer + 1} in step {step + 1} of the trace, "
            f"microbatch {microbatch}; the files of some ranks may be missing, or another model was traced"
        )
    ids = [parts[part].parse() for part in sorted(parts)]
    if len({part.shape[1] for part in ids}) > 1:
        raise DataProblem(f"--moe-routing-replay-path {folder}: ranks recorded different numbers of experts per token")
    return np.concatenate(ids)


def _check(ids_LTK: Any, num_experts: int, topk: int, num_tokens: int, folder: Path) -> None:
    """Raises DataProblem if recorded choices do not fit the run."""
    given, recorded, expected = f"--moe-routing-replay-path {folder}", ids_LTK.shape[1:], (num_tokens, topk)
    if recorded != expected:
        raise DataProblem(
            f"{given}: {recorded[0]} tokens per microbatch with top-{recorded[1]} were traced, and this run has "
            f"{num_tokens} with top-{topk}; use the --micro-batch-size, --seq-length and --moe-router-topk of the "
            "traced run"
        )
    if ids_LTK.size and ids_LTK.max() >= num_experts:
        raise DataProblem(f"{given}: expert {ids_LTK.max()} was selected, and this run has {num_experts} experts")
    if ids_LTK.size and ids_LTK.min() < -1:
        raise DataProblem(f"{given}: expert {ids_LTK.min()} was selected; ids are 0 or more, or -1 for no expert")
    sorted_LTK = np.sort(ids_LTK, axis=-1)
    repeated = (sorted_LTK[..., 1:] == sorted_LTK[..., :-1]) & (sorted_LTK[..., 1:] >= 0)
    if repeated.any():
        expert = sorted_LTK[..., 1:][repeated][0]
        raise DataProblem(f"{given}: a token selected expert {expert} twice; the trace is damaged")
