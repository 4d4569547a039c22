# What a developer does. `make` alone lists it.
PYTHON ?= python
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest

.DEFAULT_GOAL := help
.PHONY: help install check test nightly soak gpu1 gpu2 gpu4 goldens format clean

help:  ## this list
	@grep -hE '^[a-z0-9 ]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

install:  ## the project and what its tests need, into the active environment
	bash scripts/install.sh test

check:  ## lint, types, house rules, flags and specs: a few minutes
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTEST) -q tests/house_rules tests/arguments tests/config

test:  ## everything CI runs
	bash scripts/test.sh

nightly:  ## CI, the slow tests and the planted bugs; tables go to benchmarks/
	$(PYTHON) -m tests.nightly

soak:  ## 20 minutes of random faults; must end with the bits of an undisturbed run
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.soak --store

gpu1 gpu2 gpu4:  ## tests that need one, two or four GPUs, by hand
	$(PYTEST) -q -m $@ tests

goldens:  ## rewrite golden texts after an intended change; look at the diff before you commit it
	$(PYTHON) tools/docs_gen.py
	UPDATE_GOLDENS=1 $(PYTEST) -q tests -k golden
	git diff --stat -- tests/goldens docs

format:  ## ruff's formatter
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

clean:  ## what tools left behind; never data or runs
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
