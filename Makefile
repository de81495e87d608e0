# make setup   a fresh .venv with the exact SGLang this package is written for (about 11 GB)
# make demo    the real server on the bundled model: what a KV budget does (under 5 minutes)
# make test    every test, most of them through real servers (under 15 minutes on 2 cores)
# make lint    ruff and mypy --strict
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# uv from the PATH if there is one, else one in a folder of its own
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)

.PHONY: setup demo test lint

setup:
	rm -rf $(VENV)
	$(MAKE) $(READY)

$(READY): pyproject.toml .ci/constraints.txt | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --constraint .ci/constraints.txt --editable '.[bench,dev]'
	touch $@

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet uv

demo: $(READY)
	$(BIN)/python -P examples/demo.py

test: $(READY)
	$(BIN)/python -P -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
