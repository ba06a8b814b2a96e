# `make demo` and `make test` need only Python 3.11, git and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := $(VENV)/packages/.installed
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

.PHONY: audit demo faults test test-slow test-portable lint docs dist browser clean help

help:            ## this list
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | sort

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,docs,monai,datasets,tensorboard]'
	touch $@

demo: $(STAMP)   ## set everything up and see the idea at work on embedded data
	$(BIN)/scalelong demo

lint: $(STAMP)   ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

audit: $(STAMP)  ## known vulnerabilities of what is installed (pip-audit)
	$(BIN)/pip-audit --local --skip-editable --progress-spinner off

docs: $(STAMP)   ## build the site into site/
	$(BIN)/mkdocs build --strict --quiet

test: lint docs  ## set everything up, lint, type-check, build the docs, run the tests
	$(BIN)/pytest -n 2

test-portable: $(STAMP)  ## the fast tests as on other CPUs: without vector instructions, and with AVX2 on two threads
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(BIN)/pytest -n 2
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_WAIT_POLICY=passive TEST_THREADS=2 $(BIN)/pytest -n 2

browser:         ## Debian's chromium, for the report's tests, where it is missing and can be installed
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } || \
		echo "no chromium: the browser tests will be skipped"

$(PACKAGES): tests/packages.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/packages -r tests/packages.txt
	touch $@

test-slow: $(STAMP) $(PACKAGES) browser  ## compile matrix, kill-and-resume, two real ranks, browser
	$(BIN)/pytest -n 2 -m slow --durations 10

faults: $(STAMP) ## inject every fault of docs/faults.md and write that page, about ten minutes
	$(BIN)/python -m tests.faults

dist:            ## wheel and sdist into dist/, and a smoke test of the wheel in an empty environment
	rm -rf dist $(VENV)/dist
	$(PYTHON) -m venv $(VENV)/dist/build
	$(VENV)/dist/build/bin/python -m pip install --quiet build
	$(VENV)/dist/build/bin/python -m build --outdir dist .
	$(PYTHON) -m venv $(VENV)/dist/empty
	env -u PYTHONPATH $(VENV)/dist/empty/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	cd $(VENV)/dist && env -u PYTHONPATH empty/bin/python $(CURDIR)/scripts/smoke_test.py

clean:           ## remove what make made
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache
