"""tools/show_schedule.py: charts, verdicts and rejected requests."""

import re
import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.pipeline_layout import StageMap
from megatron_moe.pipeline.actions import Action
from megatron_moe.pipeline.simulator import simulate
from tools.schedule_drawing import draw_schedule, text_chart
from tools.show_schedule import main, verdict

ROOT = Path(__file__).parent.parent.parent


def shown(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main([*words.split(), "--width", "150"]) == ExitCode.OK
    return capsys.readouterr().out


def test_1f1b_is_drawn_with_its_bubble_and_verdict(capsys):
    out = shown(capsys, "--pp 4 --microbatches 6")
    assert out.splitlines() == [
        "1F1B: PP 4, 6 microbatches",
        "",
        "rank 0 0-1-2-3-............0===4-1===5-2===..3===..4===..5===",
        "rank 1 ..0-1-2-........0===3-1===4-2===5-3===..4===..5===....",
        "rank 2 ....0-1-....0===2-1===3-2===4-3===5-4===..5===........",
        "rank 3 ......0-0===1-1===2-2===3-3===4-4===5-5===............",
        "",
        "numbers are microbatches; - forward, = backward (inputs), ~ backward (weights), # overlap, . idle",
        "no deadlock with blocking sends; every microbatch once, in order",
        "bubble 33.3% of time 27; peak in flight per rank: 4 3 2 1",
    ]


def test_chunks_have_letters_and_pairs_two_numbers(capsys):
    out = shown(capsys, "--pp 2 --vpp 2 --microbatches 4 --overlap --split-backward")
    assert "rank 1 ...0a-1a-0b-1b|0b####2a|1b####3a|0a####2b|1a####3b|2b####3b=3b~2a=2a~3a=3a~......" in out
    assert "overlapped, backward split: PP 2, VPP 2 in groups of 2, 4 microbatches" in out


def test_lists_have_sends_and_receives(capsys):
    out = shown(capsys, "--pp 2 --microbatches 1 --lists")
    assert "rank 0: F0.0 sf0.0>1 rb0.0<1 B0.0" in out
    assert "rank 1: rf0.0<0 F0.0 B0.0 sb0.0>0" in out


def test_layout_defines_virtual_stages_and_is_tabulated(capsys):
    out = shown(capsys, "--pp 2 --microbatches 4 --layout Ett|tt|t|tmL")
    assert "VPP 2" in out
    assert "    3    1     1  layer 5, final norm, MTP x1, loss" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 3 --nodes 2", "--gpus has no effect without the flags of a run after --; leave it out"),
        ("--pp 2 -- --recipe m27", "--pp has no effect with the flags of a run after --; leave it out"),
    ],
)
def test_options_that_would_be_ignored_are_rejected(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert message in capsys.readouterr().err


def test_long_charts_are_cut_into_blocks():
    stages = StageMap()
    actions = tuple(Action(kind, m) for m in range(40) for kind in ("forward", "backward"))
    report = simulate(stages, (actions,))
    blocks = text_chart(report, 1, width=80).split("\n\n")
    assert len(blocks) > 3
    assert all(len(line) <= 80 for block in blocks for line in block.splitlines())
    whole = "".join(block.removeprefix("rank 0 ") for block in blocks)
    assert len(whole) == 3 * 40 * 3


def test_invalid_sizes_are_rejected(capsys):
    assert main("--pp 4 --vpp 2 --microbatches 3".split()) == ExitCode.CONFIG
    captured = capsys.readouterr()
    assert captured.err.startswith("groups of 4 microbatches") and captured.out == ""
    assert main("--pp 2 --layout Ett|tt|L".split()) == ExitCode.CONFIG
    assert "3 stages, which cannot be divided among 2" in capsys.readouterr().err
    assert main("--pp 2 --vpp 3 --layout Et|t|t|tL".split()) == ExitCode.CONFIG
    assert "--vpp 3, but --layout Et|t|t|tL has 2 per rank" in capsys.readouterr().err


RUN = (
    "--recipe quickstart --vocab-size 4096 --micro-batch-size 8 --global-batch-size 64 "
    "--pipeline-model-parallel-size 2 --num-layers 4 --moe-layer-freq ([0]*1+[1]*3)"
)


def test_stage_times_of_a_run_follow_their_flops(capsys):
    assert main(["--width", "150", "--ranks", "2", "--", *RUN.split()]) == ExitCode.OK
    even = capsys.readouterr().out
    assert "1F1B: PP 2, 8 microbatches" in even
    assert "layers 2-3 (2), final norm, loss" in even and "rank 1 has the highest cost" in even
    assert main(["--ranks", "2", "--", *RUN.split(), "--pipeline-model-parallel-layout", "auto"]) == ExitCode.OK
    balanced = capsys.readouterr().out
    assert "Et*3|tL" in balanced
    assert bubble(balanced) < bubble(even)


def test_stages_without_costs_are_shown(tmp_path, capsys):
    chart, layout = tmp_path / "chart.svg", ["--pipeline-model-parallel-layout", "E|t*4||L"]
    words = ["--ranks", "4", "--draw", str(chart), "--", *RUN.split(), "--pipeline-model-parallel-size", "4", *layout]
    assert main(words) == ExitCode.OK
    out = capsys.readouterr().out
    assert re.search(r"2    2     0  nothing +0\.0%", out) and "rank 2 " in out and chart.exists()


def test_actions_much_shorter_than_others_are_shown(capsys):
    assert main("--pp 2 --microbatches 1 --backward-time 1e-9 --width 2000000".split()) == ExitCode.OK
    assert "rank 0 0---" in capsys.readouterr().out


def bubble(out: str) -> float:
    return float(out.rpartition("bubble ")[2].partition("%")[0])


def test_overlap_of_a_run_is_shown(capsys):
    sizes = "--pipeline-model-parallel-size 1 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    more = [*sizes.split(), "--overlap-moe-expert-parallel-comm"]
    assert main(["--ranks", "2", "--", *RUN.split(), *more]) == ExitCode.OK
    assert "one stage, overlapped:" in capsys.readouterr().out


def test_run_with_unavailable_features_has_a_schedule(capsys):
    words = "--ranks 8 -- --recipe deepseek-v2-lite-h100-8 --global-batch-size 16"
    assert main(words.split()) == ExitCode.OK
    out = capsys.readouterr().out
    assert "one stage: PP 1, 2 microbatches" in out and "no deadlock" in out


def test_help_about_flags_is_printed(capsys):
    assert main(["--", "--help", "lr"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("--lr")


@pytest.mark.parametrize(
    "words", ["--forward-time 0", "--backward-time nan", "--transfer-time -1", "--queue -1", "--draw a.xyz"]
)
def test_invalid_numbers_and_files_are_rejected(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())


def test_unwritable_chart_is_reported(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert main(["--draw", str(tmp_path / "file" / "a.svg")]) == ExitCode.ENVIRONMENT
    assert "cannot be written" in capsys.readouterr().err


def test_invalid_run_is_rejected(capsys):
    assert main(["--ranks", "3", "--", *RUN.split()]) == ExitCode.CONFIG
    assert "does not divide 3 ranks" in capsys.readouterr().err


def test_deadlock_is_reported():
    lists = ((Action("receive_backward", 0, peer=1),), (Action("receive_forward", 0, peer=0),))
    report = simulate(StageMap(2), lists)
    assert verdict(report, report).startswith("WRONG:\n  deadlock: rank 0 waits in rb0.0<1 for rank 1")


def test_charts_are_written_as_png_and_svg(tmp_path, capsys):
    png, svg = tmp_path / "a.png", tmp_path / "charts" / "a.svg"
    out = shown(capsys, f"--pp 2 --vpp 2 --microbatches 4 --overlap --draw {png} --draw {svg}")
    assert f"wrote {png}" in out
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert width > 1500 and 150 < height < 600
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_chart_of_a_deadlocked_schedule(tmp_path):
    lists = ((Action("forward", 0), Action("receive_backward", 0, peer=1)), (Action("receive_forward", 0, peer=0),))
    draw_schedule(simulate(StageMap(2), lists), 1, "stopped", tmp_path / "stopped.png")
    assert (tmp_path / "stopped.png").stat().st_size > 1000


def test_it_runs_as_a_script_without_torch(tmp_path):
    """The script runs from any folder and takes half a second."""
    code = (
        "import runpy, sys; sys.argv = ['show', '--pp', '2']\n"
        "try: runpy.run_path(sys.orig_argv[-1], run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0 and 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(ROOT / "tools" / "show_schedule.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "no deadlock" in done.stdout
