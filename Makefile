# Developer commands; `make` lists them.
PYTHON ?= python
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest

.DEFAULT_GOAL := help
.PHONY: help install check test nightly recipes soak gpu1 gpu2 gpu4 goldens format clean

help:  ## this list
	@grep -hE '^[a-z0-9 ]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

install:  ## install the project and its test dependencies into the active environment
	bash scripts/install.sh test

check:  ## lint, types, house rules, flags and configs: a few minutes
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTEST) -q tests/house_rules tests/arguments tests/config

test:  ## run the CI suite
	bash scripts/test.sh

nightly:  ## run the CI suite, the slow tests and the mutants; tables go to benchmarks/
	bash scripts/install.sh test,browser
	$(PYTHON) -m tests.nightly

recipes:  ## dry runs and proxies of all recipes and published layouts; the table goes to benchmarks/
	OMP_NUM_THREADS=1 nice -n 10 $(PYTHON) -m tests.recipes

soak:  ## 20 minutes of random faults; must end bitwise equal to an undisturbed run
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.soak --store

gpu1 gpu2 gpu4:  ## tests that need one, two or four GPUs, run manually
	$(PYTEST) -q -m $@ tests

goldens:  ## regenerate golden texts after an intended change; review the diff
	$(PYTHON) tools/docs_gen.py
	UPDATE_GOLDENS=1 $(PYTEST) -q tests -k golden
	git diff --stat -- tests/goldens docs

format:  ## run ruff's formatter
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

clean:  ## remove build and tool caches; never data or runs
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
