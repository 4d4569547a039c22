"""Cases of the rules in arguments/checks, read from data_files/check_cases.yaml."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Template

import yaml

from arguments.errors import Problem
from tests.helpers.command_lines import problems_of


@dataclass(frozen=True, eq=False)
class Case:
    """Changes of the small command line that violate a rule, and similar changes that do not."""

    rule: str
    bad: str
    good: str
    without: str = ""
    """Flags that are removed in both command lines."""
    environ: dict[str, str] | None = None

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """Problems of the command line that violates the rule."""
        return problems_of(self.bad, self.without, self.environ)


def on_ranks(num_ranks: int, num_hosts: int = 1) -> dict[str, str]:
    """Environment variables that a launcher sets for rank 0."""
    local_size = num_ranks // num_hosts
    return {"RANK": "0", "WORLD_SIZE": f"{num_ranks}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": f"{local_size}"}


def _case(
    rule: str, *, bad: str, good: str, ranks: int | None = None, hosts: int = 1, **fields: str | dict[str, str]
) -> Case:
    if ranks is not None:
        fields["environ"] = on_ranks(ranks, hosts)
    bad, good = (Template(flags).substitute(ABBREVIATIONS) for flags in (bad, good))
    return Case(rule, bad=bad, good=good, **fields)


EIGHT_RANKS = on_ranks(8)
_CASES = yaml.safe_load((Path(__file__).parents[1] / "data_files" / "check_cases.yaml").read_text(encoding="utf-8"))
ABBREVIATIONS: dict[str, str] = _CASES.pop("abbreviations")
BALANCING, EP2, GRAPHS, GRAPH_MODULES, OVERLAP = (
    ABBREVIATIONS[name] for name in ("BALANCING", "EP2", "GRAPHS", "GRAPH_MODULES", "OVERLAP")
)
CASES = tuple(_case(rule, **fields) for rule, cases in _CASES.items() for fields in cases)
