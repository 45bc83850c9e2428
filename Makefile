# Everything that one does with minimeg. Each target does its own set-up; `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test lint unit nbval lab notebooks bench docs soak test-gpu

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check install -qq -c constraints.txt
READY := $(VENV)/.ready
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
# Where the notebooks' badges point and what their first cell installs: account/name on GitHub. `make notebooks` writes it into them.
REPOSITORY := OWNER/minimeg

# Only what `make setup` installs may be found, whatever the caller's shell has set.
unexport PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE := 1

# $(call section,NAME,COMMANDS): announce, run, say how long it took.
section = @printf '\n== %s\n' '$(1)'; start=$$SECONDS; $(2) || exit $$?; printf '== %s: %s s\n' '$(1)' "$$((SECONDS - start))"

help:
	@echo 'make TARGET, where TARGET is one of'
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1@/' | awk -F@ '{ printf "  %-10s %s\n", $$1, $$2 }'

setup: $(READY)  ## make .venv and install minimeg with its development tools, in the versions that CI runs

# The first Python that starts, is new enough and can make an environment. `make setup PYTHON3=...` names another.
CANDIDATES := $(or $(PYTHON3),python3 python3.14 python3.13 python3.12 python3.11)

$(READY): pyproject.toml constraints.txt
	@set -e; echo 'setup: installing into $(VENV) (minutes the first time)'; start=$$SECONDS; \
	if ! $(PYTHON) -c 'import pip' 2> /dev/null; then \
		for found in $(CANDIDATES) none; do \
			! "$$found" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1 || break; \
		done; \
		if [ "$$found" = none ]; then \
			echo 'setup: minimeg needs Python >= 3.11 with its venv module, and none of these is one:' >&2; \
			for name in $(CANDIDATES); do echo "  $$name: $$("$$name" --version 2>&1 | head -n 1)" >&2; done; \
			echo 'Install one (Debian and Ubuntu: python3-venv), or name one: make setup PYTHON3=/path/to/python3' >&2; \
			exit 1; \
		fi; \
		"$$found" -m venv --clear $(VENV); \
	fi; \
	$(PIP) -e '.[dev]'; \
	(cd $(VENV) && bin/python -I -c 'import minimeg'); \
	touch $@; echo "setup: $$($(PYTHON) --version), $$((SECONDS - start)) s"

# About a million parameters; four processes on this machine, whatever other job of torchrun's runs here.
TRAIN = OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 4 -m minimeg.train --tp 2 --pp 2
DEMO_MODEL = --num-layers 5 --hidden-size 128 --num-attention-heads 8 --seq-length 128 --micro-batch-size 4 --global-batch-size 16

demo: setup  ## train a GPT on real text over several processes, compare it with one process, draw what happened
	@$(TRAIN) $(DEMO_MODEL) --train-iters 250 --lr 2e-3 --lr-warmup-iters 40 --eval-interval 50 --sample 300 \
		--compare-with-single-process --loss-curve out/loss.png --trace out/timeline.svg
	@echo; echo 'The same model in float64, 20 steps, compared strictly:'
	@$(TRAIN) $(DEMO_MODEL) --train-iters 20 --lr 2e-3 --lr-warmup-iters 20 --dtype float64 --compare-with-single-process

test: lint unit nbval  ## lint, types, tests and notebooks: what CI runs

lint: setup  ## ruff (rules and format) and mypy (strict)
	$(call section,lint,$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check minimeg tests)
	$(call section,types,$(PYTHON) -m mypy)

unit: setup
	$(call section,tests,$(PYTHON) -m pytest -m 'not soak and not gpu' --durations=10)

nbval: setup
ifneq ($(NOTEBOOKS),)
	$(call section,notebooks,$(PYTHON) -m pytest -p tests.notebooks.clock --nbval --nbval-cell-timeout 120 notebooks)
endif

lab: setup  ## open the notebooks in JupyterLab
	@$(PYTHON) -m jupyter lab notebooks

notebooks: setup  ## run every notebook and store its outputs
	@$(PYTHON) -m tests.notebooks $(REPOSITORY) $(NOTEBOOKS)

bench: setup  ## measure against other implementations (tests/benchmarks)
	@$(PYTHON) -m tests.benchmarks

docs: $(VENV)/.docs  ## build the site into docs/_build/html; a warning is an error
	@$(PYTHON) docs/builder/pyodide.py
	@$(PYTHON) -m sphinx -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html

$(VENV)/.docs: $(READY)
	@$(PIP) -e '.[docs]'; touch $@

soak: setup  ## the long tests: random schedules, faults again and again
	$(call section,soak,$(PYTHON) -m pytest -m soak)

test-gpu: setup  ## the tests that need CUDA devices
	$(call section,gpu tests,$(PYTHON) -m pytest -m gpu)
