# All commands of the project. `make test` needs only Python 3.11 or newer and pip.

PYTHON ?= python3
# The number of processes that run tests.
WORKERS ?= 2
# The number of slowest tests to list; 0 lists all.
DURATIONS ?= 40
VENV := .venv
DEMO_VENV := .venv-demo
BIN := $(VENV)/bin
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fitflax needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
INSTALL := -m pip install --quiet --disable-pip-version-check
# Without bytecode files, each process that tests start compiles the library again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv peers test test-all coverage soak mutants bench lint site demo clean
.DELETE_ON_ERROR:

help:
	@echo 'make test      lint, types, and all tests that are not marked slow; CI runs this'
	@echo 'make test-all  lint, types, and all tests'
	@echo 'make coverage  report the lines of fitflax that no test runs; needs Python 3.12'
	@echo 'make soak      kill runs on a disk and in a bucket 200 times each and compare each with an uninterrupted run; run a million steps and check memory; preempt a Slurm job ten times'
	@echo 'make mutants   break single lines of the core, 40 per file, and check that a test fails (hours); FILES=fitflax/steps/gradients.py for one file'
	@echo 'make lint      only lint, spelling, prose and types'
	@echo 'make bench     measure fitflax against hand-written loops, Keras and Lightning (40 minutes)'
	@echo 'make site      build the documentation site: site/index.html'
	@echo 'make demo      train a small network on handwritten digits'
	@echo 'make venv      create $(VENV)'
	@echo 'make peers     install PyTorch, TensorFlow, Grain and others into $(VENV), for the tests that need them'
	@echo 'make clean     remove environments, caches, builds, the site, and runs/'

venv: $(VENV)/.installed

# The stamp is newer than pyproject.toml if the environment is up to date.
$(VENV)/.installed: pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python $(INSTALL) --editable '.[test,examples]'
	@touch $@

# Libraries whose data and metrics fitflax accepts. Tests that need a missing one are skipped. The version of PyTorch is fixed because the latest may install
# gigabytes of GPU libraries.
TORCH ?= torch==2.13.0

peers: venv
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python $(INSTALL) '$(TORCH)'
	$(BIN)/python $(INSTALL) --editable '.[test,examples,peers]'

$(DEMO_VENV)/.installed: pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(DEMO_VENV)
	$(DEMO_VENV)/bin/python $(INSTALL) --editable '.[examples]'
	@touch $@

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/python -m tests.prose_lint
	$(BIN)/mypy --strict fitflax

# A test that fails is run once more, alone. tests/flaky.py reports it as flaky if it passes then.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -p tests.flaky --durations=$(DURATIONS)
# XLA's optimizations take a quarter of the time, and only slow tests marked `optimized` depend on them.
UNOPTIMIZED := JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST)

test: lint
	$(UNOPTIMIZED) -m 'not slow'

# Runs both parts, even if the first fails.
test-all: lint
	$(UNOPTIMIZED) -m 'not (slow and optimized)'; unoptimized=$$?; $(PYTEST) -m 'slow and optimized' $$(grep -rl mark.optimized tests --include='test_*.py') && exit $$unoptimized

# Uses sys.monitoring, because coverage's other tracer takes a lock, and tests that raise at arbitrary points never release it.
coverage: peers
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12) and "coverage needs Python 3.12 or newer: make clean, make coverage PYTHON=python3.12")'
	$(BIN)/python $(INSTALL) 'coverage>=7.10'
	rm -rf build/coverage && mkdir -p build/coverage
	COVERAGE_FILE=$(CURDIR)/build/coverage/data $(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist worksteal
	COVERAGE_FILE=$(CURDIR)/build/coverage/data $(BIN)/python -m coverage combine --quiet
	COVERAGE_FILE=$(CURDIR)/build/coverage/data $(BIN)/python -m coverage report --show-missing --skip-covered

# For kills at different times: FITFLAX_SOAK_SEED=n make soak.
soak: venv
	FITFLAX_SOAK=200 $(BIN)/python -m pytest -n $(WORKERS) tests/test_kills.py tests/storage/test_kills_in_bucket.py tests/test_soak.py tests/test_clusters.py

# tests/MUTANTS.md lists mutants that no test detects, and why.
mutants: venv
	$(BIN)/python -m tests.mutants $(FILES)

bench: peers
	$(BIN)/python $(INSTALL) --editable '.[test,examples,peers,benchmarks]'
	$(BIN)/python -m benchmarks.run --write

# Builds all pages, because pages from the last build would not repeat their warnings.
site: venv
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -c docs/site -d build/doctrees . site
	@echo 'open site/index.html'

demo: $(DEMO_VENV)/.installed
	$(DEMO_VENV)/bin/python examples/digits.py

clean:
	rm -rf $(VENV) $(DEMO_VENV) build dist runs site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
