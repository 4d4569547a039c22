"""Writes docs/recipes.md and the golden lists of recipes that cannot train yet, from scripts/recipes/.

python tools/write_recipes_doc.py
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script, from any folder

from arguments.flags import Registry  # noqa: E402
from arguments.recipe_table import (  # noqa: E402
    document,
    rows,
    waiting,
    without_proxy,
)


def main() -> None:
    """Writes the three files."""
    table = rows(Registry.declared())
    for path, text in (
        (ROOT / "docs" / "recipes.md", document(table)),
        (ROOT / "tests" / "goldens" / "recipes_waiting.txt", waiting(table)),
        (ROOT / "tests" / "goldens" / "recipes_without_proxy.txt", without_proxy()),
    ):
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes nothing but --help
    main()
