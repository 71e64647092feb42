# Each target makes .venv and installs by itself when that is missing or out of date.
SHELL := /bin/bash
.SHELLFLAGS := -eo pipefail -c
PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
INSTALLED := .venv/.installed
LORA := 2.1_lora_finetuning/run_0_cpu_x1
DDP := 2.2_lora_finetuning_with_ddp/run_0_cpu_x2
FULL := 2.4_full_finetuning/run_0_cpu_x1
NOTEBOOKS := $(wildcard [1-3].*/run_0_*/*.ipynb)

.PHONY: demo install deepspeed test test-all soak lint lab run record tables tables-check notebooks siblings bench
.DEFAULT_GOAL := demo

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11")'
	@echo "Installing into .venv, once: 2 to 8 GB, 1 to 5 minutes."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev,judge]' 2>&1 \
		| tee .venv/install.log | grep --line-buffered -E '^(Collecting|Installing|Successfully|ERROR)' | cut -c 1-100
	@$(BIN)/python -m pip show --quiet finetuning-experiments || { tail -20 .venv/install.log; exit 1; }
	@touch $@

demo: $(INSTALLED) ## LoRA on one device, with DDP on two at the same global batch and at the same rows per device; full fine-tuning
	@$(MAKE) --no-print-directory run FOLDER=$(LORA)
	@$(MAKE) --no-print-directory run FOLDER=$(DDP)
	@$(MAKE) --no-print-directory run FOLDER=$(DDP) ARGS="--batch_size 16"
	@$(MAKE) --no-print-directory run FOLDER=$(FULL)
	@echo; $(BIN)/python -m common.report --results

install: $(INSTALLED) ## all that is needed, into .venv, and nothing else

deepspeed: $(INSTALLED) ## DeepSpeed, for the ZeRO stages of 2.6: an extra, as pip builds it from source, against the torch that is there
	@$(BIN)/python -m pip install --quiet setuptools --constraint constraints.txt wheel
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt deepspeed
	@$(BIN)/python -m pip show --quiet deepspeed && echo "DeepSpeed is installed."

run: $(INSTALLED) ## make run FOLDER=2.1_lora_finetuning/run_0_cpu_x1 ARGS="--batch_size 8"
	@test -d "$(FOLDER)" || { echo "error: '$(FOLDER)' is no folder: pass FOLDER=<technique>/<run folder>" >&2; exit 2; }
	@echo; echo "== $(FOLDER) $(ARGS)"; cd "$(FOLDER)" && $(BIN)/python -m common.launch $(ARGS)

record: $(INSTALLED) ## make record RUN=2.1_lora_finetuning/run_0_cpu_x1/results/<run name>
	@test -n "$(RUN)" || { echo "error: pass RUN=<run folder>/results/<run name>" >&2; exit 2; }
	@$(BIN)/python -m common.run_record "$(RUN)"

tables: $(INSTALLED) ## render the READMEs' tables from the records
	@$(BIN)/python -m common.report --write

tables-check: $(INSTALLED)
	@$(BIN)/python -m common.report --check

test: $(INSTALLED)
	@$(BIN)/python -m pytest -q -m "not slow" tests

test-all: $(INSTALLED)
	@$(BIN)/python -m pytest -q tests

soak: $(INSTALLED) ## 100 random kills and 10,000 fuzzed inputs; keeps what the faults came to, for the README's table
	@rm -f tests/faults/outcomes.json
	@KILLS=100 FUZZED_INPUTS=2000 KEEP_OUTCOMES=1 $(BIN)/python -m pytest -q tests/faults
	@$(BIN)/python -m common.report --write

lint: $(INSTALLED)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench: $(INSTALLED) ## speed against other tools, scaling, quality, the planner's error, pipelines: 50 minutes on a quiet machine
	@$(BIN)/python -m bench

siblings: $(INSTALLED) ## copy each technique's first run folder to the others, but for their literals
	@$(BIN)/python -m common.siblings

lab: $(INSTALLED) ## the notebooks, in the browser
	@$(BIN)/jupyter lab

notebooks: $(INSTALLED) ## run every notebook for the CPU from top to bottom and keep its outputs
	@PATH=$(BIN):$$PATH $(BIN)/jupyter nbconvert --to notebook --inplace --execute $(NOTEBOOKS) \
		--ExecutePreprocessor.record_timing=False --ClearMetadataPreprocessor.enabled=True \
		--ClearMetadataPreprocessor.preserve_nb_metadata_mask='["kernelspec"]' \
		--ClearMetadataPreprocessor.preserve_cell_metadata_mask='[("tags",)]'
