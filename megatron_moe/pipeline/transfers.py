"""Inserts sends and receives between the computations of a schedule."""

from collections.abc import Iterator, Sequence

from megatron_moe.pipeline.actions import Action, Entry, OverlappedPair, Schedule, parts
from megatron_moe.pipeline.layout import StageMap

Task = tuple[str, int, int]
"""("forward" | "backward", microbatch, stage)."""


def with_transfers(stages: StageMap, ranks: Sequence[Sequence[Entry]]) -> Schedule:
    """Inserts sends and receives into the computations of all ranks.

    Computations are assigned start times, with one unit per forward and two per backward. Both sides post a transfer
    when its sender's computation ends: after the computations that have started by then, before all others. All lists
    are projections of this one global order, so the earliest pending transfer can always complete and no deadlock is
    possible. Receives are posted early so that transfers overlap with computation.
    """
    events: list[tuple[tuple[int, ...], int, Entry]] = []
    for rank, entries in enumerate(_started(stages, ranks)):
        for position, (start, entry) in enumerate(entries):
            events.append(((start, 1, position), rank, entry))
            end = start + _units(entry)
            for number, action in enumerate(parts(entry)):
                for sent, peer, received in _transfer(stages, rank, action):
                    order = (end, 0, rank, number)
                    events += [((*order, 0), rank, sent), ((*order, 1), peer, received)]
    lists: list[list[Entry]] = [[] for _ in ranks]
    for _, rank, entry in sorted(events, key=lambda event: event[0]):
        lists[rank].append(entry)
    return tuple(tuple(entries) for entries in lists)


def _transfer(stages: StageMap, rank: int, action: Action) -> Iterator[tuple[Action, int, Action]]:
    """(send, peer rank, receive) of an action's output, if the stage that consumes it is on another rank."""
    forward = action.kind == "forward"
    if action.kind == "backward_weight":
        return
    stage = stages.stage(rank, action.chunk) + (1 if forward else -1)
    if not 0 <= stage < stages.num_stages:
        return
    peer, chunk = stages.place(stage)
    if peer == rank:
        return
    sent = Action("send_forward" if forward else "send_backward", action.microbatch, action.chunk, peer)
    received = Action("receive_forward" if forward else "receive_backward", action.microbatch, chunk, rank)
    yield sent, peer, received


def needs(stages: StageMap, rank: int, action: Action) -> tuple[Task, ...]:
    """Tasks, on any rank, that an action depends on."""
    stage, microbatch = stages.stage(rank, action.chunk), action.microbatch
    if action.kind == "forward":
        return (("forward", microbatch, stage - 1),) if stage else ()
    if action.kind == "backward_weight":
        return (("backward", microbatch, stage),)
    own: Task = ("forward", microbatch, stage)
    last = stage == stages.num_stages - 1
    return (own,) if last else (own, ("backward", microbatch, stage + 1))


def gives(stages: StageMap, rank: int, action: Action) -> tuple[Task, ...]:
    """The task that an action completes, if any. A backward completes with its input gradient."""
    if action.kind == "backward_weight":
        return ()
    direction = "forward" if action.kind == "forward" else "backward"
    return ((direction, action.microbatch, stages.stage(rank, action.chunk)),)


def _units(entry: Entry) -> int:
    """Relative duration: a backward has two matrix products for each of the forward."""
    if isinstance(entry, OverlappedPair):
        return _units(entry.forward) + _units(entry.backward)
    return 2 if entry.kind == "backward" else 1


def _started(stages: StageMap, ranks: Sequence[Sequence[Entry]]) -> list[list[tuple[int, Entry]]]:
    """(start, entry) per rank; a computation starts when its rank is idle and its inputs exist."""
    finished: dict[Task, int] = {}
    started: list[list[tuple[int, Entry]]] = [[] for _ in ranks]
    free, moved = [0] * len(ranks), True
    while moved:
        moved = False
        for rank, entries in enumerate(ranks):
            while len(started[rank]) < len(entries):
                entry = entries[len(started[rank])]
                inputs = [task for action in parts(entry) for task in needs(stages, rank, action)]
                if any(task not in finished for task in inputs):
                    break
                start = max([free[rank], *(finished[task] for task in inputs)])
                free[rank] = start + _units(entry)
                started[rank].append((start, entry))
                finished |= {task: free[rank] for action in parts(entry) for task in gives(stages, rank, action)}
                moved = True
    for rank, entries in enumerate(ranks):
        if len(started[rank]) < len(entries):
            raise AssertionError(f"the inputs of {entries[len(started[rank])]} on rank {rank} are never computed")
    return started
