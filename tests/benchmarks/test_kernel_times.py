"""Tests of timed_run: breakdown of step time by kind of kernel."""

import sys
import time

import pytest
from matplotlib.axes import Axes

from benchmarks.harness.profile_step import draw_timeline
from benchmarks.harness.timed_run import (
    Board,
    CommunicationTime,
    KernelEvent,
    Reading,
    communication_times,
    idle_microseconds,
    kind_of,
    layer_windows,
    shares_of_kernels,
    shares_of_kinds,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "dense matrices"),
        ("_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_GroupProblemShapeIN4cute", "expert matrices"),
        ("void at::native::elementwise_kernel<128, 4, add<float>>", "elementwise"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("something nobody has seen", "other"),
    ],
)
def test_a_kernel_is_classified_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_shares_are_per_step_and_the_longest_comes_first() -> None:
    events = [KernelEvent("nvjet_a", 0, 1000), KernelEvent("adamw", 1000, 3000), KernelEvent("nvjet_b", 4000, 1000)]
    kinds = [(share.name, share.milliseconds, share.calls) for share in shares_of_kinds(events, num_steps=2)]
    assert kinds == [("optimizer", 1.5, 0.5), ("dense matrices", 1.0, 1.0), ("idle", 0.0, 0.0)]
    assert [share.name for share in shares_of_kernels(events, num_steps=1)] == ["adamw", "nvjet_a", "nvjet_b"]


def test_time_under_another_stream_is_not_idle() -> None:
    events = [KernelEvent("a", 0, 10), KernelEvent("b", 2, 3), KernelEvent("c", 15, 5), KernelEvent("d", 12, 1)]
    assert idle_microseconds(events) == 2 + 2


def test_board_readings_are_medians_until_the_command_ends() -> None:
    lines = ["[N/A], [N/A], 345", "690.10, 700.00, 1500", "650.5, 700.00, 1980", "698.00, 700.00, 1455"]
    program = f"import time; print({chr(10).join(lines)!r}, flush=True); time.sleep(600)"
    with Board([sys.executable, "-c", program]) as board:
        deadline = time.monotonic() + 120
        while board.medians() != Reading(690.1, 700.0, 1500.0):
            assert time.monotonic() < deadline, board.medians()
            time.sleep(0.01)
    with Board(["/no/such/command"]) as board:
        assert board.medians() is None


def test_communication_is_exposed_where_nothing_else_runs() -> None:
    events = [
        KernelEvent("_push_tokens", 0, 1000, stream=7),
        KernelEvent("_wait_for_arrival", 1000, 3000, stream=7),
        KernelEvent("nvjet_a", 500, 1500),
        KernelEvent("nvjet_b", 5000, 1000),
    ]
    assert communication_times(events, num_steps=2) == CommunicationTime(overlapped=0.75, exposed=1.25)


def test_a_layer_lasts_from_one_attention_to_the_next() -> None:
    forward = [KernelEvent("cudnn_sdpa_fprop", start, 5) for start in (0, 100, 230, 900)]
    backward = [KernelEvent("cudnn_sdpa_bprop", start, 5) for start in (1000, 1200)]
    assert layer_windows([*backward, *forward]) == {"forward": (100, 230), "backward": (1000, 1200)}
    assert layer_windows([KernelEvent("nvjet_a", 0, 1)]) == {}


def test_the_timeline_has_one_bar_per_kernel_and_one_lane_per_stream(tmp_path, monkeypatch) -> None:
    places = []
    monkeypatch.setattr(Axes, "broken_barh", lambda axes, bars, place, **_: places.append((bars, place[0])))
    events = [
        KernelEvent("cudnn_fprop", 0, 10),
        KernelEvent("_push_tokens", 20, 30, 9),
        KernelEvent("fprop_fmha", 60, 9),
    ]
    draw_timeline(events, tmp_path / "timeline.png")
    assert places == [([(0, 10)], -0.4), ([(20, 30)], 0.6)]
    assert (tmp_path / "timeline.png").stat().st_size > 1000
