# Needs Python 3.11+ with venv, and nothing else: every target installs what it uses into .venv.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000

BIN := .venv/bin
SERVICE := .venv/.installed-service
TOOLS := .venv/.installed-tools
TORCH := torch==2.13.0

.PHONY: help run tools demo test test-long test-lab check fix clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/ -/'

run: $(SERVICE)  ## start the service on HOST:PORT (127.0.0.1:8000), its SQLite file in data/
	$(BIN)/commplan serve --host $(HOST) --port $(PORT)

tools: $(TOOLS)  ## install torch and the developer tools; what runs a plan needs torch

demo: $(TOOLS)  ## the whole loop with four ranks here, about 5 minutes: plan, train, calibrate, predict, train
	$(BIN)/python examples/demo.py

# Those that start several processes come last and alone: they need all cores.
test: $(TOOLS)  ## every test that is not marked long
	$(BIN)/pytest -n 2 -q -m 'not (long or dist or lab)'
	$(BIN)/pytest -m '(dist or lab) and not long'

test-long: $(TOOLS)  ## the tests that are marked long
	$(BIN)/pytest -m long

test-lab: $(TOOLS)  ## the emulated cluster; needs Linux, root and iproute2, else says why not
	$(BIN)/pytest tests/lab

check: $(TOOLS)  ## format, lint and types; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: $(TOOLS)  ## format and autofix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what make installed and cached; data/ stays
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# pip is what venv puts in last, so a half-made .venv is made again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "commplan: '$(PYTHON)' ($$($(PYTHON) -V 2>&1)) is not Python 3.11 or newer;" \
		"name one, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "commplan: '$(PYTHON)' lacks venv; install it (Debian, Ubuntu: apt install" \
		"python3-venv) or name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

$(SERVICE): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# torch is pinned: another release may train a little differently.
$(TOOLS): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) --editable '.[dev,executor]'
	@touch $(SERVICE) $@
