"""tools/plot_run.py: one well-formed page that references no other files, with curves, expert loads and differences
between runs.
"""

import base64
import json
import re
import struct
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.logs.run_page import RunRecords, chart, html_page, load_picture
from tests.helpers.browser import evaluate
from tools.plot_run import main

MEASURES = """(() => {
  const box = each => each.getBoundingClientRect(), all = query => [...document.querySelectorAll(query)];
  const inside = (part, whole) => part.left >= whole.left - 1 && part.right <= whole.right + 1 &&
    part.top >= whole.top - 1 && part.bottom <= whole.bottom + 1;
  return {
    window: innerWidth,
    images: all("img").map(each => [each.complete, each.naturalWidth, each.naturalHeight, box(each).width > 0]),
    charts: all("svg").map(each => [box(each).width, box(each).height]),
    strays: all("svg polyline, svg text").filter(each => !inside(box(each), box(each.closest("svg")))).length,
    curves: all("polyline").map(each => getComputedStyle(each).stroke),
    overflow: document.documentElement.scrollWidth - innerWidth,
    requests: performance.getEntriesByType("resource").map(each => each.name).filter(each => !each.startsWith("data:")),
    rows: all("table:first-of-type tr").length,
  };
})()"""
"""JavaScript expression: measurements of the page's layout in the browser."""


def write_run(folder: Path, *, steps: int = 20, lr: str = "0.001", offset: float = 0.0, gpu: bool = True) -> Path:
    """A run of two MoE layers with four experts, of which the last dies halfway."""
    folder.mkdir()
    records = []
    for step in range(1, steps + 1):
        load = [40, 30, 20, 10 if step <= steps // 2 else 0]
        record = {"iteration": step, "lm loss": 5 - 0.1 * step + offset, "grad-norm": 1 / step, "learning-rate": 1e-3}
        record |= {"throughput": 400.0, "mem-max-allocated-bytes": 2**31} if gpu else {}
        record |= {"moe/load_entropy": 0.9, "moe/dead_experts": 0.0, "moe/max_violation": 0.6}
        record |= {f"moe/tokens_per_expert_layer_{layer}": load for layer in (1, 12)}
        records += [record, *([{"iteration": step, "lm loss validation": 4.0}] if step % 10 == 0 else [])]
    records[3]["grad-norm"] = None  # not finite
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run.yaml").write_text(f"# heading\ntraining:\n  lr: {lr}   # command line\n  run-dir: {folder}\n")
    return folder


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.removeprefix("<!doctype html>\n"))


def pixels(png: bytes) -> list[list[tuple[int, int, int]]]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    start = png.index(b"IDAT") + 4
    data = zlib.decompress(png[start : png.index(b"IEND") - 8])
    rows = [data[row * (3 * width + 1) + 1 : (row + 1) * (3 * width + 1)] for row in range(height)]
    return [[tuple(row[3 * x : 3 * x + 3]) for x in range(width)] for row in rows]


def test_a_page_of_two_runs_is_complete_and_needs_no_other_file(tmp_path, capsys):
    first, second = write_run(tmp_path / "base"), write_run(tmp_path / "a&b", lr="0.002", offset=-0.5)
    assert main([str(first), str(second)]) == ExitCode.OK
    path = first / "plots" / "run.html"
    assert str(path) in capsys.readouterr().out
    text = path.read_text()
    root = parsed(text)  # well-formed, so that every browser builds the same tree
    assert not re.search(r"https?:|<script|<link|url\(", text)
    sources = [image.get("src") for image in root.iter("img")]
    assert len(sources) == 4 and all(source.startswith("data:image/png;base64,") for source in sources)
    titles = [figure.find("figcaption").text for figure in root.iter("figure") if figure.find("svg") is not None]
    wanted = ("Training loss", "Validation", "Gradient norm", "Learning rate", "Throughput", "Peak memory", "entropy")
    for title in (*wanted, "Dead experts", "minus that of base"):
        assert any(title in found for found in titles), title
    cells = [[cell.text for cell in row] for row in root.iter("tr")]
    assert ["--lr", "0.001", "0.002"] in cells and not any("run-dir" in (row[0] or "") for row in cells)
    assert ["Peak memory (GiB)", "2", "2"] in cells and ["Training loss (nats per token)", "3", "2.5"] in cells
    assert "layer 12: 4 experts, 1 without tokens at the end" in text


def two_runs(folder: Path) -> Path:
    """Path of the page of two runs."""
    first, second = write_run(folder / "base"), write_run(folder / "a&b", offset=-0.5)
    assert main([str(first), str(second)]) == ExitCode.OK
    return first / "plots" / "run.html"


def test_every_curve_lies_within_its_chart(tmp_path: Path) -> None:
    root, curves = parsed(two_runs(tmp_path).read_text()), 0
    for figure in root.iter("svg"):
        _, _, *size = map(float, figure.get("viewBox").split())
        for curve in figure.iter("polyline"):
            points = [tuple(map(float, pair.split(","))) for pair in curve.get("points").split()]
            assert points and all(0 <= x <= size[0] and 0 <= y <= size[1] for x, y in points)
            curves += 1
    assert curves > 10


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_every_curve_and_picture_within_the_window(tmp_path: Path, width: int) -> None:
    path = two_runs(tmp_path)
    text, seen = path.read_text(), evaluate(path, width, MEASURES)
    assert seen["window"] == width and seen["images"] == [[True, 20, 4, True]] * 4
    assert len(seen["charts"]) == text.count("<svg") and all(w > 200 and h > 100 for w, h in seen["charts"])
    assert len(seen["curves"]) == text.count("<polyline") and len(set(seen["curves"])) == 2
    assert (seen["strays"], seen["requests"]) == (0, []) and seen["overflow"] <= 0 and seen["rows"] > 5


def test_the_picture_of_loads_has_a_row_per_expert_and_a_column_per_interval(tmp_path):
    run = RunRecords.read(write_run(tmp_path / "run"), "run")
    source = next(parsed(html_page([run])).iter("img")).get("src")
    rows = pixels(base64.b64decode(source.partition(",")[2]))
    assert (len(rows), len(rows[0])) == (4, 20)
    assert rows[3][-1] == (255, 255, 255) != rows[3][0], "the last expert has no tokens at the end"
    assert pixels(load_picture([[1, 1], [6, 0]])) == [[(79, 134, 198), (134, 87, 119)], [(79, 134, 198), (255,) * 3]]
    assert len(pixels(load_picture([[1, 1]] * 1000))[0]) <= 240


def test_curves_are_placed_by_their_values():
    (line,) = re.findall(r'<polyline points="([^"]+)"', chart([[(0, 0.0), (10, 1.0), (20, 0.5)]], "t"))
    (x0, y0), (x1, y1), (x2, y2) = (map(float, pair.split(",")) for pair in line.split())
    assert x0 < x1 < x2 and y1 < y2 < y0, "larger values are higher"
    assert x1 - x0 == pytest.approx(x2 - x1) and y0 - y2 == pytest.approx((y0 - y1) / 2)


def test_several_validation_sets_have_one_curve_of_their_mean(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if "lm loss validation" not in row]
    rows += [{"iteration": 9, f"lm loss validation-{name}": loss} for name, loss in (("a", 3.0), ("b", 4.0))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert RunRecords.read(folder, "run").series("lm loss validation") == [(9, 3.5)]
    assert main([str(folder)]) == ExitCode.OK
    assert "Validation loss" in (folder / "plots" / "run.html").read_text()


def test_a_run_without_gpu_reports_what_is_not_recorded(tmp_path):
    text = html_page([RunRecords.read(write_run(tmp_path / "run", gpu=False), "run")])
    assert "Peak memory (GiB): not recorded; memory is recorded on GPUs." in text
    assert "Differences" not in text


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == ExitCode.DATA
    assert "it has no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == ExitCode.DATA
    assert "has not reported a step yet" in capsys.readouterr().err


def test_the_current_folder_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "mine"))
    assert main(["."]) == ExitCode.OK
    assert "<h1>mine</h1>" in Path("plots/run.html").read_text()
