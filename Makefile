# A fresh clone needs nothing but Python 3.10 or later: every target that runs Python sets .venv up first.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
TIMM   ?= timm==1.0.31
PYTEST ?=
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Two processes already fill two cores; threads on top only slow each other down.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Dozens of processes import torch, transformers and the rewritten tests; each would compile them again.
unexport PYTHONDONTWRITEBYTECODE
JOBS   ?= 2
RUN     = $(BIN)/python -m pytest -q $(PYTEST)
SPREAD  = -n $(JOBS) --dist loadfile --no-loadscope-reorder
ZOO_TEST = tests/cpu/test_zoo.py::test_a_model_equals_one_device_on_every_mesh_and_can_be_sharded
QUICK   = -m "not slow and not gpu"

.DEFAULT_GOAL := help
.PHONY: help venv lint types layers check test test-pure test-cpu test-multiprocess test-all gpu demo docs integrations zoo bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## set .venv up (every other target does so by itself)

# torch goes first and pinned: where a CPU build is on offer pip takes it, and no open range fetches gigabytes.
# timm goes last and alone: it asks for torchvision, each build of which asks for one build of torch; its models do not.
# Modules are compiled when they are first imported, since most of them never are.
$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "autopar needs Python 3.10 or later; try make PYTHON=python3.12")'
	@test -x $(BIN)/python || { echo "setting up $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --no-compile -qq --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --no-compile -qq --disable-pip-version-check -e ".[dev]"
	@$(BIN)/python -m pip install --no-compile -qq --disable-pip-version-check --no-deps "$(TIMM)"
	@touch $@

lint: $(READY) ## ruff: its format, and every rule that pyproject.toml does not argue against
	@$(BIN)/ruff format --quiet --check . || { echo "run $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .

types: $(READY) ## mypy, strict
	@$(BIN)/python -m mypy --no-error-summary

layers: $(READY) ## import-linter: who may import whom
	@$(BIN)/lint-imports --no-logo >$(VENV)/layers.log || { cat $(VENV)/layers.log; exit 1; }

check: lint types layers ## lint, types and layers

test-pure: $(READY) ## tests that need no torch
	@$(RUN) $(SPREAD) $(QUICK) tests/pure

test-cpu: $(READY) ## tests that need torch and one process
	@$(RUN) $(SPREAD) $(QUICK) tests/cpu

test-multiprocess: $(READY) ## tests on several gloo processes
	@$(RUN) $(QUICK) tests/multiprocess

# Tests of ranks wait for each other as much as they compute, on one worker; on the others the rest goes on meanwhile.
test: check ## all that must pass before a change goes in: check, then the tests of all tiers
	@$(RUN) $(SPREAD) $(QUICK) tests/pure tests/multiprocess tests/cpu

# The whole zoo goes by itself, for its progress bar and its table.
test-all: check ## the slow tests too
	@$(RUN) $(SPREAD) -m "not gpu" --deselect $(ZOO_TEST) tests/pure tests/cpu
	@$(BIN)/python -m tests.zoo --jobs $(JOBS)
	@$(RUN) -m "not gpu" tests/multiprocess

# Uses the machine's own Python, whose torch was built for its GPU; installs and fetches nothing. What it lacks (pulp, say,
# without which tests of plans are skipped) may lie in a folder, by pip install --target: make gpu PYTHONPATH=folder.
gpu: ## tests that need a GPU, and kernels beside eager code and Inductor; skipped with the reason where there is none
	@PYTHONPATH=.:$(PYTHONPATH) $(PYTHON) -m pytest -q -rs $(PYTEST) tests/gpu
	@PYTHONPATH=$(PYTHONPATH) $(PYTHON) benchmarks/kernels.py

demo: $(READY) ## train GPT-2 on two processes and on one, and compare
	@$(BIN)/python examples/demo_gpt2.py

docs: $(READY) ## the pages as HTML in docs/_build, warnings as errors
	@$(BIN)/python -m pip install --no-compile -qq --disable-pip-version-check -e ".[docs]"
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

integrations: $(READY) ## install what the examples of integrations are for; their tests skip without
	@$(BIN)/python -m pip install --no-compile -qq --disable-pip-version-check -e ".[integrations]"

zoo: $(READY) ## every model of the zoo the whole way; writes docs/coverage.md
	@$(BIN)/python -m tests.zoo --jobs $(JOBS) --page

bench: $(READY) ## run every benchmark but the published set-ups, which take hours
	@set -e; for script in $(filter-out benchmarks/workloads.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

clean: ## remove caches and build products; .venv stays
	@rm -rf build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
