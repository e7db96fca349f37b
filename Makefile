# Everything runs in .venv, which is made once and made again when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2

.PHONY: install test test-full lint bench demo docs clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "parapos needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(JOBS) -m "not full" $(ARGS)

test-full: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -m full $(ARGS)

bench: $(STAMP)
	$(BIN)/parapos bench attention --out benchmarks/attention

demo: $(STAMP)
	$(BIN)/parapos demo --out demo

docs: $(STAMP)
	$(BIN)/python -m tools.site build

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
