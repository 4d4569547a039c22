"""Pipeline schedules as data, which can be printed, simulated and executed.

A schedule is a list of entries per pipeline rank. One builder covers all kinds:

- one stage: forward and backward of each microbatch;
- 1F1B (PipeDream-Flush, arXiv 2006.09503): warm-up forwards, alternating forwards and backwards, remaining backwards;
- interleaved (arXiv 2104.04473 section 2.2): 1F1B over pairs (microbatch, chunk) in Megatron's order;
- overlapped: each forward of the steady phase and the backward after it form an `OverlappedPair` (`overlap.py`);
- split backward: weight gradients are computed after input gradients, and later ranks delay them until they would be
  idle (ZB-H1, arXiv 2401.10241 section 3.1).

Sends and receives are explicit. The lists are projections of one global sequence in which each send is followed by its
receive. They therefore cannot deadlock, even with blocking sends, and messages between two ranks need no tags: they are
received in the order in which they were sent.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from megatron_moe.config.pipeline import ScheduleConfig
from megatron_moe.config.pipeline_layout import StageMap
from megatron_moe.pipeline.actions import Action, Entry, OverlappedPair, Schedule, actions_of

Task = tuple[str, int, int]
"""Computation of a microbatch: ("forward" | "backward", microbatch, stage)."""


class ScheduleError(ValueError):
    """Raised if no schedule exists for the given sizes."""


def build_schedule(config: ScheduleConfig) -> Schedule:
    """Builds the entries of every pipeline rank. Raises ScheduleError for invalid sizes."""
    check_schedule(config)
    return _with_transfers(config.stages, [computations(config, rank) for rank in range(config.pp)])


def check_schedule(config: ScheduleConfig) -> None:
    """Raises ScheduleError for invalid sizes, by the same rules as Megatron; evaluations may have fewer microbatches
    than a group."""
    pp, vpp, group, num_microbatches = config.pp, config.vpp, config.group, config.num_microbatches
    if min(num_microbatches, pp, vpp, group) < 1:
        raise ScheduleError(
            f"{num_microbatches} microbatches, {pp} pipeline ranks, {vpp} chunks per rank, groups of {group}: every "
            f"number must be at least 1"
        )
    if vpp == 1:
        return
    if pp == 1:
        raise ScheduleError(f"{vpp} virtual stages per rank need at least 2 pipeline ranks, not 1")
    if config.forward_only:
        return  # forwards depend on earlier forwards only, in groups of any size
    if not pp <= group <= num_microbatches:
        raise ScheduleError(
            f"groups of {group} microbatches must be at least as large as the pipeline ({pp} ranks) and at most the "
            f"{num_microbatches} microbatches of a step, when a rank has {vpp} virtual stages"
        )
    if 0 < num_microbatches % group < pp:
        raise ScheduleError(
            f"{num_microbatches} microbatches leave {num_microbatches % group} after groups of {group}; with {vpp} "
            f"virtual stages the rest must be 0 or at least the {pp} pipeline ranks"
        )


def num_warmup(config: ScheduleConfig, rank: int) -> int:
    """Number of forwards, over all chunks, that a rank runs before the steady phase."""
    total = config.num_microbatches * config.vpp
    if config.forward_only:
        return total
    later_ranks = config.pp - rank - 1
    if config.vpp == 1 and not config.overlap:
        return min(later_ranks, total)
    return min(2 * later_ranks + (config.vpp - 1) * config.group + config.overlap, total)


def num_delayed(config: ScheduleConfig, rank: int) -> int:
    """Number of later input gradients that a rank computes before the weight gradients of a backward.

    Rank r delays them by r backwards. It then holds at most as many microbatches as the first rank, and computes the
    remaining weight gradients while earlier ranks finish their backwards. Overlapped schedules delay nothing: their
    weight gradients hide communication of the same pair.
    """
    return rank if config.split_backward and not config.overlap else 0


def chunk_order(config: ScheduleConfig) -> list[tuple[int, int]]:
    """Returns (microbatch, chunk) of a rank's forwards in order: chunk by chunk for each group of microbatches.

    The backwards have this order with reversed chunk indices.
    """
    order = []
    for start in range(0, config.num_microbatches, config.group):
        group = range(start, min(start + config.group, config.num_microbatches))
        order += [(microbatch, chunk) for chunk in range(config.vpp) for microbatch in group]
    return order


def computations(config: ScheduleConfig, rank: int) -> list[Entry]:
    """Computations of a rank in order, without sends and receives."""
    order = chunk_order(config)
    forwards = [Action("forward", microbatch, chunk) for microbatch, chunk in order]
    if config.forward_only:
        return list(forwards)
    backwards = [Action("backward", microbatch, config.vpp - 1 - chunk) for microbatch, chunk in order]
    warmup = num_warmup(config, rank)
    steady = len(order) - warmup
    entries: list[Entry] = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        entries += [OverlappedPair(forward, backward)] if config.overlap else [forward, *_backward(backward, config)]
    for backward in backwards[steady:]:
        entries += _backward(backward, config)
    return list(_delayed(entries, num_delayed(config, rank)))


def _delayed(entries: Iterable[Entry], delay: int) -> Iterator[Entry]:
    """Moves each `backward_weight` behind the next `delay` backwards."""
    waiting: deque[Entry] = deque()
    for entry in entries:
        if isinstance(entry, Action) and entry.kind == "backward_weight":
            waiting.append(entry)
            if len(waiting) > delay:
                yield waiting.popleft()
        else:
            yield entry
    yield from waiting


def _backward(backward: Action, config: ScheduleConfig) -> list[Action]:
    # with one pipeline rank, no other rank needs the input gradient early
    if not config.split_backward or config.pp == 1:
        return [backward]
    at = (backward.microbatch, backward.chunk)
    return [Action("backward_input", *at), Action("backward_weight", *at)]


def required_tasks(stages: StageMap, rank: int, action: Action) -> tuple[Task, ...]:
    """Tasks, on this or other ranks, that must be complete before a computation starts."""
    stage, microbatch = action.chunk * stages.pp + rank, action.microbatch  # `stages.stage`, inlined for speed
    if action.kind == "forward":
        return (("forward", microbatch, stage - 1),) if stage else ()
    if action.kind == "backward_weight":
        return (("backward", microbatch, stage),)
    own: Task = ("forward", microbatch, stage)
    last = stage == stages.num_stages - 1
    return (own,) if last else (own, ("backward", microbatch, stage + 1))


def completed_task(stages: StageMap, rank: int, action: Action) -> tuple[Task, ...]:
    """Returns the task that a computation completes, as a tuple of one; () if it completes none. A backward is complete
    when its input gradient has been computed."""
    if action.kind == "backward_weight":
        return ()
    direction = "forward" if action.kind == "forward" else "backward"
    return ((direction, action.microbatch, action.chunk * stages.pp + rank),)


def _with_transfers(stages: StageMap, ranks: Sequence[Sequence[Entry]]) -> Schedule:
    """Inserts sends and receives into the computations of all ranks.

    Computations are first assigned start times, where a forward takes one unit of time and a backward two. The send and
    the receive of a transfer are placed at the time when the sender's computation ends, before computations that start
    at that time. The list of every rank follows this global order, so the earliest pending transfer can always complete
    and no deadlock is possible. Receives are posted early so that transfers overlap with computation.
    """
    events: list[tuple[tuple[int, ...], int, Entry]] = []
    for rank, entries in enumerate(_started(stages, ranks)):
        for position, (start, entry) in enumerate(entries):
            events.append(((start, 1, position), rank, entry))
            end = start + _units(entry)
            for number, action in enumerate(actions_of(entry)):
                for sent, peer, received in _transfer(stages, rank, action):
                    order = (end, 0, rank, number)
                    events += [((*order, 0), rank, sent), ((*order, 1), peer, received)]
    lists: list[list[Entry]] = [[] for _ in ranks]
    for _, rank, entry in sorted(events, key=lambda event: event[0]):
        lists[rank].append(entry)
    return tuple(tuple(entries) for entries in lists)


def _transfer(stages: StageMap, rank: int, action: Action) -> Iterator[tuple[Action, int, Action]]:
    """Yields (send, peer rank, receive) of an action's output if another rank consumes it."""
    for direction, _, stage in completed_task(stages, rank, action):
        stage += 1 if direction == "forward" else -1
        peer, chunk = stages.rank_and_chunk(stage)
        if 0 <= stage < stages.num_stages and peer != rank:
            forward = direction == "forward"
            sent = Action("send_forward" if forward else "send_backward", action.microbatch, action.chunk, peer)
            received = Action("receive_forward" if forward else "receive_backward", action.microbatch, chunk, rank)
            yield sent, peer, received


def _units(entry: Entry) -> int:
    """Duration of an entry in units of one forward. A backward takes 2, as it has two GEMMs for each forward GEMM."""
    if isinstance(entry, OverlappedPair):
        return _units(entry.forward) + _units(entry.backward)
    return 2 if entry.kind == "backward" else 1


def _started(stages: StageMap, ranks: Sequence[Sequence[Entry]]) -> list[list[tuple[int, Entry]]]:
    """Returns (start time, entry) of all entries, per rank. An entry starts when its rank is idle and its inputs
    exist."""
    finished: dict[Task, int] = {}
    started: list[list[tuple[int, Entry]]] = [[] for _ in ranks]
    free, moved = [0] * len(ranks), True
    while moved:
        moved = False
        for rank, entries in enumerate(ranks):
            for entry in entries[len(started[rank]) :]:
                inputs = [task for action in actions_of(entry) for task in required_tasks(stages, rank, action)]
                if any(task not in finished for task in inputs):
                    break
                start = max([free[rank], *(finished[task] for task in inputs)])
                free[rank] = start + _units(entry)
                started[rank].append((start, entry))
                finished |= {
                    task: free[rank] for action in actions_of(entry) for task in completed_task(stages, rank, action)
                }
                moved = True
    for rank, entries in enumerate(ranks):
        missing = entries[len(started[rank]) :]
        assert not missing, f"the inputs of {missing[0]} on rank {rank} are never computed"
    return started
