"""Writes tests/goldens/dry_run/, the numbers that a dry run tells of every recipe, and the example of docs/dry-run.md.

python tools/write_dry_runs.py
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script, from any folder

from arguments.dry_run.report import report  # noqa: E402
from arguments.dry_run.request import figures  # noqa: E402
from arguments.errors import Finished  # noqa: E402
from arguments.read import read_plan  # noqa: E402
from arguments.recipes import recipe_names  # noqa: E402

FOLDER = ROOT / "tests" / "goldens" / "dry_run"
DOCUMENT = ROOT / "docs" / "dry-run.md"
EXAMPLE = "deepseek-v3-h100-1024"
_BLOCK = "```text\n"
VOCABULARY = 4096
"""Of the tokenizer that scripts/quickstart.sh trains."""


def numbers(recipe: str) -> str:
    """The report of a recipe on its own ranks, without its lists of flags."""
    try:
        read_plan(["--recipe", recipe, "--dry-run=json"], {}, vocab_size_of=lambda config: VOCABULARY)
    except Finished as answer:
        return report(figures(json.loads(answer.text))) + "\n"
    raise AssertionError(f"the dry run of {recipe} gave no answer")


def with_example(document: str) -> str:
    """The document with today's report in the block that shows one."""
    before, _, rest = document.partition(_BLOCK)
    return f"{before}{_BLOCK}{numbers(EXAMPLE)}```{rest.partition('```')[2]}"


def main() -> None:
    """Writes one file per recipe and the document's example, and takes away files of recipes that are gone."""
    DOCUMENT.write_text(with_example(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    FOLDER.mkdir(exist_ok=True)
    names = recipe_names()
    for name in names:
        (FOLDER / f"{name}.txt").write_text(numbers(name), encoding="utf-8")
    for path in FOLDER.glob("*.txt"):
        if path.stem not in names:
            path.unlink()
    print(f"wrote {len(names)} files below {FOLDER.relative_to(ROOT)}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes nothing but --help
    main()
