# Penstock's commands. Each makes, or reuses, an environment of its own in .venv; nothing else is needed than Python and make.
#
#   ARGS    passed on:                         make test ARGS="tests/draw -k svg"
#   NAME    entry of a catalogue to check:     make check NAME=zb-h1
#   ROUNDS  times to repeat the property tests:  make fuzz ROUNDS=10
#   PYTHON  which Python makes .venv:          make test PYTHON=python3.12
#   VENV    another place than .venv:          make test VENV=build/venv

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
ROUNDS ?= 1
BIN := $(VENV)/bin

# The environment holds absolute paths, so that of a copied or moved folder is not reused: the stamp's name has the path in it.
STAMP := $(VENV)/installed$(subst $() ,_,$(subst /,_,$(CURDIR)))

.DEFAULT_GOAL := help
.PHONY: help venv train test fuzz check lint bench docs package clean

help: ## this list
	@echo "usage: make TARGET [ARGS=\"...\"]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s%s\n", $$1, $$2 }' Makefile

train: $(STAMP) ## the main job: plan, train and report on handwritten digits; ARGS="--epochs 1" changes a setting
	$(BIN)/penstock train examples/digits.yaml $(ARGS)

# Two processes, whatever the machine: the tests start ranks of their own. One torch thread in each, or they fight for the cores.
# Programs that the tests start read compiled files, also where the environment says not to write any.
test: $(STAMP) ## every test, documentation and examples included; ARGS="tests/draw -k svg" takes some
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# The number of examples is written at each test; a further round draws as many again.
fuzz: $(STAMP) ## every property test with new random examples; ROUNDS=10 draws ten times as many
	@set -e; for round in $$(seq $(ROUNDS)); do \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m hypothesis --hypothesis-profile=random -n 2 --dist worksteal $(ARGS); \
	done

check: $(STAMP) ## what one schedule, planner, partitioner, weight rule, model or option must pass; NAME=zb-h1
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.check_entry $(NAME)

lint: $(STAMP) ## style, format, types, docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/interrogate src || $(BIN)/interrogate -vv --omit-covered-files src
	@$(BIN)/interrogate -w '^test_' tests || $(BIN)/interrogate -w '^test_' -vv --omit-covered-files tests

bench: $(STAMP) ## run every benchmark again, but that of GPUs (benchmarks/gpu)
	@set -e; found=; for run in $(filter-out benchmarks/gpu/run.py,$(wildcard benchmarks/*/run.py)); do \
	  if [ -e "$$run" ]; then found=1; echo "== $$run"; $(BIN)/python "$$run" $(ARGS); fi; \
	done; \
	if [ -z "$$found" ]; then echo "there are no benchmarks yet: they will stand in benchmarks/<question>/run.py"; fi

docs: $(STAMP) ## the documentation as a site, in build/site; open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site
	@echo "wrote build/site/index.html: open it as a file, its search needs no server"

package: $(STAMP) ## wheel and source distribution in build/dist, checked
	rm -rf build/dist build/lib
	$(BIN)/python -m build --no-isolation --outdir build/dist > /dev/null
	$(BIN)/python -m twine check --strict build/dist/*
	$(BIN)/python .ci/check_package.py build/dist

clean: ## remove caches and .venv; runs/ stays
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

venv: $(STAMP) ## only make the environment

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "there is no $(PYTHON) here: install Python 3.11 or newer, or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; found = sys.version.split()[0]; \
	  sys.exit(0 if sys.version_info >= (3, 11) else f"Penstock needs Python 3.11 or newer, and $(PYTHON) is {found}: say make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version): a minute or a few, torch is large"
	@if [ ! -e $@ ]; then $(PYTHON) -m venv --clear $(VENV); fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
