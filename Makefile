# What people and CI run. `make quickstart` and `make test` do all of their own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Installed first, alone and pinned: whoever resolves torch later would pick another build.
TORCH  ?= torch==2.13.0
STAMP  := $(VENV)/.installed
ENVS   := sglang-0.5.23 sglang-0.5.20 vllm-0.32.0
SRC    := src tests bench tools
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help setup model quickstart test test-fast envs check docs format bench clean
help:
	@echo "make quickstart   conversations to a measured drafter on a real model (about 10 minutes on 2 cores)"
	@echo "make test         every test, real SGLang and vLLM included"
	@echo "make test-fast    tests of a few seconds only"
	@echo "make check        ruff, format, types, generated pages, the docs site"
	@echo "make docs         the documentation as a site, in site/"
	@echo "make bench        every benchmark that this machine can run"

setup: $(STAMP)
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[all,dev]'
	touch $(STAMP)

model: models/smollm2/config.json
models/smollm2/config.json: | $(STAMP)
	$(BIN)/headrace fetch-demo-model --out models/smollm2

quickstart: $(STAMP) models/smollm2/config.json
	$(BIN)/headrace run recipes/quickstart.toml

envs: $(STAMP)
	@for name in $(ENVS); do $(BIN)/python -m headrace.testing.envs $$name || exit 1; done

test: $(STAMP)
	$(BIN)/python tools/run_tests.py

test-fast: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not slow and not sglang and not vllm and not gpu and not browser"

check: $(STAMP)
	$(BIN)/ruff check $(SRC)
	$(BIN)/ruff format --check $(SRC)
	$(BIN)/mypy
	$(BIN)/python tools/make_docs.py --check
	$(MAKE) docs

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(STAMP)
	$(BIN)/ruff check --fix $(SRC)
	$(BIN)/ruff format $(SRC)

bench: $(STAMP)
	@for file in bench/[a-z]*.py; do case $$file in bench/common.py) ;; *) $(BIN)/python $$file || exit 1;; esac; done

clean:
	rm -rf $(VENV) build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache
