"""Writes the dry-run goldens and the example of docs/dry-run.md.

tests/goldens/dry_run/ has the whole report of six recipes, tests/goldens/dry_run_totals.tsv the totals of every recipe.

python tools/write_dry_runs.py
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script, from any folder

from arguments.dry_run.report import report  # noqa: E402
from arguments.dry_run.request import figures  # noqa: E402
from arguments.errors import Finished  # noqa: E402
from arguments.read import read_plan  # noqa: E402
from arguments.recipes import recipe_names  # noqa: E402

FOLDER = ROOT / "tests" / "goldens" / "dry_run"
TOTALS = ROOT / "tests" / "goldens" / "dry_run_totals.tsv"
DOCUMENT = ROOT / "docs" / "dry-run.md"
EXAMPLE = "deepseek-v3-h100-1024"
REPORTED = (
    EXAMPLE,
    "kimi-k2-gb200-128",
    "mixtral-8x7b-h100-64",
    "q6",
    "qwen3-235b-a22b-gb200-128-stash",
    "qwen3-next-80b-a3b-h100-128",
)
"""Recipes with a whole report: FP8 with MTP and virtual stages, GB200, TP, one GPU, paged stash, missing layers."""
COLUMNS = (
    "recipe",
    "parameters",
    "active parameters",
    "GiB of the fullest rank",
    "GB per step and rank",
    "lower bound of a step in ms",
)
_BLOCK = "```text\n"
VOCABULARY = 4096
"""Vocabulary size of the tokenizer that scripts/quickstart.sh trains."""


def facts(recipe: str) -> dict[str, Any]:
    """Returns the dry run of a recipe on its own ranks."""
    try:
        read_plan(["--recipe", recipe, "--dry-run=json"], {}, vocab_size_of=lambda config: VOCABULARY)
    except Finished as answer:
        found: dict[str, Any] = json.loads(answer.text)
        return found
    raise AssertionError(f"the dry run of {recipe} gave no answer")


def numbers(recipe: str) -> str:
    """Returns the report of a recipe without its lists of flags."""
    return report(figures(facts(recipe))) + "\n"


def totals(recipe: str) -> str:
    """Returns the line of a recipe in the table of totals; a recipe with missing layers has no numbers."""
    found = facts(recipe)
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
    """Replaces the report in the document by the current one."""
    before, _, rest = document.partition(_BLOCK)
    return f"{before}{_BLOCK}{numbers(EXAMPLE)}```{rest.partition('```')[2]}"


def main() -> None:
    """Writes the reports, the table and the document's example."""
    DOCUMENT.write_text(with_example(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    for name in REPORTED:
        (FOLDER / f"{name}.txt").write_text(numbers(name), encoding="utf-8")
    lines = ["\t".join(COLUMNS), *map(totals, recipe_names())]
    TOTALS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {len(REPORTED)} reports and {len(lines) - 1} lines of {TOTALS.relative_to(ROOT)}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes nothing but --help
    main()
