# Two commands set everything up on a fresh machine with Python 3.11 or newer: make reproduce, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out/reproduce
# Your own data: make reproduce DATA="--data my.npz"; for figure 8, DATA="--data FOLDER" with the idx files of MNIST.
DATA ?=

.PHONY: help reproduce reproduce-all test test-full test-machines test-package lint browser federation bench docs clean

help:
	@echo "make reproduce   draw the paper's figures 2 to 7 and check its statements (installs what it needs)"
	@echo "make reproduce-all   figure 8 on MNIST and unlike devices as well: some ten minutes, fetches MNIST"
	@echo "make test        lint, types, import rules and tests in a few minutes"
	@echo "make test-full   the same with the full counts, up to an hour"
	@echo "make test-machines   the tests as on other processors, with other BLAS threads and in other orders: half an hour"
	@echo "make test-package    build the wheel and use it in an empty environment"
	@echo "make browser     install Chromium for the tests of pages, where apt-get and the rights to use it are there"
	@echo "make lint        ruff, mypy, import-linter and the check of readability alone"
	@echo "make federation  a federation on Flower, simulated and deployed on loopback, against the simulator: five minutes"
	@echo "make bench       benchmarks, as ratios measured side by side"
	@echo "make docs        the documentation as a site"

# Versions are pinned per Python line: 3.11 still has its own jax and ArviZ.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	-c constraints/$$($(BIN)/python -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")').txt

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "wflmc needs Python 3.11 or newer; say which one by: make PYTHON=/path/to/python ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml $(wildcard constraints/*.txt) | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/.test: pyproject.toml $(wildcard constraints/*.txt) | $(BIN)/python
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.base

$(VENV)/.bench: $(VENV)/.base
	$(INSTALL) -e '.[bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(INSTALL) -e '.[docs]'
	@touch $@

reproduce: $(VENV)/.base
	$(BIN)/wflmc reproduce fig2 fig3a fig3b fig4a fig4b fig5 fig6 fig7 --out $(OUT) $(DATA)

reproduce-all: $(VENV)/.base
	$(BIN)/wflmc reproduce all heterogeneity --out $(OUT) $(DATA)

# Tests of pages need a browser, and are skipped with a reason where there is none. `make test` does not install one by itself.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update \
			&& DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; } \
		|| echo "Chromium could not be installed: tests of pages in a browser will be skipped."

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.ratchet

PYTEST = $(BIN)/pytest -n 2 --dist loadfile

test: lint
	$(PYTEST)

test-full: lint
	WFLMC_FULL=1 $(PYTEST)

# Instruction sets that XLA and OpenBLAS can be told to keep to, numbers of BLAS threads, and orders of the tests.
test-machines: $(VENV)/.test
	XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 OPENBLAS_CORETYPE=Nehalem WFLMC_ORDER=1 $(PYTEST)
	XLA_FLAGS=--xla_cpu_max_isa=AVX2 OPENBLAS_CORETYPE=Haswell OPENBLAS_NUM_THREADS=2 WFLMC_ORDER=2 $(PYTEST)
	XLA_FLAGS= OPENBLAS_CORETYPE=SkylakeX WFLMC_ORDER=3 $(PYTEST)

test-package: $(VENV)/.test
	WFLMC_FULL=1 $(BIN)/pytest tests/package/test_wheel.py

# Both of Flower's runtimes: 30 devices in its simulation engine; SuperLink and three SuperNodes with TLS, kills and strangers.
federation: $(VENV)/.test
	$(BIN)/python scripts/federation.py simulation
	$(BIN)/python scripts/federation.py deployment

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --site-dir site

clean:
	rm -rf $(VENV) out site .mypy_cache .ruff_cache .pytest_cache .hypothesis
