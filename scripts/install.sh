#!/usr/bin/env bash
# Installs the project into the active virtual environment with the tested set of versions.
#   bash scripts/install.sh          what a run needs; with further words: bash scripts/install.sh "" WORDS
#   bash scripts/install.sh test     what the tests need as well; further words are options of `pip install`
#   bash scripts/install.sh test,browser     and Chromium (QtWebEngine) for the slow tests
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:+[$1]}
# wheels only: building a package from source takes minutes, and its build tools print warnings
export PIP_ONLY_BINARY=":all:" PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS="ignore:Editable installation"
# torch first: whatever else asks for it then finds the pinned one. setuptools, which builds the project, is a dependency
# of TensorBoard and need not be installed again into an environment of its own.
python -m pip install --quiet --constraint constraints.txt "${@:2}" "setuptools>=70.1" torch
python -m pip install --quiet --constraint constraints.txt "${@:2}" --no-build-isolation --editable ".$extras"
