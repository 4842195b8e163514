# `make demo` and `make test` do all of their own set-up: Python (3.10 or newer) and make are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help demo test lint types unit docs fuzz siege kills crossings mutate faults memory audit lowest pythons release clean
.DEFAULT_GOAL := demo

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	@touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

help:  ## This list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{ printf "  make %-8s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo  ## Tilt a classifier's head: a table and pictures in about a minute.
	$(BIN)/headtilt demo

test: lint types unit  ## Everything CI checks.

lint: $(VENV)/.installed  ## Style, by ruff.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed  ## Types, by mypy.
	$(BIN)/mypy

unit: $(VENV)/.installed  ## The tests, with their coverage.
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered

docs: $(VENV)/.installed  ## The documentation, strictly, into site/.
	$(BIN)/mkdocs build --strict

fuzz: $(VENV)/.installed  ## Ten minutes of atheris on every reader of untrusted files.
	$(BIN)/python -m hardening.fuzz --seconds 600

siege: $(VENV)/.installed  ## Hostile files and clients against the service and a batch, on the loopback, two minutes.
	$(BIN)/python -m hardening.siege

kills: $(VENV)/.installed  ## Batch runs killed, a node lost, a full disk: every row once. Needs root, about half an hour.
	$(BIN)/python -m hardening.kills

faults: $(VENV)/.installed  ## An error or interrupt at every call of every stage.
	$(BIN)/python -m hardening.faults

crossings: $(VENV)/.installed  ## Every pair of settings, against double precision and after saving, copying and loading.
	OMP_NUM_THREADS=1 $(BIN)/python -m hardening.crossings

memory: $(VENV)/.installed  ## The same answers under a limit on memory.
	$(BIN)/python -m hardening.memory

mutate: $(VENV)-mutate/.installed  ## Mutants of the core that the tests must notice.
	OMP_NUM_THREADS=1 $(VENV)-mutate/bin/python -m hardening.mutate

audit: $(VENV)/.installed  ## Known vulnerabilities in the dependencies.
	$(BIN)/python -m hardening.audit

lowest: $(VENV)/.installed  ## The lowest versions that are declared.
	$(BIN)/python -m hardening.lowest

pythons: $(VENV)/.installed  ## The core's tests under every Python that is here.
	$(BIN)/python -m hardening.pythons

release: $(VENV)/.installed  ## Wheel and sdist, in empty environments and offline.
	$(BIN)/python -m hardening.release

# mutmut asks for a pytest below 9.
$(VENV)-mutate/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-mutate
	$(VENV)-mutate/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,onnx]' \
		'mutmut>=3.8' 'pytest>=8.2,<9' 'hypothesis>=6.100'
	@touch $@

clean:  ## Remove environments and caches.
	rm -rf $(VENV) $(VENV)-mutate .mutants .pythons .fuzz-corpus .mypy_cache .pytest_cache .ruff_cache .coverage site
