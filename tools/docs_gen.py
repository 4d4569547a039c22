"""Generates documents and golden texts: `python tools/docs_gen.py [flags] [recipes] [dry-runs]` (default: all).

flags      docs/flags.md, tests/goldens/help.txt and the status column of docs/optimize.md
recipes    docs/recipes.md and tests/goldens/recipes_*.txt
dry-runs   tests/goldens/{dry_run/,dry_run_totals.tsv} and the example in docs/dry-run.md
planning   tables of docs/planning.md, which take a minute; not part of the default
"""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from arguments import explain, recipe_table
from arguments.dry_run.report import report
from arguments.dry_run.request import without_texts
from arguments.errors import Finished
from arguments.flags import Registry
from arguments.planning_tables import SEARCHED, estimate_accuracy_rows, searched_row, with_rows
from arguments.read import read_plan
from arguments.recipes import recipe_names
from arguments.recognised import find_recognised
from arguments.values import parse
from tools._common import ROOT, tool_parser

DOCS, GOLDENS = ROOT / "docs", ROOT / "tests" / "goldens"
DRY_RUNS = GOLDENS / "dry_run"
TOTALS = GOLDENS / "dry_run_totals.tsv"
DRY_RUN_DOC = DOCS / "dry-run.md"
PLANNING = DOCS / "planning.md"
STEP_TIMES = ROOT / "benchmarks" / "step_times.tsv"
"""Measured steps: ms, number of H200, flags, and the document of the measurement."""
_EXAMPLE = "deepseek-v3-h100-1024"
REPORTED = (
    _EXAMPLE,
    "kimi-k2-gb200-128",
    "mixtral-8x7b-h100-64",
    "q6",
    "qwen3-235b-a22b-gb200-128-stash",
    "qwen3-next-80b-a3b-h100-128",
)
"""Recipes whose dry-run reports are golden files. They cover FP8 with MTP, GB200, TP, one GPU, paged stash and
unavailable layers."""
COLUMNS = (
    "recipe",
    "parameters",
    "active parameters",
    "GiB of the fullest rank",
    "GB per step and rank",
    "lower bound of a step in ms",
)
_BLOCK = f"```console\n$ python pretrain_moe.py --recipe {_EXAMPLE} --dry-run\n"
_VOCAB_SIZE = 4096
"""Vocabulary size of the tokenizer of scripts/quickstart.sh."""
_CODE = re.compile(r"`(--[^`]+)`")
_STATUS_COLUMN = "here"
_LOWEST_FIRST = ("refused", "unsupported", "no effect", "yes")

ReportValues = dict[str, Any]
Texts = Iterable[tuple[Path, str]]


def flag_texts() -> Texts:
    registry = Registry.declared()
    guide = DOCS / "optimize.md"
    yield guide, with_status(guide.read_text(encoding="utf-8"), registry)
    yield DOCS / "flags.md", explain.flags_document(registry)
    yield GOLDENS / "help.txt", f"{explain.requested_help(['--help'], registry)}\n"


def recipe_texts() -> Texts:
    table = recipe_table.recipe_rows(Registry.declared())
    yield DOCS / "recipes.md", recipe_table.recipes_document(table)
    yield GOLDENS / "recipes_waiting.txt", recipe_table.unavailable_recipes(table)
    yield GOLDENS / "recipes_without_proxy.txt", recipe_table.without_proxy()


def dry_run_texts() -> Texts:
    """Dry-run reports of a few recipes, and one table with the totals of all recipes."""
    yield DRY_RUN_DOC, with_example(DRY_RUN_DOC.read_text(encoding="utf-8"))
    for name in REPORTED:
        yield DRY_RUNS / f"{name}.txt", dry_run(name)
    yield TOTALS, "\n".join(["\t".join(COLUMNS), *map(totals_row, recipe_names())]) + "\n"


def planning_texts() -> Texts:
    text = PLANNING.read_text(encoding="utf-8")
    yield PLANNING, with_rows(with_rows(text, estimate_accuracy_rows(STEP_TIMES)), map(searched_row, SEARCHED))


def report_values_of(recipe: str) -> ReportValues:
    """Dry-run results of a recipe as parsed JSON, for the number of ranks in the recipe."""
    try:
        read_plan(["--recipe", recipe, "--dry-run=json"], {}, vocab_size_of=lambda config: _VOCAB_SIZE)
    except Finished as answer:
        return json.loads(answer.text)
    raise AssertionError(f"the dry run of {recipe} gave no answer")


def dry_run(recipe: str) -> str:
    """Dry-run report of a recipe without its lists of flags."""
    return report(without_texts(report_values_of(recipe))) + "\n"


def totals_row(recipe: str) -> str:
    """Row of a recipe in the table of totals; only the recipe's name if its layers are not available."""
    found = report_values_of(recipe)
    if "model" not in found:
        return recipe
    values = (
        found["model"]["parameters"],
        found["model"]["active_parameters"],
        f"{found['memory']['total_gib']:.4f}",
        f"{sum(row['gb'] for row in found['communication']):.6g}",
        f"{found['time']['bound_ms']:.6g}",
    )
    return "\t".join(map(str, (recipe, *values)))


def with_example(document: str) -> str:
    """Replaces the output of the example's command in the document with the current report."""
    before, _, rest = document.partition(_BLOCK)
    return f"{before}{_BLOCK}{dry_run(_EXAMPLE)}```{rest.partition('```')[2]}"


def with_status(text: str, registry: Registry) -> str:
    """Updates the status column of the flag tables in `text`; rows without flags are unchanged."""
    return "".join(_with_status(text.splitlines(keepends=True), registry))


def _with_status(lines: Sequence[str], registry: Registry) -> Iterator[str]:
    in_table = False
    for line in lines:
        cells = line.rstrip("\n").split("|")
        if not line.startswith("|"):
            in_table = False
        elif cells[-2].strip() == _STATUS_COLUMN:
            in_table = True
        elif in_table and _CODE.search(line):
            cells[-2] = f" {lowest_status(_CODE.findall(line), registry)} "
            line = "|".join(cells) + "\n"
        yield line


def lowest_status(fragments: Sequence[str], registry: Registry) -> str:
    """Lowest support status among the flags and values in these command-line fragments."""
    found = {_status(words, registry) for fragment in fragments for words in _by_flag(shlex.split(fragment))}
    return next(each for each in _LOWEST_FIRST if each in found)


def _by_flag(words: Sequence[str]) -> list[list[str]]:
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            flags.append([])
        flags[-1].append(word)
    return flags


def _status(words: Sequence[str], registry: Registry) -> str:
    """Support status of flag `words[0]` with the values `words[1:]`, or with a non-default value if none is given."""
    found = registry.find(words[0])
    if found is None:
        known = find_recognised(words[0])
        assert known is not None, f"the guide names {words[0]}, which is not a flag"
        return "refused" if known[0].refused else "no effect"
    flag, is_on = found
    value: object = is_on if flag.is_switch else (parse(flag.type, words[1:]) if words[1:] else object())
    status = flag.declaration.status
    if status in ("unsupported", "refused") and not flag.available(value):
        return status
    return "yes"


def main(argv: Sequence[str]) -> None:
    parser = tool_parser(__doc__)
    generators = {"flags": flag_texts, "recipes": recipe_texts, "dry-runs": dry_run_texts}
    parser.add_argument(
        "kinds", nargs="*", metavar="kind", help=f"of {', '.join(generators)}, planning; default: all but planning"
    )
    kinds = parser.parse_args(argv).kinds or list(generators)
    generators["planning"] = planning_texts
    if unknown := set(kinds) - set(generators):
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(generators)}")
    for kind in kinds:
        for path, text in generators[kind]():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
