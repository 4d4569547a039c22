"""Routing traces: files with the expert choices of every router call, and their replay in another run.

Every rank writes `router_trace_rank{R}.jsonl` in Megatron-LM's format, one JSON object per router call: step (the
iteration, from 1), stage ("pre_dispatch"), block ("decoder" or "mtp"), layer (from 1), mtp_idx (only in "mtp"), rank,
num_tokens, topk, and top_indices [T][K] (-1: no expert). Two fields are our own: microbatch (its index in the global
batch), and part: [index, number] of the rank's share of a microbatch's tokens under sequence and context parallelism.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_moe.config.exit_codes import DataProblem, EnvironmentProblem
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.streams import Event, make_host_copies

_INDICES = re.compile(rb'"top_indices":\s*(\[[-\d\s,\[\]]*\])')
_FILE = "router_trace_rank{}.jsonl"


class _TracedStep(NamedTuple):
    calls: Sequence[tuple[int, torch.Size]]
    """(layer, shape of the choices) of every router call."""
    ids: Tensor
    """int16, flat, in host memory: the choices of all calls."""
    copied: Event


class RoutingTrace:
    """Writes the expert choices of training steps to this rank's file, without synchronising with the device.

    `add` collects the choices of a step on the device, `end_step` starts one copy to host memory, and `write`, called
    once the results of the step are known, appends them to the file. At most three steps are held at a time.
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
        """Creates the file, or empties an earlier one. Raises EnvironmentProblem if it cannot be written.

        Args:
            num_layers: decoder layers of the model; routers of later layers belong to multi-token prediction.
            mtp_calls: calls of a multi-token prediction router per microbatch.
            last_iteration: last iteration to trace; None: all are traced.
        """
        self.path = folder / _FILE.format(context.rank)
        self._context, self._num_layers, self._mtp_calls = context, num_layers, mtp_calls
        self._last_iteration = last_iteration
        self._copies = make_host_copies(context.device)
        self._current: list[tuple[int, Tensor]] | None = None
        """(layer, int16 choices) of the calls of the step in progress; None: it is not traced."""
        self._steps: dict[int, _TracedStep] = {}
        self._cells = _cells(num_experts)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "wb")
        except OSError as error:
            raise EnvironmentProblem(
                f"--moe-routing-trace-path {folder}: {error}; use a folder that can be written"
            ) from error

    def begin_step(self, iteration: int) -> None:
        """Starts to collect the choices of a step."""
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

    def drop(self, iteration: int) -> None:
        """Discards all steps from an iteration on, which are repeated."""
        self._steps = {number: step for number, step in self._steps.items() if number < iteration}

    def write(self, iteration: int) -> str | None:
        """Appends the choices of a step whose results the host has read. If that fails, tracing ends, and a line for
        the log is returned."""
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

    def _record(self, iteration: int, layer: int, number: int, ids_TK: Any) -> bytes:
        """One line of the file. `number`: number of earlier calls of this router in the step."""
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


def _cells(num_experts: int) -> Any:
    """uint8 [E + 1, width]: "id," of the ids -1, 0, ..., E - 1, padded to equal width."""
    width = max(2, len(str(num_experts - 1))) + 1
    text = "".join(f"{expert},".rjust(width) for expert in range(-1, num_experts))
    return np.frombuffer(text.encode(), np.uint8).reshape(num_experts + 1, width)


def _encode(ids_TK: Any, cells: Any) -> bytes:
    """JSON array [T][K], a hundred times as fast as the json module."""
    num_tokens, topk = ids_TK.shape
    lines = np.empty((num_tokens, topk * cells.shape[1] + 2), np.uint8)
    lines[:, 0] = ord("[")
    lines[:, 1:-1] = cells[ids_TK.astype(np.int64) + 1].reshape(num_tokens, topk * cells.shape[1])
    lines[:, -2], lines[:, -1] = ord("]"), ord(",")
    return b"[" + lines.tobytes()[:-1] + b"]"


class RoutingReplay:
    """Expert choices of a routing trace, for the routers and microbatches of one rank.

    A step takes the choices of the recorded step with its number. A run with more steps or microbatches than the trace
    starts again with the first ones. Layers of multi-token prediction are not replayed.
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
        self._num_steps = 1 + max(step for step, *_ in found)
        self._num_microbatches = 1 + max(microbatch for _, microbatch, *_ in found)
        wanted = {(index * dp.size + dp.rank) % self._num_microbatches for index in range(num_microbatches)}
        self._choices: dict[tuple[int, int], Tensor] = {}
        """(step, microbatch), each counted from 0 -> int16 [layers, T, K]."""
        for step in range(self._num_steps):
            for microbatch in wanted:
                parts = [_whole(found, (step, microbatch, layer), folder) for layer in self._layers]
                whole_LTK = np.stack(parts)
                _check(whole_LTK, num_experts, topk, num_tokens, folder)
                index, number = self._parts
                share = num_tokens // number
                mine_LTK = torch.from_numpy(whole_LTK[:, index * share : (index + 1) * share].copy())
                self._choices[step, microbatch] = mine_LTK.pin_memory() if self._device.type == "cuda" else mine_LTK

    def choices(self, iteration: int, microbatch: int) -> Mapping[int, Tensor]:
        """Layer -> int64 expert ids [T, K] on the device. `microbatch`: index in the global batch."""
        key = (iteration - 1) % self._num_steps, microbatch % self._num_microbatches
        ids_LTK = self._choices[key].to(self._device, non_blocking=True).long()
        return dict(zip(self._layers, ids_LTK.unbind(), strict=True))


_Place = tuple[int, int, int, int, int]
"""(step, microbatch, layer, part, number of parts), each from 0."""


class _Recorded(NamedTuple):
    """Position of a record's top_indices in a file, so that a rank parses only those of its microbatches."""

    path: Path
    start: int
    end: int
    shape: tuple[int, int]

    def parse(self) -> Any:
        """int16 [T, K]."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            text = file.read(self.end - self.start).translate(None, b"[] \t")
        return np.array(text.split(b",") if text else [], dtype=np.int16).reshape(self.shape)


def _read(folder: Path, train_iters: int) -> dict[_Place, _Recorded]:
    """Records of decoder layers in the first `train_iters` recorded steps. Raises DataProblem."""
    paths = sorted(folder.glob(_FILE.format("*")))
    if not paths:
        raise DataProblem(f"--moe-routing-replay-path {folder}: no file {_FILE.format('*')} there")
    found: dict[_Place, _Recorded] = {}
    first: int | None = None
    for rank, path in enumerate(paths):
        calls: Counter[tuple[int, int]] = Counter()
        for fields, start, end in _records(path):
            first = fields["step"] if first is None else first
            step, layer = fields["step"] - first, fields["layer"] - 1
            if fields["block"] != "decoder" or not 0 <= step < train_iters:
                continue
            # Megatron-LM's traces have no microbatch; without tensor parallelism it follows from the order
            microbatch = fields.get("microbatch", calls[step, layer] * len(paths) + rank)
            calls[step, layer] += 1
            part, number = fields.get("part", (0, 1))
            shape = fields["num_tokens"], fields["topk"]
            found[step, microbatch, layer, part, number] = _Recorded(path, start, end, shape)
    if not found:
        raise DataProblem(f"--moe-routing-replay-path {folder}: the files record no decoder layer")
    return found


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    """(fields without top_indices, position and end of top_indices in the file) of every line. Raises DataProblem."""
    position = 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            match = _INDICES.search(line)
            try:
                if match is None:
                    raise ValueError("it has no top_indices")
                fields = json.loads(line[: match.start(1)] + b"null" + line[match.end(1) :])
            except ValueError as error:
                raise DataProblem(f"line {number} of {path} is not a record of a routing trace: {error}") from error
            yield fields, position + match.start(1), position + match.end(1)
            position += len(line)


def _whole(found: Mapping[_Place, _Recorded], call: tuple[int, int, int], folder: Path) -> Any:
    """Choices [T, K] of all tokens of a microbatch, joined from the parts of sequence-parallel ranks."""
    number = next(iter(found))[4]
    parts = [found.get((*call, part, number)) for part in range(number)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        step, microbatch, layer = call
        raise DataProblem(
            f"--moe-routing-replay-path {folder}: no record of layer {layer + 1} in step {step + 1} of the trace, "
            f"microbatch {microbatch}; the files of some ranks may be missing, or another model was traced"
        )
    return np.concatenate([part.parse() for part in known])


def _check(ids_LTK: Any, num_experts: int, topk: int, num_tokens: int, folder: Path) -> None:
    """Raises DataProblem if recorded choices do not fit the run."""
    recorded, expected = ids_LTK.shape[1:], (num_tokens, topk)
    if recorded != expected:
        raise DataProblem(
            f"--moe-routing-replay-path {folder}: {recorded[0]} tokens per microbatch with top-{recorded[1]} were "
            f"traced, and this run has {num_tokens} with top-{topk}; use the --micro-batch-size, --seq-length and "
            "--moe-router-topk of the traced run"
        )
    if ids_LTK.size and ids_LTK.max() >= num_experts:
        raise DataProblem(
            f"--moe-routing-replay-path {folder}: expert {ids_LTK.max()} was selected, and this run has {num_experts} "
            "experts"
        )
