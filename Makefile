# Every target first sets up .venv where that is not done yet, or again after pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint type docs fuzz corpus crash parity matrix bench clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Install unishard and all its extras into .venv (editable).

demo: $(READY) ## Train the same tiny Llama on both engines; table and plot in demo-out/.
	$(BIN)/unishard demo

test: $(READY) ## Run the whole suite; ARGS="-k name" for a part of it.
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY) ## Check style, formatting and the layers.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(READY) ## Check types (strict).
	$(BIN)/mypy

docs: $(READY) ## Write the generated pages anew.
	$(BIN)/unishard docs

fuzz: $(READY) ## Translate 10,000 broken configs of every format (minutes); N=... for another number.
	$(BIN)/python -m pytest tests/formats/test_every_format.py --examples $(or $(N),10000) -s

corpus: $(READY) ## Translate every config in a folder of yours to every format: make corpus CORPUS=DIR.
	@test -d "$(CORPUS)" || { echo "name a folder of configs: make corpus CORPUS=DIR" >&2; exit 1; }
	$(BIN)/python tests/formats/corpus_check.py "$(CORPUS)"

crash: $(READY) ## Kill ranks at every moment of a save and look at what is left (minutes); N=... for that many moments.
	$(BIN)/python tests/ranks/crashing.py $(if $(N),--points $(N))

parity: $(READY) ## Train every cell on both engines and write how far each is from plain torch (minutes).
	$(BIN)/python -m unishard.testing.parity docs/parity.md

matrix: $(READY) ## Resume every kind of run by every other and write how far each is from one without a break (minutes).
	$(BIN)/python -m unishard.testing.resuming_page docs/resuming.md

bench: $(READY) ## Measure what a step costs beyond the same loop written by hand, and what a translation costs.
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/translate.py
	$(BIN)/python benchmarks/checkpoint.py

clean: ## Remove .venv and everything else the targets made.
	rm -rf $(VENV) dist build demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: whichever build the machine's package index offers is then kept by everything after it.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "unishard needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt torch
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@
