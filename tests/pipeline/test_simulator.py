"""Simulations of all legal schedules and of invalid ones."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from megatron_moe.config.pipeline import ScheduleConfig
from megatron_moe.config.pipeline_layout import StageMap
from megatron_moe.pipeline.actions import Action, Entry, Schedule, actions_of
from megatron_moe.pipeline.schedule import ScheduleError, build_schedule, check_schedule, num_delayed, num_warmup
from megatron_moe.pipeline.simulator import Durations, SimulationReport, most_in_flight, simulate


def legal(pp: int, vpp: int) -> Iterator[ScheduleConfig]:
    """Yields schedules of up to 32 microbatches in groups of pp, some also in groups of pp + 1 or all microbatches."""
    for num_microbatches in range(1, 33):
        larger = {pp + 1, num_microbatches} if vpp > 1 and num_microbatches in (3, 5, 8, 11, 18, 31) else set()
        for group_size in sorted({pp} | larger):
            config = ScheduleConfig(num_microbatches=num_microbatches, pp=pp, vpp=vpp, group_size=group_size)
            try:
                check_schedule(config)
            except ScheduleError:
                continue
            yield config


def run(config: ScheduleConfig, *, depth: int | None = 0, durations: Durations | None = None) -> SimulationReport:
    return simulate(config.stages, build_schedule(config), depth=depth, durations=durations)


@pytest.mark.parametrize("vpp", [1, 2, 3, 4])
@pytest.mark.parametrize("pp", range(1, 9))
def test_legal_schedules_are_complete_ordered_free_of_deadlock_and_bounded(pp, vpp):
    for config in legal(pp, vpp):
        schedule = build_schedule(config)
        report = simulate(config.stages, schedule, depth=0)
        assert report.problems == (), config
        microbatches = {entry.microbatch for entry in schedule[0] if isinstance(entry, Action)}
        assert microbatches == set(range(config.num_microbatches)), config
        total = config.num_microbatches * vpp
        bound = tuple(min(num_warmup(config, rank) + 1, total) for rank in range(pp))
        assert report.in_flight == bound, config
        if vpp == 1:
            assert report.in_flight == tuple(min(config.num_microbatches, pp - rank) for rank in range(pp)), config


@pytest.mark.parametrize("vpp", [1, 2, 3, 4])
@pytest.mark.parametrize("pp", range(1, 9))
def test_bubble_is_the_published_one(pp, vpp):
    """The idle time is that of pp - 1 microbatches, divided by vpp if interleaved (arXiv 2104.04473, section 2.2)."""
    for config in legal(pp, vpp):
        idle = (pp - 1) / vpp
        report = run(config, depth=None)
        assert report.bubble == pytest.approx(idle / (config.num_microbatches + idle), rel=1e-12, abs=1e-12), config


def test_bubble_of_1f1b_is_the_same_when_sends_wait_for_their_receives():
    for pp in range(1, 9):
        for num_microbatches in (1, 4, 8, 13):
            report = run(ScheduleConfig(num_microbatches=num_microbatches, pp=pp), depth=0)
            assert report.bubble == pytest.approx((pp - 1) / (num_microbatches + pp - 1), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("depth", [0, 1, 2, None])
@pytest.mark.parametrize("changes", [{"overlap": True}, {"split_backward": True}, {"forward_only": True}])
def test_options_keep_schedules_complete_at_every_depth(changes, depth):
    for pp, vpp, num_microbatches in ((1, 1, 5), (2, 1, 3), (2, 2, 6), (3, 2, 9), (4, 2, 8), (4, 3, 12), (8, 2, 16)):
        config = ScheduleConfig(num_microbatches=num_microbatches, pp=pp, vpp=vpp, **changes)
        assert run(config, depth=depth).problems == (), config


@pytest.mark.parametrize("vpp", [1, 2, 3, 4])
@pytest.mark.parametrize("pp", range(1, 9))
def test_bubble_with_delayed_weight_gradients_is_the_published_one(pp, vpp):
    """A rank idles for (pp - 1) (forward + input gradient - weight gradient), a third of the time of 1F1B, if there are
    at least pp microbatches, and holds at most as many as the first rank (arXiv 2401.10241, table 1)."""
    for plain in legal(pp, vpp):
        config = replace(plain, split_backward=True)
        report = run(config, depth=None)
        assert max(report.in_flight) == report.in_flight[0], config
        if config.num_microbatches >= pp:
            idle = (pp - 1) / vpp
            assert report.bubble == pytest.approx(idle / (3 * config.num_microbatches + idle), rel=1e-12, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"overlap": True}, {"split_backward": True}, {"overlap": True, "split_backward": True}]
)
def test_options_keep_every_legal_schedule_complete_and_bounded(changes):
    """Delayed weight gradients keep as many more microbatches in flight as they wait for; overlap has at most one
    more."""
    for pp, vpp in product(range(1, 9), range(1, 5)):
        for plain in legal(pp, vpp):
            config, total = replace(plain, **changes), plain.num_microbatches * vpp
            report = run(config)
            assert report.problems == (), config
            delayed = [num_delayed(config, rank) for rank in range(pp)]
            bound = [num_warmup(config, rank) + 1 + delayed[rank] for rank in range(pp)]
            assert report.in_flight == tuple(min(most, total) for most in bound), config
            if vpp > 1 or not config.overlap:
                more = [most + config.overlap + late for most, late in zip(run(plain).in_flight, delayed, strict=True)]
                assert report.in_flight == tuple(min(most, total) for most in more), config


def test_schedules_are_valid_for_uneven_durations():
    config = ScheduleConfig(num_microbatches=8, pp=4, vpp=2)
    for durations in (Durations(forward=5.0), Durations(backward_input=7.0, transfer=0.5), Durations(forward=0.01)):
        report = run(config, durations=durations)
        assert report.problems == ()
        assert report.bubble > 0


def test_slowest_stage_determines_the_time():
    """The second of two ranks takes three times as long, so it is busy from its first forward to its last backward."""
    config = ScheduleConfig(num_microbatches=4, pp=2)
    report = run(config, depth=None, durations=Durations(stage_costs=(1.0, 3.0)))
    busy = [sum(span.end - span.start for span in spans) for spans in report.spans]
    assert busy == pytest.approx([6.0, 18.0])
    assert report.time == pytest.approx(0.5 + 18.0 + 1.0)


def test_overlap_holds_one_more_microbatch_than_the_plain_schedule():
    plain = run(ScheduleConfig(num_microbatches=8, pp=2, vpp=2)).in_flight
    assert run(ScheduleConfig(num_microbatches=8, pp=2, vpp=2, overlap=True)).in_flight == tuple(n + 1 for n in plain)


def test_timeline_of_two_ranks():
    """Start times if a forward takes 1 and a backward 2.

    Rank 0 ends its warm-up at 1, and rank 1 its first backward at 4; each further microbatch takes 3.
    """
    report = run(ScheduleConfig(num_microbatches=2, pp=2))
    starts = [[(str(span.entry), span.start) for span in spans] for spans in report.spans]
    assert starts == [
        [("F0.0", 0.0), ("F1.0", 1.0), ("B0.0", 4.0), ("B1.0", 7.0)],
        [("F0.0", 1.0), ("B0.0", 2.0), ("F1.0", 4.0), ("B1.0", 5.0)],
    ]
    assert report.time == 9.0


def two_ranks(first: str, second: str) -> Schedule:
    """Builds a schedule of one chunk from the actions of both ranks in short form, such as "F0 sf0 rb0 B0"."""
    kinds = {
        "F": "forward",
        "B": "backward",
        "sf": "send_forward",
        "rf": "receive_forward",
        "sb": "send_backward",
        "rb": "receive_backward",
    }

    def entries(rank: int, words: str) -> Iterator[Entry]:
        for word in words.split():
            kind = kinds[word[:-1]]
            yield Action(kind, int(word[-1]), peer=1 - rank if "_" in kind else None)

    return tuple(entries(0, first)), tuple(entries(1, second))


GOOD = ("F0 sf0 F1 sf1 rb0 B0 rb1 B1", "rf0 F0 B0 sb0 rf1 F1 B1 sb1")


def test_explicit_schedule_is_valid():
    assert simulate(StageMap(2), two_ranks(*GOOD)).problems == ()


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        # Each rank waits for a tensor that the other rank sends only later.
        ("F0 sf0 rb0 B0 F1 sf1 rb1 B1", "rf0 F0 rf1 F1 B0 sb0 B1 sb1", "deadlock: rank 0 waits in rb0.0<1 for rank 1"),
        # One rank receives in a different order than the other sends.
        ("F0 sf0 F1 sf1 rb0 B0 rb1 B1", "rf1 F1 B1 sb1 rf0 F0 B0 sb0", "at the other end"),
        (GOOD[0].replace("rb0 B0", "B0 rb0"), GOOD[1], "computes B0.0 without the backward of microbatch 0"),
        (GOOD[0], GOOD[1].replace("F0 B0", "B0 F0"), "computes B0.0 without the forward of microbatch 0"),
        (GOOD[0].replace("F0 sf0", "sf0 F0"), GOOD[1], "sends sf0.0>1 before it has computed it"),
        (GOOD[0], GOOD[1].replace(" sb1", ""), "deadlock: rank 0 waits in rb1.0<1 for rank 1, which has ended"),
        (GOOD[0] + " B1", GOOD[1], "rank 0 runs backward_input of microbatch 1, chunk 0, 2 times"),
        (GOOD[0].replace("F0 sf0 ", ""), GOOD[1].replace("rf0 F0", ""), "forward of microbatch 0, chunk 0, 0 times"),
    ],
)
def test_invalid_schedule_is_reported(first, second, problem):
    report = simulate(StageMap(2), two_ranks(first, second))
    assert any(problem in found for found in report.problems), report.problems


def test_deadlock_report_lists_the_cycle_of_ranks():
    """On a ring of three ranks, each rank sends before it receives, and a send blocks until it is received."""
    ring = tuple(
        (
            Action("forward", 0),
            Action("send_forward", 0, peer=(rank + 1) % 3),
            Action("forward", 1),
            Action("receive_forward", 0, 1, peer=(rank - 1) % 3),
        )
        for rank in range(3)
    )
    report = simulate(StageMap(3, 2), ring, depth=0)
    cycle = "deadlock: rank 0 waits in sf0.0>1 for rank 1 waits in sf0.0>2 for rank 2 waits in sf0.0>0 for rank 0"
    assert cycle in report.problems
    assert not any("deadlock" in problem for problem in simulate(StageMap(3, 2), ring, depth=1).problems)


def test_every_swap_of_dependent_computations_is_reported():
    """Swaps two consecutive computations of one microbatch in the schedule of rank 0."""
    config = ScheduleConfig(num_microbatches=4, pp=2, vpp=2)
    good = build_schedule(config)
    found = 0
    for rank, entries in enumerate(good):
        for at in range(len(entries) - 1):
            one, two = entries[at], entries[at + 1]
            if (actions_of(one)[0].microbatch, actions_of(one)[0].chunk) != (
                actions_of(two)[0].microbatch,
                actions_of(two)[0].chunk,
            ):
                continue
            swapped = list(good)
            swapped[rank] = (*entries[:at], two, one, *entries[at + 2 :])
            assert simulate(config.stages, tuple(swapped)).problems, f"{one} and {two} of rank {rank}"
            found += 1
    assert found > 10


def test_message_that_is_never_received_is_reported():
    first, second = two_ranks("F0 sf0 F1 sf1", "rf0 F0")
    assert "sf1.0>1 of rank 0 is not received" in simulate(StageMap(2), (first, second), depth=None).problems


def test_most_in_flight_counts_until_the_weight_gradients_are_done():
    kinds = ("forward", "backward_input", "forward", "backward_weight")
    assert most_in_flight([Action(kind, 0) for kind in kinds]) == 2
    assert most_in_flight([]) == 0
