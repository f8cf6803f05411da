# All commands of the project. `make test` on a machine with Python 3.11 or newer and pip needs nothing before it.

PYTHON ?= python3
# Processes that run tests.
WORKERS ?= 2
VENV := .venv
DEMO_VENV := .venv-demo
BIN := $(VENV)/bin
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fitflax needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: help venv peers test test-all coverage soak mutants bench lint site demo clean
.DELETE_ON_ERROR:

help:
	@echo 'make test      lint, types, and all tests that are not marked slow; CI runs this'
	@echo 'make test-all  lint, types, and all tests'
	@echo 'make coverage  which lines of fitflax no test runs; needs Python 3.12'
	@echo 'make soak      kill a run 200 times and compare it with one never stopped; make a million steps and look at the memory'
	@echo 'make mutants   break single lines of the core, 40 a file, and look whether a test sees it, hours; FILES=fitflax/steps/task.py for one'
	@echo 'make lint      lint and types alone'
	@echo 'make bench     measure fitflax against hand-written loops, Keras and Lightning (40 minutes)'
	@echo 'make site      build the documentation site: site/index.html'
	@echo 'make demo      train a small network on handwritten digits'
	@echo 'make venv      only create $(VENV)'
	@echo 'make peers     install PyTorch, TensorFlow, Grain and others into $(VENV), so that tests with them run'
	@echo 'make clean     remove environments, caches and runs of the demo'

venv: $(VENV)/.installed

# The stamp is newer than pyproject.toml when the environment fits it.
$(VENV)/.installed: pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python $(INSTALL) --editable '.[test,examples]'
	@touch $@

# Libraries whose data and metrics fitflax takes; tests that need one skip where it is missing. A version of PyTorch is named because the newest may come
# with gigabytes for GPUs.
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
	$(BIN)/mypy --strict fitflax

# A test that fails is run once more, alone. tests/flaky.py reports it as flaky if it passes then.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -p tests.flaky

# XLA's optimizations take a quarter of the time, and only slow tests depend on them.
test: lint
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) -m 'not slow'

test-all: lint
	$(PYTEST)

# By sys.monitoring, because coverage's other tracer takes a lock, and tests that raise at any instant leave it taken.
coverage: peers
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12) and "coverage needs Python 3.12 or newer: make clean, make coverage PYTHON=python3.12")'
	$(BIN)/python $(INSTALL) 'coverage>=7.10'
	rm -rf build/coverage && mkdir -p build/coverage
	COVERAGE_FILE=$(CURDIR)/build/coverage/data $(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist worksteal
	COVERAGE_FILE=$(CURDIR)/build/coverage/data $(BIN)/python -m coverage combine --quiet
	COVERAGE_FILE=$(CURDIR)/build/coverage/data $(BIN)/python -m coverage report --show-missing --skip-covered

# Other kills than the last time: FITFLAX_SOAK_SEED=n make soak.
soak: venv
	FITFLAX_SOAK=200 $(BIN)/python -m pytest -n $(WORKERS) tests/test_kills.py tests/test_soak.py

# Those that no test sees, and why that is so, are in tests/MUTANTS.md.
mutants: venv
	$(BIN)/python -m tests.mutants $(FILES)

bench: peers
	$(BIN)/python $(INSTALL) --editable '.[test,examples,peers,benchmarks]'
	$(BIN)/python -m benchmarks.run --write

# Anew each time: pages that are kept from the last build do not give their warnings again.
site: venv
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -c docs/site -d build/doctrees . site
	@echo 'open site/index.html'

demo: $(DEMO_VENV)/.installed
	$(DEMO_VENV)/bin/python examples/digits.py

clean:
	rm -rf $(VENV) $(DEMO_VENV) build dist runs site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
