# `make demo` and `make test` do all their own set-up; nothing else needs to be installed first
# but Python 3.11+ with venv, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without a CUDA GPU a fixed torch keeps runs comparable; with one, pip's choice is right.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo torch==2.13.0)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(BIN)/pip install -q --no-input

.PHONY: help setup engine tools first demo test test-full check docs audit clean

help:
	@echo "make setup        draftsmith in .venv; then: . .venv/bin/activate"
	@echo "make first        a first figure, without vLLM"
	@echo "make demo         make, serve and measure a drafter for SmolLM2-135M (at most 45 minutes; QUICK=1: 15)"
	@echo "make test         the tests that CI runs, with a handful on a real vLLM"
	@echo "make test-full    every test that runs without a GPU, all with a real vLLM"
	@echo "make check        ruff, mypy, file sizes, the site with broken links as errors"
	@echo "make docs         the site, in build/site"
	@echo "make audit        known vulnerabilities of the dependencies"

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "draftsmith needs Python 3.11 or later; this is $$($(PYTHON) --version). Give another: make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, transformers and draftsmith into $(VENV): about 2 GB, some minutes without a word"
	$(PIP) '$(TORCH)' 2>&1 | grep -v 'WARNING: Location' || true
	$(PIP) -e '.[dev]' 2>&1 | grep -v 'WARNING: Location' || true
	$(BIN)/python -c 'import draftsmith, torch, transformers'
	touch $@

setup: $(VENV)/.ready

engine: setup
	$(BIN)/draftsmith engine install

# Tests open the report in headless Chromium and read an engine through a real sshd.
tools:
	@command -v chromium >/dev/null && command -v sshd >/dev/null || test -x /usr/sbin/sshd && command -v chromium >/dev/null || \
	{ if [ "$$(id -u)" = 0 ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium openssh-server; \
	else echo "the tests need chromium and sshd: apt-get install chromium openssh-server"; exit 1; fi; }

first: setup
	$(BIN)/draftsmith demo --first $(ARGS)

demo: setup
	$(BIN)/draftsmith demo $(if $(QUICK),--quick) $(ARGS)

test: engine tools
	$(BIN)/pytest
	$(BIN)/pytest -m 'engine and ci' -p no:randomly

# Also makes the recordings of tests/engine/recorded again.
test-full: engine tools
	DRAFTSMITH_RECORD=1 $(BIN)/pytest -m 'not gpu'

check: setup docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@long=$$(git ls-files '*.py' | xargs wc -l | awk '$$2 != "total" && $$1 > 500 {print $$2 " (" $$1 " lines)"}'); \
	if [ -n "$$long" ]; then echo "files of over 500 lines: $$long"; exit 1; fi

# NO_MKDOCS_2_WARNING: the theme's advertisement of its successor.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

audit: setup
	$(BIN)/python .ci/audit.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
