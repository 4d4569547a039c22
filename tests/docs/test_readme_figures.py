"""Figures of README.md equal those of the newest stored tables that have them, and README.md cites these tables."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.checkpoint.hf_models import configs
from tests.parity.dimensions import DIMENSIONS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ONE_LINE = " ".join(README.split())
SHAPES = {
    "Qwen3-30B-A3B, 6 layers, 128 experts": "Q6, micro batch {}",
    "Moonlight-16B-A3B, 8 layers, 64 experts": "M8, micro batch {}",
    "DeepSeek-V3, 4 layers, 8 experts": "DS4, micro batch {}",
    "Nemotron-3-Nano, 9 layers: Mamba-2, attention, 128 experts": "NN9, micro batch {}, global batch 32",
    "Qwen3-Next-80B-A3B, 4 layers: gated delta nets, attention, 512 experts": "QN4, micro batch {}, global batch 32",
}
"""Shapes in the table of README.md -> case of bench_step.py."""
FP8 = ", FP8 blockwise, weight gradients too"

Row = Mapping[str, str]


def tables(text: str) -> Iterator[list[Row]]:
    """Rows of every Markdown table, by column."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        yield [dict(zip(head, row, strict=True)) for row in rows]


def flat(path: Path) -> list[Row]:
    """Rows of all tables of a file."""
    return [row for table in tables(path.read_text(encoding="utf-8")) for row in table]


def stored(case: str, column: str) -> tuple[str, Path] | None:
    """Cell of a case, in a column whose name starts with `column`, in the newest H200 table; None if there is none.

    Returns the cell and the path of the table.
    """
    for path in sorted((ROOT / "benchmarks").glob("*-h200-*.md"), reverse=True):
        for row in flat(path):
            cells = [cell for name, cell in row.items() if name.startswith(column) and cell]
            if row.get("case") == case and cells:
                assert f"benchmarks/{path.name}" in README, f"{path.name} has the newest figures of {case}"
                return cells[0], path
    return None


def cell(case: str, column: str) -> str:
    found = stored(case, column)
    assert found is not None, f"no table has {column!r} of {case!r}"
    return found[0]


def speed_up(name: str, bf16: str = "") -> str:
    """FP8 speed-up of Q6, M8, DS4 or X2: ratio of two step times in one table, or the value in an FP8 table."""
    low, plain = stored(name + FP8, "ms per step"), stored(bf16, "ms per step")
    if low is None or plain is None:
        return f"{float(cell(name, 'speed-up')):.2f}"
    assert low[1] == plain[1], f"{bf16} and {name}{FP8} were measured together"
    milliseconds = [float(text.split()[0].replace(",", "")) for text, _ in (plain, low)]
    return f"{milliseconds[0] / milliseconds[1]:.2f}"


(PERFORMANCE,) = [table for table in tables(README) if "bf16, TFLOP/s" in table[0]]


@pytest.mark.parametrize("row", PERFORMANCE, ids=lambda row: row["model shapes"].split(",")[0])
def test_the_table_of_steps_has_the_newest_stored_figures(row: Row) -> None:
    case = SHAPES[row["model shapes"]].format(row["micro batch"])
    assert row["bf16, TFLOP/s"] == cell(case, "TFLOP/s") and row["peak memory, MiB"] == cell(case, "peak MiB")
    if row["speed-up by FP8"]:
        assert row["speed-up by FP8"] == speed_up(case.partition(",")[0], case)


def test_the_headline_has_the_least_and_the_largest_figure_of_the_table() -> None:
    (least, most) = re.findall(r"reaches (\d+) to (\d+) TFLOP/s in bf16 on DeepSeek-V3, Moonlight and Qwen3", README)[0]
    speeds = [float(row["bf16, TFLOP/s"]) for row in PERFORMANCE if row["speed-up by FP8"]]
    assert (least, most) == (f"{min(speeds):.0f}", f"{max(speeds):.0f}")
    mixtral = re.findall(r"Mixtral-8x22B's \(([\d.]+)\)", README)
    assert mixtral == [speed_up("X2")]
    factors = [row["speed-up by FP8"] for row in PERFORMANCE if row["speed-up by FP8"]] + mixtral
    (bounds,) = re.findall(r"FP8 is ([\d.]+) to ([\d.]+) times as fast", README)
    assert bounds == (min(factors), max(factors))


def test_figures_of_megatron_are_those_stored_beside_ours() -> None:
    (cited,) = re.findall(r"reached (.*?) \(`(benchmarks/[^`]*)`\)", ONE_LINE)
    column = "Megatron-Core + Transformer Engine, same kind of machine"
    cells = " ".join(row.get(column, "") for row in flat(ROOT / cited[1]))
    ranges = re.findall(r"\d+–\d+", cited[0])
    assert len(ranges) == 4 and set(ranges) == set(re.findall(r"\d+–\d+", cells))


def test_the_error_of_dry_runs_is_the_largest_stored_difference() -> None:
    ((stated, name),) = re.findall(r"H200 within ([\d.]+) % \(`(benchmarks/[^`]*)`\)", ONE_LINE)
    found = [abs(float(row["difference"].split()[0])) for row in flat(ROOT / name)]
    assert found and max(found) == float(stated)


def test_counts_of_compared_dimensions_and_model_types() -> None:
    assert f"every pair of values of {len(DIMENSIONS)} dimensions" in ONE_LINE
    assert f"{len({config.model_type for config in configs().values()})} model types" in ONE_LINE


def test_the_quickstart_is_described_by_its_recipe() -> None:
    recipe = (ROOT / "scripts" / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    values = dict(re.findall(r"^([a-z-]+): (\S+)", recipe, re.MULTILINE))
    sizes = f"{values['num-experts']} experts of which {values['moe-router-topk']} are active"
    tokens = int(values["global-batch-size"]) * int(values["seq-length"])
    (row,) = [row for row in flat(ROOT / "docs" / "recipes.md") if row.get("recipe") == "`quickstart`"]
    total, active = re.findall(r"([\d.]+ M)", row["parameters (active)"])
    for text in (
        f"{values['num-layers']} layers (",
        sizes,
        f"{total} parameters, {active} active",
        f"After {values['train-iters']} iterations of {tokens:,} tokens",
    ):
        assert text in ONE_LINE, text


def test_limitations_name_the_recipes_that_do_not_start() -> None:
    waiting = (ROOT / "tests" / "goldens" / "recipes_waiting.txt").read_text(encoding="utf-8").splitlines()
    limits = README.partition("## Limitations")[2].partition("\n- FP8")[0]
    recipes = {path.stem for path in (ROOT / "scripts" / "recipes").rglob("*.yaml")}
    assert set(re.findall(r"`([^`]+)`", limits)) & recipes == {line.partition(":")[0] for line in waiting}
    newest = sorted((ROOT / "benchmarks").glob("*-recipes.md"))[-1]
    assert f"benchmarks/{newest.name}" in limits
    refused = [row for row in flat(newest) if row["dry run"] != "starts" and row["recipe"] not in recipes]
    others = [row["recipe"] for row in refused if "--cuda-graph-impl full_iteration" not in row["dry run"]]
    models = {name.removeprefix("default:").partition(",")[0] for name in others}
    assert models and {model for model in models if model not in limits} == set()
