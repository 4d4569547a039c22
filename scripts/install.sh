#!/usr/bin/env bash
# Installs the project into the active virtual environment with the tested set of versions.
#   bash scripts/install.sh          what a run needs
#   bash scripts/install.sh test     what the tests need as well
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:+[$1]}
# wheels only: building a package from source takes minutes, and its build tools print warnings
install=(python -m pip install --quiet --disable-pip-version-check --only-binary ":all:" --constraint constraints.txt)
# torch first: whatever else asks for it then finds the pinned one.
"${install[@]}" torch
"${install[@]}" --editable ".$extras"
