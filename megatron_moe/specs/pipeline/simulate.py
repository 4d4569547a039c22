"""Runs all ranks of a schedule on paper: does it end, is everything done once and in order, how long are ranks idle?

Transfers are as strict as can be. Sends and receives between two computations are posted together, and the rank waits
until all of them are done. Messages from one rank to another arrive in the order in which they were sent; no tag tells
them apart. With `depth` 0 a send is done when its receive is posted (rendezvous); with a depth of k, k messages fit
into the queue from one rank to another. What runs here runs under any freer rule.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_moe.specs.pipeline.actions import Action, Entry, Pair, Schedule, exchanges, parts
from megatron_moe.specs.pipeline.stages import StageMap
from megatron_moe.specs.pipeline.transfers import gives, needs

Post = tuple[Action, ...]
Step = Action | Pair | Post


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Time that a whole rank (all its chunks) takes for one microbatch, in any unit."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    """Of one message."""

    def of(self, entry: Entry, vpp: int) -> float:
        """A chunk takes its share of the rank's time. The halves of a pair do not hide behind each other."""
        return sum(self._of(action) for action in parts(entry)) / vpp

    def _of(self, action: Action) -> float:
        if action.kind == "backward":
            return self.backward_input + self.backward_weight
        return {"forward": self.forward, "backward_input": self.backward_input}.get(action.kind, self.backward_weight)


@dataclass(frozen=True)
class Span:
    """One computation of a rank."""

    entry: Entry
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a simulation found."""

    spans: tuple[tuple[Span, ...], ...]
    """Per rank, in order."""
    problems: tuple[str, ...]
    """Deadlock, messages out of order, computations without their input or left out; empty for a good schedule."""
    in_flight: tuple[int, ...]
    """Per rank: most (microbatch, chunk) at a time between the start of their forward and the end of their backward."""

    @property
    def time(self) -> float:
        """From the first start to the last end."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle part of the time, over all ranks."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        return 1.0 - busy / (self.time * len(self.spans)) if self.time else 0.0


def simulate(
    stages: StageMap, schedule: Schedule, *, durations: Durations | None = None, depth: int | None = 0
) -> Report:
    """Runs a schedule. `depth` None: queues without end."""
    run = _Run(stages, schedule, durations or Durations(), depth)
    run.run()
    problems = [*run.problems, *_missing(stages, schedule)]
    return Report(
        spans=tuple(tuple(spans) for spans in run.spans),
        problems=tuple(problems),
        in_flight=tuple(most_in_flight(entries) for entries in schedule),
    )


def most_in_flight(entries: Iterable[Entry]) -> int:
    """Most (microbatch, chunk) whose forward has begun and whose backward has not ended."""
    most = now = 0
    for entry in entries:
        kinds = [action.kind for action in parts(entry)]
        now += kinds.count("forward")
        most = max(most, now)
        now -= kinds.count("backward") + kinds.count("backward_weight")
    return most


@dataclass
class _Line:
    """Messages from one rank to another. The first one sent is the first one received."""

    sent: list[tuple[Action, float]] = field(default_factory=list)
    """(what, when its sender was ready)."""
    awaited: list[tuple[Action, float]] = field(default_factory=list)

    def matched(self, index: int) -> bool:
        return index < min(len(self.sent), len(self.awaited))

    def met(self, index: int) -> float:
        """When both ends of a message were ready."""
        return max(self.sent[index][1], self.awaited[index][1])


class _Run:
    """One simulation. Ranks go on for as long as they can; an exchange that completes wakes its other ends."""

    def __init__(self, stages: StageMap, schedule: Schedule, durations: Durations, depth: int | None) -> None:
        self._stages = stages
        self._durations = durations
        self._depth = depth
        self._steps = [list(exchanges(entries)) for entries in schedule]
        self._next = [0] * len(schedule)
        self._clock = [0.0] * len(schedule)
        self._posted: list[list[tuple[Action, int]]] = [[] for _ in schedule]
        """Per rank: the exchange it waits in, each message with its number on its line."""
        self._lines = {(a, b): _Line() for a in range(len(schedule)) for b in range(len(schedule))}
        self._has: list[set[tuple[str, int, int]]] = [set() for _ in schedule]
        self.spans: list[list[Span]] = [[] for _ in schedule]
        self.problems: list[str] = []

    def run(self) -> None:
        awake = deque(range(len(self._steps)))
        while awake:
            rank = awake.popleft()
            while self._next[rank] < len(self._steps[rank]):
                step = self._steps[rank][self._next[rank]]
                if not isinstance(step, tuple):
                    self._compute(rank, step)
                elif not self._exchange(rank, step, awake):
                    break
                self._next[rank] += 1
        if not self.problems:
            self.problems += self._stuck() or self._left_over()

    def _compute(self, rank: int, entry: Action | Pair) -> None:
        for action in parts(entry):
            absent = [task for task in needs(self._stages, rank, action) if task not in self._has[rank]]
            if absent:
                self.problems.append(f"rank {rank} computes {entry} without {_task(absent[0])}")
        start = self._clock[rank]
        self._clock[rank] += self._durations.of(entry, self._stages.vpp)
        self.spans[rank].append(Span(entry, start, self._clock[rank]))
        for action in parts(entry):
            self._has[rank].update(gives(self._stages, rank, action))

    def _exchange(self, rank: int, posts: Post, awake: deque[int]) -> bool:
        """Posts an exchange, unless it is posted already; whether it is done."""
        if not self._posted[rank]:
            self._posted[rank] = [(action, self._post(rank, action)) for action in posts]
            awake.extend(_peer(action) for action in posts)
        times = [self._done(rank, action, number) for action, number in self._posted[rank]]
        if any(time is None for time in times):
            return False
        self._clock[rank] = max(time for time in times if time is not None)
        self._posted[rank] = []
        self._has[rank].update(self._message(rank, action) for action in posts if _receives(action))
        # A queue that was full has room again.
        awake.extend(_peer(action) for action in posts)
        return True

    def _post(self, rank: int, action: Action) -> int:
        if not _receives(action) and self._message(rank, action) not in self._has[rank]:
            self.problems.append(f"rank {rank} sends {action} before it has computed it")
        line = self._line(rank, action)
        ends, others = (line.awaited, line.sent) if _receives(action) else (line.sent, line.awaited)
        ends.append((action, self._clock[rank]))
        number = len(ends) - 1
        if number < len(others):
            wanted, found = self._message(rank, action), self._message(_peer(action), others[number][0])
            if wanted != found:
                self.problems.append(
                    f"message {number} between ranks {rank} and {_peer(action)}: {action} here, "
                    f"{others[number][0]} at the other end"
                )
        return number

    def _done(self, rank: int, action: Action, number: int) -> float | None:
        """When a message is done for its end on `rank`; None: not yet."""
        line, travel = self._line(rank, action), self._durations.transfer
        if _receives(action):
            if not line.matched(number):
                return None
            if self._depth == 0:
                return line.met(number) + travel
            return max(line.sent[number][1] + travel, line.awaited[number][1])
        if self._depth == 0:
            return line.met(number) + travel if line.matched(number) else None
        ready = line.sent[number][1]
        if self._depth is None or number < self._depth:
            return ready
        taken = number - self._depth
        return max(ready, line.awaited[taken][1]) if line.matched(taken) else None

    def _line(self, rank: int, action: Action) -> _Line:
        return self._lines[(_peer(action), rank) if _receives(action) else (rank, _peer(action))]

    def _message(self, rank: int, action: Action) -> tuple[str, int, int]:
        """The computation whose result travels."""
        stage = self._stages.stage(rank, action.chunk)
        if action.kind.endswith("forward"):
            return "forward", action.microbatch, stage - _receives(action)
        return "backward", action.microbatch, stage + _receives(action)

    def _stuck(self) -> list[str]:
        """The cycle of ranks that wait for each other."""
        waits = {
            rank: next(action for action, number in posted if self._done(rank, action, number) is None)
            for rank, posted in enumerate(self._posted)
            if posted
        }
        if not waits:
            return []
        path = [min(waits)]
        while (after := _peer(waits[path[-1]])) in waits and after not in path:
            path.append(after)
        if after in path:
            path = path[path.index(after) :]
        texts = [f"rank {rank} waits in {waits[rank]}" for rank in path]
        return [f"deadlock: {' for '.join([*texts, f'rank {after}'])}" + (" which has ended" * (after not in waits))]

    def _left_over(self) -> list[str]:
        return [
            f"{line.sent[len(line.awaited)][0]} of rank {sender} is never received"
            for (sender, _), line in self._lines.items()
            if len(line.sent) > len(line.awaited)
        ]


def _receives(action: Action) -> bool:
    return action.kind.startswith("receive")


def _peer(action: Action) -> int:
    assert action.peer is not None, f"{action} is no transfer"
    return action.peer


def _task(task: tuple[str, int, int]) -> str:
    direction, microbatch, stage = task
    return f"the {direction} of microbatch {microbatch} through stage {stage}"


def _missing(stages: StageMap, schedule: Sequence[Sequence[Entry]]) -> list[str]:
    """Forwards and backwards that a rank does not run exactly once."""
    done = [[action for entry in entries for action in parts(entry)] for entries in schedule]
    microbatches = {action.microbatch for actions in done for action in actions}
    trains = any(action.kind.startswith("backward") for actions in done for action in actions)
    problems = []
    for rank, actions in enumerate(done):
        counts: dict[tuple[str, int, int], int] = {}
        for action in actions:
            for kind in ("backward_input", "backward_weight") if action.kind == "backward" else (action.kind,):
                at = (kind, action.microbatch, action.chunk)
                counts[at] = counts.get(at, 0) + 1
        for kind in ("forward", "backward_input", "backward_weight")[: 3 if trains else 1]:
            for chunk in range(stages.vpp):
                for microbatch in sorted(microbatches):
                    times = counts.get((kind, microbatch, chunk), 0)
                    if times != 1:
                        problems.append(
                            f"rank {rank} runs {kind} of microbatch {microbatch}, chunk {chunk}, {times} times"
                        )
    return problems
