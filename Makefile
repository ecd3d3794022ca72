# make demo | test | test-gpu | test-sanitizer | lint | bench    (README.md says what each shows)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The GPU tests run where nothing can be installed: with the PYTHON that was named, else the venv, else python3.
GPU_PYTHON := $(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)))
# Most of their time is Triton compiling kernels, which the workers share through its cache. What inductor compiles runs in a
# process of its own: its processes keep a worker's pipes open, and pytest would wait for them at the end.
GPU_WORKERS = $(shell $(GPU_PYTHON) -c 'import xdist' 2>/dev/null && printf -- '-n 12 --dist worksteal')
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test test-fast test-thorough test-load test-oldest test-gpu test-sanitizer lint format bench venv clean
.DEFAULT_GOAL := demo

demo: $(STAMP)
	$(BIN)/replayssm demo

test: lint $(STAMP)
	$(PYTEST) -n 2
	$(MAKE) test-oldest

test-fast: $(STAMP)
	$(PYTEST) -n 2 -m "not slow and not thorough"

test-thorough: $(STAMP)
	$(PYTEST) -n 2 -m thorough

# The transformers integration on the oldest supported release, which is kept beside the pinned one.
OLDEST := $(VENV)/oldest
test-oldest: $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(BIN)/replayssm demo --max-new-tokens 33
	PYTHONPATH=$(OLDEST) $(PYTEST) -n 2 tests/test_transformers.py tests/test_assisted.py

# 200 clients stream from a server for two minutes, some of them badly behaved.
test-load: $(STAMP)
	$(BIN)/python -m tests.load_server

test-gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "make test-gpu: torch sees no GPU here")'
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -m gpu $(GPU_WORKERS) -k "not inductor and not gpu_models" tests
	OMP_NUM_THREADS=4 $(GPU_PYTHON) -m pytest -m gpu -k "inductor or gpu_models" tests

# memcheck and racecheck of NVIDIA's compute-sanitizer over the Triton and the CUDA kernels.
test-sanitizer:
	@$(GPU_PYTHON) tests/sanitize.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.decode_step

venv: $(STAMP)

$(STAMP): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.exit(0 if v in ("3.11", "3.12") else "replayssm needs Python 3.11 or 3.12, $(PYTHON) is " + v + ": try make PYTHON=python3.12")'
	@echo "installing into $(VENV): about 2 GB, a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(OLDEST)/.installed: requirements-oldest.txt $(STAMP)
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) -r requirements-oldest.txt
	@touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
