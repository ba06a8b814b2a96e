# `make demo` and `make test` need only Python 3.11, git and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := $(VENV)/packages/.installed
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

.PHONY: audit demo faults test test-slow test-portable lint docs dist browser clean help

help:            ## show this help
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | sort

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,docs,monai,datasets,tensorboard]'
	touch $@

demo: $(STAMP)   ## set up and run the demo on bundled data
	$(BIN)/scalelong demo

lint: $(STAMP)   ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

audit: $(STAMP)  ## check dependencies for known vulnerabilities (pip-audit)
	$(BIN)/pip-audit --local --skip-editable --progress-spinner off

docs: $(STAMP)   ## build the site into site/
	$(BIN)/mkdocs build --strict --quiet

test: lint docs  ## set up, lint, type-check, build the docs, run the tests
	$(BIN)/pytest -n 2

test-portable: $(STAMP)  ## fast tests emulating other CPUs: no vector instructions, and AVX2 with two threads
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(BIN)/pytest -n 2
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_WAIT_POLICY=passive TEST_THREADS=2 $(BIN)/pytest -n 2

browser:         ## install Debian's chromium for the report tests, if possible
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } || \
		echo "no chromium: the browser tests will be skipped"

$(PACKAGES): tests/packages.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/packages -r tests/packages.txt
	touch $@

test-slow: $(STAMP) $(PACKAGES) browser  ## compile matrix, kill-and-resume, two real ranks, browser
	$(BIN)/pytest -n 2 -m slow --durations 10

faults: $(STAMP) ## inject every fault and write docs/faults.md, about ten minutes
	$(BIN)/python -m tests.faults

dist:            ## build wheel and sdist into dist/ and smoke-test the wheel
	rm -rf dist $(VENV)/dist
	$(PYTHON) -m venv $(VENV)/dist/build
	$(VENV)/dist/build/bin/python -m pip install --quiet build
	$(VENV)/dist/build/bin/python -m build --outdir dist .
	$(PYTHON) -m venv $(VENV)/dist/empty
	env -u PYTHONPATH $(VENV)/dist/empty/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	cd $(VENV)/dist && env -u PYTHONPATH empty/bin/python $(CURDIR)/scripts/smoke_test.py

clean:           ## remove build artifacts
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache
