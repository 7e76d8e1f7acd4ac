## make lab    set everything up and open the quickstart in JupyterLab
## make test   everything that continuous integration runs
## Each stage of `make test` is a target of its own: lint types bundle unit kernels browser notebooks. Also: format clean, and
## make explore, the property tests on new random examples; make vllm, the tests against the real vLLM.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
export VENV
BIN := $(VENV)/bin
JUNIT := artifacts/junit
STAGES := lint types bundle unit kernels browser notebooks

.PHONY: help lab environment test model system $(STAGES) explore vllm format clean

help:
	@sed -n 's/^## //p' Makefile

lab: $(VENV)/.installed-notebook
	@$(MAKE) --no-print-directory model
	@$(BIN)/rlkit lab notebooks/01_quickstart.ipynb

environment: $(VENV)/.installed-dev

$(VENV)/.installed-notebook: pyproject.toml .ci/environment
	@[ -e $(VENV)/.installed-dev ] || .ci/environment notebook
	@touch $@

$(VENV)/.installed-dev: pyproject.toml .ci/environment
	@.ci/environment notebook,dev
	@touch $@ $(VENV)/.installed-notebook

# The small real model of the notebooks, fetched once into the user's cache.
model: $(VENV)/.installed-notebook
	@$(BIN)/python -m rlkit.engines.small_model

# What the tests need from the system: a browser, and Node for comparing the widgets' bundle.
system:
	@.ci/system

test: environment
	@$(BIN)/python .ci/stages.py $(STAGES)

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: environment
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: environment
	$(BIN)/mypy

# The committed bundle must be what the sources give.
bundle: system
	npm ci --prefix widgets/js --no-audit --no-fund --loglevel=error
	npm run --prefix widgets/js check

unit: environment model
	OMP_NUM_THREADS=1 $(BIN)/pytest tests --ignore=tests/browser --ignore=tests/kernels -n 2 --junitxml=$(JUNIT)/unit.xml

# On the CPU Triton interprets the kernels; on a GPU it compiles them.
kernels: environment
	TRITON_INTERPRET=$$($(BIN)/python -c 'import torch; print(int(not torch.cuda.is_available()))') \
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/kernels -n 2 --junitxml=$(JUNIT)/kernels.xml

explore: environment
	HYPOTHESIS_PROFILE=explore OMP_NUM_THREADS=1 $(BIN)/pytest $$(grep -rl "^from hypothesis import" tests --include="test_*.py") -n 2

# Not part of `make test`: vLLM needs an environment of its own, of some 3 GB.
vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest tests/generation/vllm/test_vllm.py

.venv-vllm/.installed: .ci/vllm
	@VENV=.venv-vllm .ci/vllm
	@touch $@

browser: environment system model
	$(BIN)/pytest tests/browser -rP --junitxml=$(JUNIT)/browser.xml

notebooks: environment model
	$(BIN)/pytest --nbval-lax notebooks -n 2 --dist loadfile --junitxml=$(JUNIT)/notebooks.xml

clean:
	rm -rf .venv .venv-vllm build dist artifacts widgets/js/node_modules notebooks/runs runs
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
