"""Writes the table of recipes that start to benchmarks/: `python -m tests.recipes`, which `make recipes` runs.

python -m tests.recipes                  dry runs of all recipes, published layouts and models, proxies of all recipes
python -m tests.recipes --no-proxies     dry runs only, on standard output
"""

import sys

from tests.helpers.reports import store
from tests.recipes.published import STARTS, dry_run, models, published, shipped, table

if __name__ == "__main__":
    cases = [*shipped(), *published(), *models()]
    if sys.argv[1:] == ["--no-proxies"]:
        print(table(cases))
    else:
        print(store("recipes", table(cases, [case.name for case in shipped() if dry_run(case) == STARTS])))
