# `make demo` and `make test` do all of their own set-up: Python (3.10 or newer) and make are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint types unit docs clean
.DEFAULT_GOAL := demo

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	@touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/.demo  ## Tilt a classifier's head: a table and pictures in about a minute.
	$(BIN)/headtilt demo

test: lint types unit  ## Everything CI checks.

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

unit: $(VENV)/.installed
	$(BIN)/pytest -n 2 --cov --cov-report=term:skip-covered

docs: $(VENV)/.installed  ## The documentation, strictly, into site/.
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .coverage site
