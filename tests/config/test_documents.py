"""Tables and pictures in docs/folding.md agree with the code."""

import re
from pathlib import Path

import pytest

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.grid import all_groups, attention_grid, expert_grid

DOCS = Path(__file__).parent.parent.parent / "docs"
FOLDING = (DOCS / "folding.md").read_text(encoding="utf-8")
SIXTEEN = ParallelConfig(world_size=16, tp=2, cp=2, pp=2, ep=4, etp=1)


def picture_row(name: str) -> list[int]:
    (line,) = re.findall(rf"^{name} +│(.*)│$", FOLDING, re.MULTILINE)
    return [int(number) for number in line.replace("│", " ").split()]


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp", "etp", "ep", "edp"])
def test_the_picture_of_the_folds_shows_the_grids(axis):
    grid = expert_grid(SIXTEEN) if axis.startswith("e") else attention_grid(SIXTEEN)
    of_grid = {"etp": "tp", "edp": "dp"}.get(axis, axis)
    assert picture_row("rank") == list(range(16))
    assert picture_row(axis) == [grid.coordinates(rank)[of_grid] for rank in range(16)]


@pytest.mark.parametrize("name", ["tp", "cp", "dp", "dp_cp", "ep", "edp"])
def test_the_groups_of_the_picture_are_those_of_the_grids(name):
    (line,) = re.findall(rf"^{name} +(\[.*\])", FOLDING, re.MULTILINE)
    written = [tuple(map(int, group.split())) for group in re.findall(r"\[([\d ]+)\]", line)]
    assert written == [group for group in all_groups(SIXTEEN)[name] if max(group) < 8]


def test_the_folds_of_the_table_are_legal():
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|", FOLDING, re.MULTILINE)
    assert len(rows) == 4
    for world, *grids in rows:
        size = {name.lower(): int(number) for grid in grids for name, number in re.findall(r"(\w+) (\d+)", grid)}
        dp, edp = size.pop("dp"), size.pop("edp")
        config = ParallelConfig(world_size=int(world), **size)
        assert dict(attention_grid(config).axes)["dp"] == dp
        assert dict(expert_grid(config).axes)["dp"] == edp
