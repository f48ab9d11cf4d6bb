# The two commands, `make train` and `make test`, and every chore, one word each. Every target does its own set-up, in
# this folder and without root; .ci/run calls the same targets. See README.md for PYTHON, TORCH and TORCH_INDEX.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

export PYTHON ?= python3
export TORCH TORCH_INDEX DEV

BIN := .venv/bin
# Tests run side by side, in at most four processes; `make test ARGS="-n 0"` runs them in one.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup
# More arguments for the command of a target, as in: make train ARGS="--run-dir runs/mine --resume"
ARGS ?=

.PHONY: help setup tools train view test test-core lint lint-style lint-format lint-types lint-imports lint-generated \
	format bench docs soak gpu-check clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r target text; do \
		printf '  make %-10s %s\n' "$$target" "$$text"; done

setup: ## create .venv/ with quiesce and everything that its tests need
	@scripts/setup.sh

tools: setup ## fetch the programs of the distribution that tests start, and Grafana's schema, into .tools/
	@scripts/fetch_tools.sh
	@scripts/fetch_schema.sh

train: setup ## train a tiny policy on two CPU cores, in under three minutes
	@$(BIN)/quiesce train tiny $(ARGS)

view: setup ## draw a run's dashboards in a browser: the newest under runs/, or ARGS="runs/mine"
	@scripts/fetch_tools.sh
	@$(BIN)/quiesce view $(ARGS)

test: setup tools ## every test but the long ones and those that need a GPU
	@$(PYTEST) $(ARGS)

test-core: setup ## the tests that need no program of the distribution
	@$(PYTEST) -m "not soak and not gpu and not distribution" $(ARGS)

# Every part runs even when another found something, so that one call shows all that there is to mend.
lint: setup ## style, format, types, dependency rules, generated files
	@$(MAKE) --keep-going lint-style lint-format lint-types lint-imports lint-generated

lint-style:
	@$(BIN)/ruff check .

lint-format:
	@$(BIN)/ruff format --check --quiet .

lint-types:
	@$(BIN)/mypy

lint-imports:
	@$(BIN)/lint-imports

lint-generated:
	@$(BIN)/python scripts/check_generated.py

format: setup ## put every file into the shape that `make lint` asks for
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: setup ## measure the primitives, each beside a baseline; prints JSON
	@for name in slots window reply restore auditor; do $(BIN)/quiesce bench $$name --json $(ARGS); done

docs: setup ## build the documentation into site/; a warning is an error
	@$(BIN)/mkdocs build --strict --quiet

soak: setup tools ## the tests that run for minutes on purpose
	@$(BIN)/python -m pytest -m "soak and not gpu" $(ARGS)

gpu-check: setup ## train, kill, resume and drill on a CUDA device; prints JSON
	@$(BIN)/python scripts/gpu_check.py $(ARGS)

clean: ## remove what the targets made, but for run folders
	@rm -rf .venv .tools site build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find toolkit exporters dashboards tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
