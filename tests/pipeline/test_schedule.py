"""Schedules equal Megatron's tables; sizes that cannot be scheduled are rejected."""

import pytest

from megatron_moe.config.pipeline import ScheduleConfig
from megatron_moe.pipeline.actions import Action, OverlappedPair, actions_of
from megatron_moe.pipeline.schedule import ScheduleError, build_schedule, check_schedule, chunk_order, num_warmup


def computed(rank: int, **sizes: int | bool) -> str:
    """Returns the schedule of a rank as text, without transfers."""
    entries = build_schedule(ScheduleConfig(**sizes))[rank]
    return " ".join(str(entry) for entry in entries if isinstance(entry, OverlappedPair) or not entry.is_transfer)


@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_one_stage_runs_every_microbatch_forward_and_then_backward(num_microbatches):
    expected = []
    for microbatch in range(num_microbatches):
        expected += [f"F{microbatch}.0", f"B{microbatch}.0"]
    assert computed(0, num_microbatches=num_microbatches) == " ".join(expected)


def test_1f1b_on_four_ranks_is_the_published_table():
    """1F1B is PipeDream-Flush, shown for two stages in arXiv 2006.09503 figure 3; here with PP 4 and 5 microbatches."""
    rows = ("F0 F1 F2 F3 B0 F4 B1 B2 B3 B4", "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4", "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4")
    rows += ("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",)
    for rank, row in enumerate(rows):
        expected = " ".join(f"{word}.0" for word in row.split())
        assert computed(rank, num_microbatches=5, pp=4) == expected


def test_interleaved_order_of_chunks_is_megatrons_table():
    """Megatron's schedule table for PP 2, VPP 2, and 4 microbatches in groups of 2 has chunks 0 0 1 1 0 0 1 1."""
    order = chunk_order(ScheduleConfig(num_microbatches=4, pp=2, vpp=2, group_size=2))
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]


def test_groups_larger_than_the_pipeline_run_before_the_remainder():
    order = chunk_order(ScheduleConfig(num_microbatches=5, pp=2, vpp=2, group_size=3))
    assert order == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]


def test_interleaved_pp2_vpp2_with_four_microbatches_is_the_published_table():
    """The schedule is that of arXiv 2104.04473, figure 4, lower half, for two ranks.

    The warm-up has 2 (pp - rank - 1) + (vpp - 1) pp forwards.
    """
    assert computed(0, num_microbatches=4, pp=2, vpp=2) == (
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    )
    assert computed(1, num_microbatches=4, pp=2, vpp=2) == (
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    )


@pytest.mark.parametrize(
    ("sizes", "warmups"),
    [
        ({"num_microbatches": 1}, [0]),
        ({"num_microbatches": 8, "pp": 4}, [3, 2, 1, 0]),
        ({"num_microbatches": 2, "pp": 4}, [2, 2, 1, 0]),
        ({"num_microbatches": 8, "pp": 4, "vpp": 2}, [10, 8, 6, 4]),
        ({"num_microbatches": 12, "pp": 4, "vpp": 3, "group_size": 6}, [18, 16, 14, 12]),
        ({"num_microbatches": 8, "pp": 4, "vpp": 2, "overlap": True}, [11, 9, 7, 5]),
        ({"num_microbatches": 4, "overlap": True}, [1]),
        ({"num_microbatches": 4, "pp": 4, "vpp": 2}, [8, 8, 6, 4]),
        ({"num_microbatches": 3, "pp": 2, "forward_only": True}, [3, 3]),
    ],
)
def test_warmup_counts_are_megatrons(sizes, warmups):
    config = ScheduleConfig(**sizes)
    assert [num_warmup(config, rank) for rank in range(config.pp)] == warmups


def test_overlap_pairs_every_forward_after_the_warmup_with_the_next_backward():
    assert computed(0, num_microbatches=3, overlap=True) == "F0.0 F1.0|B0.0 F2.0|B1.0 B2.0"
    assert computed(1, num_microbatches=4, pp=2, vpp=2, overlap=True) == (
        "F0.0 F1.0 F0.1 F1.1|B0.1 F2.0|B1.1 F3.0|B0.0 F2.1|B1.0 F3.1|B2.1 B3.1 B2.0 B3.0"
    )


def test_overlap_runs_forwards_and_backwards_in_the_order_of_the_plain_schedule():
    for sizes in ({"pp": 1, "vpp": 1}, {"pp": 2, "vpp": 2}, {"pp": 4, "vpp": 3}):
        plain = build_schedule(ScheduleConfig(num_microbatches=8, **sizes))
        paired = build_schedule(ScheduleConfig(num_microbatches=8, overlap=True, **sizes))
        for kind in ("forward", "backward"):
            for before, after in zip(plain, paired, strict=True):
                order = [action for entry in before for action in actions_of(entry) if action.kind == kind]
                assert order == [action for entry in after for action in actions_of(entry) if action.kind == kind]


def test_split_backward_sends_the_input_gradient_before_the_weight_gradients():
    last = build_schedule(ScheduleConfig(num_microbatches=1, pp=2, split_backward=True))[1]
    assert [str(entry) for entry in last] == ["rf0.0<0", "F0.0", "I0.0", "sb0.0>0", "W0.0"]


def test_split_backward_delays_weight_gradients_by_the_pipeline_rank():
    assert computed(0, num_microbatches=3, pp=3, split_backward=True) == "F0.0 F1.0 F2.0 I0.0 W0.0 I1.0 W1.0 I2.0 W2.0"
    assert computed(1, num_microbatches=3, pp=3, split_backward=True) == "F0.0 F1.0 I0.0 F2.0 I1.0 W0.0 I2.0 W1.0 W2.0"
    assert computed(2, num_microbatches=3, pp=3, split_backward=True) == "F0.0 I0.0 F1.0 I1.0 F2.0 I2.0 W0.0 W1.0 W2.0"
    assert computed(1, num_microbatches=2, pp=2, vpp=2, split_backward=True) == (
        "F0.0 F1.0 F0.1 I0.1 F1.1 I1.1 W0.1 I0.0 W1.1 I1.0 W0.0 W1.0"
    )
    assert "I" not in computed(0, num_microbatches=2, split_backward=True), "one rank has no idle time to fill"


def test_forward_only_has_no_backward():
    for rank in build_schedule(ScheduleConfig(num_microbatches=4, pp=2, vpp=2, forward_only=True)):
        assert {entry.kind for entry in rank} == {"forward", "send_forward", "receive_forward"}


def test_first_stage_receives_no_activations_and_last_stage_sends_none():
    first, last = build_schedule(ScheduleConfig(num_microbatches=2, pp=2))
    assert {action.kind for action in first} == {"forward", "backward", "send_forward", "receive_backward"}
    assert {action.kind for action in last} == {"forward", "backward", "receive_forward", "send_backward"}


def test_transfers_have_the_chunk_of_their_rank():
    """A transfer from the last rank to the first continues in the next chunk."""
    first, last = build_schedule(ScheduleConfig(num_microbatches=2, pp=2, vpp=2))
    assert Action("send_forward", 0, 0, peer=0) in last
    assert Action("receive_forward", 0, 1, peer=1) in first
    assert Action("send_backward", 0, 1, peer=1) in first
    assert Action("receive_backward", 0, 0, peer=0) in last


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_microbatches": 0}, "0 microbatches"),
        ({"num_microbatches": 4, "vpp": 2}, "2 virtual stages per rank need at least 2 pipeline ranks, not 1"),
        ({"num_microbatches": 8, "pp": 4, "vpp": 2, "group_size": 3}, r"groups of 3 .* \(4 ranks\)"),
        ({"num_microbatches": 8, "pp": 4, "vpp": 2, "group_size": 9}, "groups of 9 .* the 8 microbatches"),
        ({"num_microbatches": 3, "pp": 4, "vpp": 2}, "groups of 4 .* the 3 microbatches"),
        ({"num_microbatches": 9, "pp": 4, "vpp": 2}, "9 microbatches leave 1 after groups of 4.*the 4 pipeline ranks"),
    ],
)
def test_invalid_sizes_are_rejected_with_the_numbers(sizes, message):
    with pytest.raises(ScheduleError, match=message):
        check_schedule(ScheduleConfig(**sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_microbatches": 1, "pp": 8},
        {"num_microbatches": 4, "pp": 4, "vpp": 2, "group_size": 4},
        {"num_microbatches": 9, "pp": 4, "vpp": 2, "group_size": 5},
        {"num_microbatches": 3, "pp": 4, "group_size": 7},
        {"num_microbatches": 1, "pp": 4, "vpp": 2, "forward_only": True},
        {"num_microbatches": 9, "pp": 4, "vpp": 2, "forward_only": True},
    ],
)
def test_boundary_sizes_are_scheduled(sizes):
    build_schedule(ScheduleConfig(**sizes))
