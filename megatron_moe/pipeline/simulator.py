"""Simulates a schedule: detects deadlocks, missing and misordered work, and measures the pipeline bubble.

The rules for transfers are strict, so a schedule that passes also runs under weaker rules. A rank posts all sends and
receives between two computations together and blocks until all complete. Messages between two ranks arrive in the order
sent, without tags. `depth` is the number of messages that can be buffered per sender and receiver. If it is 0, a send
completes when its receive is posted (rendezvous).
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from megatron_moe.config.pipeline_layout import StageMap
from megatron_moe.pipeline.actions import Action, Entry, OverlappedPair, Schedule, actions_of
from megatron_moe.pipeline.schedule import Task, completed_task, required_tasks


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Durations of one microbatch on a rank, for all chunks of the rank together, averaged over ranks; in any unit."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    """Duration of one point-to-point transfer."""
    stage_costs: tuple[float, ...] = ()
    """Relative costs of stages, in model order; empty means equal costs."""

    def duration_of(self, entry: Entry, stages: StageMap, rank: int) -> float:
        """Duration of an entry; for a pair, the sum of forward and backward."""
        times = {
            "forward": self.forward,
            "backward": self.backward_input + self.backward_weight,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }
        return sum(times[each.kind] * self._share(stages, rank, each.chunk) for each in actions_of(entry)) / stages.vpp

    def _share(self, stages: StageMap, rank: int, chunk: int) -> float:
        """Cost of the stage of a chunk, divided by the mean cost of all stages."""
        if not self.stage_costs:
            return 1.0
        return self.stage_costs[stages.stage(rank, chunk)] * stages.num_stages / sum(self.stage_costs)


@dataclass(frozen=True)
class TimelineSpan:
    """One computation of a rank, with its start and end time."""

    entry: Entry
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """Timeline, problems and memory use of a simulated schedule."""

    spans: tuple[tuple[TimelineSpan, ...], ...]
    """Computations of each rank in order."""
    problems: tuple[str, ...]
    """Error messages (deadlocks, misordered transfers, missing inputs or computations); empty for a valid schedule."""
    in_flight: tuple[int, ...]
    """Peak number of in-flight (microbatch, chunk) pairs of each rank; see `most_in_flight`."""

    @property
    def time(self) -> float:
        """Time at which the last computation of any rank ends, in the unit of `Durations`."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle fraction of the total duration, averaged over ranks."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        return 1.0 - busy / (self.time * len(self.spans)) if self.time else 0.0


def simulate(
    stages: StageMap, schedule: Schedule, *, durations: Durations | None = None, depth: int | None = 0
) -> SimulationReport:
    """Simulates a schedule. `durations`: None means those of `Durations()`. `depth`: messages that can be buffered per
    sender and receiver; None means no limit."""
    run = _Simulation(stages, schedule, durations or Durations(), depth)
    run.run()
    return SimulationReport(
        spans=tuple(tuple(spans) for spans in run.spans),
        problems=(*run.problems, *_missing(stages, schedule)),
        in_flight=tuple(most_in_flight(entries) for entries in schedule),
    )


def most_in_flight(entries: Iterable[Entry]) -> int:
    """Peak number of (microbatch, chunk) pairs whose forward has started and whose backward has not ended."""
    most = now = 0
    for entry in entries:
        kinds = [action.kind for action in actions_of(entry)]
        now += kinds.count("forward")
        most = max(most, now)
        now -= kinds.count("backward") + kinds.count("backward_weight")
    return most


@dataclass(slots=True)
class _End:
    """One endpoint of a message: the send or the receive."""

    rank: int
    action: Action
    message: Task
    """Task whose result the message contains."""
    ready: float
    """Time at which the rank posted this send or receive."""
    number: int
    """Index of the message in its channel."""
    receives: bool


@dataclass
class _Channel:
    """Posted sends and receives from one rank to another, matched in first-in-first-out order."""

    sent: list[_End] = field(default_factory=list)
    awaited: list[_End] = field(default_factory=list)


class _Simulation:
    """State of a simulation. Each rank runs until it blocks. Ranks that post or complete transfers wake their peers."""

    def __init__(self, stages: StageMap, schedule: Schedule, durations: Durations, depth: int | None) -> None:
        self._stages = stages
        self._durations = durations
        self._depth = depth
        self._steps = [_exchanges(entries) for entries in schedule]
        self._next = [0] * len(schedule)
        self._clock = [0.0] * len(schedule)
        self._open: list[list[_End]] = [[] for _ in schedule]
        """For each rank, the incomplete sends and receives that block it."""
        self._channels = {(a, b): _Channel() for a in range(len(schedule)) for b in range(len(schedule))}
        self._has: list[set[Task]] = [set() for _ in schedule]
        self.spans: list[list[TimelineSpan]] = [[] for _ in schedule]
        self.problems: list[str] = []

    def run(self) -> None:
        awake = deque(range(len(self._steps)))
        while awake:
            rank = awake.popleft()
            if self._open[rank] and not self._finish(rank, awake):
                continue
            while self._next[rank] < len(self._steps[rank]):
                step = self._steps[rank][self._next[rank]]
                self._next[rank] += 1
                if not isinstance(step, list):
                    self._compute(rank, step)
                    continue
                self._open[rank] = [self._post(rank, action) for action in step]
                awake.extend({_peer(action) for action in step})
                if not self._finish(rank, awake):
                    break
        self.problems += self._stuck() or self._left_over()

    def _compute(self, rank: int, entry: Action | OverlappedPair) -> None:
        for action in actions_of(entry):
            for direction, microbatch, stage in required_tasks(self._stages, rank, action):
                if (direction, microbatch, stage) not in self._has[rank]:
                    missing = f"the {direction} of microbatch {microbatch} through stage {stage}"
                    self.problems.append(f"rank {rank} computes {entry} without {missing}")
        start = self._clock[rank]
        self._clock[rank] += self._durations.duration_of(entry, self._stages, rank)
        self.spans[rank].append(TimelineSpan(entry, start, self._clock[rank]))
        for action in actions_of(entry):
            self._has[rank].update(completed_task(self._stages, rank, action))

    def _post(self, rank: int, action: Action) -> _End:
        peer, receives = _peer(action), action.kind.startswith("receive")
        channel = self._channels[(peer, rank) if receives else (rank, peer)]
        ends, peer_ends = (channel.awaited, channel.sent) if receives else (channel.sent, channel.awaited)
        end = _End(rank, action, self._message(rank, action, receives), self._clock[rank], len(ends), receives)
        ends.append(end)
        if not receives and end.message not in self._has[rank]:
            self.problems.append(f"rank {rank} sends {action} before it has computed it")
        if end.number < len(peer_ends) and peer_ends[end.number].message != end.message:
            self.problems.append(
                f"message {end.number} between ranks {rank} and {peer} is {action} here and "
                f"{peer_ends[end.number].action} at the other end"
            )
        return end

    def _message(self, rank: int, action: Action, receives: bool) -> Task:
        stage = self._stages.stage(rank, action.chunk)
        if action.kind.endswith("forward"):
            return "forward", action.microbatch, stage - receives
        return "backward", action.microbatch, stage + receives

    def _finish(self, rank: int, awake: deque[int]) -> bool:
        """Completes sends and receives that block a rank, where possible; returns whether all are complete."""
        waiting = []
        for end in self._open[rank]:
            time = self._done(end)
            if time is None:
                waiting.append(end)
                continue
            self._clock[rank] = max(self._clock[rank], time)
            if end.receives:
                self._has[rank].add(end.message)
                if self._depth:
                    awake.append(_peer(end.action))  # the channel has space again, so its peer may continue
        self._open[rank] = waiting
        return not waiting

    def _done(self, end: _End) -> float | None:
        """Time at which a send or receive completes; None if it cannot complete yet."""
        peer = _peer(end.action)
        channel = self._channels[(peer, end.rank) if end.receives else (end.rank, peer)]
        peer_ends = channel.sent if end.receives else channel.awaited
        if end.receives or self._depth == 0:
            if end.number >= len(peer_ends):
                return None
            other = peer_ends[end.number].ready
            if self._depth == 0:
                return max(end.ready, other) + self._durations.transfer
            return max(end.ready, other + self._durations.transfer)
        if self._depth is None or end.number < self._depth:
            return end.ready
        taken = end.number - self._depth
        return max(end.ready, channel.sent[taken].ready, peer_ends[taken].ready) if taken < len(peer_ends) else None

    def _stuck(self) -> list[str]:
        """Error message with the chain of blocked ranks that wait for each other; [] if no rank is blocked."""
        waits = {rank: ends[0].action for rank, ends in enumerate(self._open) if ends}
        if not waits:
            return []
        path = [min(waits)]
        while (after := _peer(waits[path[-1]])) in waits and after not in path:
            path.append(after)
        texts = [f"rank {rank} waits in {waits[rank]}" for rank in path[path.index(after) if after in path else 0 :]]
        return ["deadlock: " + " for ".join([*texts, f"rank {after}"]) + (", which has ended" * (after not in waits))]

    def _left_over(self) -> list[str]:
        return [
            f"{channel.sent[len(channel.awaited)].action} of rank {sender} is not received"
            for (sender, _), channel in self._channels.items()
            if len(channel.sent) > len(channel.awaited)
        ]


def _exchanges(entries: Iterable[Entry]) -> list[Entry | list[Action]]:
    """Groups consecutive sends and receives into lists, because they are posted together."""
    steps: list[Entry | list[Action]] = []
    for entry in entries:
        if isinstance(entry, OverlappedPair) or not entry.is_transfer:
            steps.append(entry)
        elif steps and isinstance(steps[-1], list):
            steps[-1].append(entry)
        else:
            steps.append([entry])
    return steps


def _peer(action: Action) -> int:
    assert action.peer is not None, f"{action} is not a transfer"
    return action.peer


def _missing(stages: StageMap, schedule: Sequence[Sequence[Entry]]) -> list[str]:
    """Error messages about forwards and backwards that a rank does not run exactly once."""
    ranks = [[action for entry in entries for action in actions_of(entry)] for entries in schedule]
    microbatches = sorted({action.microbatch for actions in ranks for action in actions})
    trains = any(action.kind.startswith("backward") for actions in ranks for action in actions)
    kinds = ("forward", "backward_input", "backward_weight")[: 3 if trains else 1]
    problems = []
    for rank, actions in enumerate(ranks):
        counts = Counter(
            (kind, action.chunk, action.microbatch)
            for action in actions
            for kind in (("backward_input", "backward_weight") if action.kind == "backward" else (action.kind,))
        )
        for kind, chunk, microbatch in product(kinds, range(stages.vpp), microbatches):
            if (times := counts[kind, chunk, microbatch]) != 1:
                problems.append(f"rank {rank} runs {kind} of microbatch {microbatch}, chunk {chunk}, {times} times")
    return problems
