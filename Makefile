# Two commands set everything up on a fresh machine with Python 3.11 or newer: make reproduce, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out/reproduce
# Your own data: make reproduce DATA="--data my.npz"; for figure 8, DATA="--data FOLDER" with the idx files of MNIST.
DATA ?=

.PHONY: help reproduce reproduce-all test test-full lint browser federation bench docs clean

help:
	@echo "make reproduce   draw the paper's figures 2 to 7 and check its statements (installs what it needs)"
	@echo "make reproduce-all   figure 8 on MNIST and unlike devices as well: some ten minutes, fetches MNIST"
	@echo "make test        lint, types, import rules and tests in a few minutes"
	@echo "make test-full   the same with the full counts, up to an hour"
	@echo "make lint        ruff, mypy and import-linter alone"
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

# Pages are tested in a browser. Debian's is installed where that can be done; elsewhere these tests are skipped and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update \
			&& DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; } \
		|| echo "No chromium here: tests of pages in a browser are skipped."

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint browser
	OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test-full: lint browser
	OPENBLAS_NUM_THREADS=1 WFLMC_FULL=1 $(BIN)/pytest -n 2 --dist loadfile

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
