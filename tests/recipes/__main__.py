"""Writes the table of recipes that start to benchmarks/: `python -m tests.recipes`, which `make recipes` runs.

python -m tests.recipes                  dry runs and proxies of all recipes, published layouts and models
python -m tests.recipes --resume         keeps what an interrupted run found, except for proxies that did not train
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.ranks import REPOSITORY
from tests.helpers.reports import store
from tests.recipes.answers import answers, table
from tests.recipes.published import models, published, shipped

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Dry runs and proxies of all recipes.")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--answers", type=Path, default=Path(tempfile.gettempdir()) / "recipes.jsonl", help="file")
    arguments = parser.parse_args()
    if not arguments.resume:
        arguments.answers.unlink(missing_ok=True)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, text=True).strip()
    rows = []
    for row in answers([*shipped(), *published(), *models()], arguments.answers, commit):
        rows.append(row)
        print(f"{row.seconds:5.1f} s | {row.name} | {row.dry_run} | {row.proxy}", file=sys.stderr, flush=True)
    print(store("recipes", table(rows)))
