# Every target first sets up .venv where that is not done yet, or again after pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
GPU_OUT ?= gpu-out
# Four processes, a file of tests at a time, in the order of tests/conftest.py: ranks wait for each other, and fewer leave cores idle.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# Where it is set, each of the processes would compile all tests anew, a third of the time they take to collect them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick coverage lint type docs site wheel audit fuzz corpus crash kill integrity faults soak parity combinations matrix mistakes models versions bench gpu gpu-wheels device-sim clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Install unishard and all its extras into .venv (editable).

demo: $(READY) ## Train the same tiny Llama on both engines; table and plot in demo-out/.
	$(BIN)/python examples/demo.py

test: $(READY) ## Run the whole suite; ARGS="-k name" for a part of it, ARGS=--deep also for what it takes in turns.
	$(PYTEST) $(ARGS)

quick: $(READY) ## Run what finds most mistakes, in under 3 minutes: unit, formats, architecture, a cell of each engine and strategy.
	$(PYTEST) tests/unit tests/formats tests/architecture tests/ranks/test_conformance.py -m "quick or not ranks" $(ARGS)
	$(BIN)/python tests/device_sim/on_device.py -q -m quick

coverage: $(READY) ## Run the whole suite and list the lines that no test ran, ranks included; ARGS="tests/unit" for a part of it.
	$(PYTEST) --cov --cov-report=term-missing $(ARGS)

lint: $(READY) ## Check style, formatting and the layers.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(READY) ## Check types (strict).
	$(BIN)/mypy

docs: $(READY) ## Write the generated pages anew.
	$(BIN)/python -m dev.pages

site: $(READY) ## Build the guide and the API reference in site/, without a network; a link that leads nowhere is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(READY) ## Build the sdist in dist/, and the wheel from it.
	$(BIN)/python -m build --no-isolation

# In an environment of its own, so that what it needs changes nothing that it looks at.
audit: ## Look up known vulnerabilities of the pinned requirements (pip-audit; needs the network); FILE=... for other ones.
	$(PYTHON) -m venv .audit
	.audit/bin/python -m pip install --quiet pip-audit
	grep -v '^#' $(or $(FILE),constraints.txt) > .audit/pinned.txt
	.audit/bin/pip-audit --requirement .audit/pinned.txt --no-deps --disable-pip --strict --progress-spinner off $(ARGS)

fuzz: $(READY) ## Translate 10,000 broken configs of every format, and damage the file of every reader (minutes); N=... for another number.
	$(BIN)/python -m pytest tests/formats/test_every_format.py tests/security --examples $(or $(N),10000) -s

corpus: $(READY) ## Translate every config in a folder of yours to every format: make corpus CORPUS=DIR.
	@test -d "$(CORPUS)" || { echo "name a folder of configs: make corpus CORPUS=DIR" >&2; exit 1; }
	$(BIN)/python tests/formats/corpus_check.py "$(CORPUS)"

crash: $(READY) ## Kill ranks at every moment of a save and look at what is left (minutes); N=... for that many moments.
	$(BIN)/python -m dev.integrity.crashing $(if $(N),--points $(N))

kill: $(READY) ## Kill ranks and launchers at random and start them again (15 s a kill); N=... for that many kills.
	$(BIN)/python -m dev.integrity.killing $(if $(N),$(N)) $(ARGS)

integrity: $(READY) ## Kill saves and runs and damage files, and write docs/integrity.md (5 minutes); SAVES=100 RUNS=48 for how many are killed.
	$(BIN)/python -m dev.integrity.damaging --record
	$(BIN)/python -m dev.integrity.crashing --record --points $(or $(SAVES),100)
	$(BIN)/python -m dev.integrity.killing $(or $(RUNS),48) --record

faults: $(READY) ## Play every fault of docs/reliability.md on both engines and note how long each takes (minutes); ONLY="kill -9" for some.
	$(BIN)/python -m dev.faults.page $(if $(ONLY),--only '$(ONLY)')

# Each thread of a background save may get an arena of its own from glibc, up to 8 a core: 20 MiB that grow and stop, unless there are few.
soak: $(READY) ## Train 2,000 updates on each engine with resumes at random; nothing may grow (15 minutes); N=... for that many updates.
	MALLOC_ARENA_MAX=2 $(BIN)/python -m dev.soak.run $(if $(N),--updates $(N)) $(ARGS)

parity: $(READY) ## Train every cell on both engines and write how far each is from plain torch (minutes); ONLY="plain items" for some features.
	$(BIN)/python -m dev.parity docs $(if $(ONLY),--only $(ONLY))

combinations: $(READY) ## Train random combinations of settings, each continued by another one, beside plain torch (10 s each); ARGS="--count 50 --seed 7 --ranks 4".
	$(BIN)/python -m dev.combining $(ARGS)

matrix: $(READY) ## Resume every kind of run by every other, move one from engine to engine, and write how far each is from one without a break (half an hour).
	$(BIN)/python -m dev.resuming docs/resuming.md
	$(BIN)/python -m dev.moving docs/moving.md

mistakes: $(READY) ## Make every mistake of docs/mistakes.md on both engines.
	$(PYTEST) tests/ranks/test_mistakes.py --deep

models: $(READY) ## Train every model of dev/models on both engines beside plain torch; writes docs/models-tested.*; ONLY="llama, t5" for some.
	$(BIN)/python -m dev.models.sweep docs $(if $(ONLY),--only '$(ONLY)') $(ARGS)

versions: $(READY) ## Try other versions, an environment each (hours); ONLY=torch-2.11 for one, ARGS="--venv DIR" for one of yours.
	$(BIN)/python -m dev.versions.make_versions $(if $(ONLY),--only $(ONLY)) $(ARGS)

# Each benchmark in turn; the machine should do nothing else meanwhile.
bench: $(READY) ## Measure steps beside loops by hand and frameworks' own, translations, saves, starts; ONLY="peers frameworks" for some, BUDGET= seconds of these.
	$(foreach each,$(or $(ONLY),peers desync calls translate checkpoint stream scale frameworks sequence parallel muon held first_step goodput),$(BIN)/python -m benchmarks.$(each) $(if $(wildcard benchmarks/$(each)/measured.json),--write)\
	  $(if $(BUDGET),$(if $(filter peers frameworks,$(each)),--seconds $(BUDGET))) &&) true

# JOBS=4 runs pieces side by side, but for those that measure. Not by way of .venv: a machine with a GPU may have its own
# torch and no network. It takes the Python of .venv where that is there.
gpu: ## What one GPU can prove, about 40 minutes; PIECE="cells resume" for some, DEVICE=cpu for tiny sizes, BUDGET= seconds, JOBS= pieces at a time.
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(PIECE) --device $(or $(DEVICE),cuda) --out $(GPU_OUT) $(if $(BUDGET),--budget $(BUDGET)) $(if $(JOBS),--jobs $(JOBS)) \
	  $(if $(filter cpu,$(DEVICE)),,--page docs/gpu.md)

gpu-wheels: $(READY) ## Gather in .wheels what that machine may lack, here where there is a network.
	$(BIN)/python -m benchmarks.gpu.wheels .wheels

# No other target needs its C++ compiler; where there is none it says so and ends well.
device-sim: $(READY) ## Train on a simulated CUDA device that is as late as it may be and finds each missing wait (some 20 minutes); ARGS="-k name".
	$(BIN)/python tests/device_sim/on_device.py $(ARGS)

clean: ## Remove .venv and everything else the targets made.
	rm -rf $(VENV) .audit dist build site demo-out gpu-out .device-sim .wheels .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.*
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
	$(BIN)/python -m compileall -q unishard backends
	@touch $@
