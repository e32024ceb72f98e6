# One command each: `make quickstart` installs and runs the main job, `make test` installs and tests.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# CUDA builds where there is an NVIDIA GPU, CPU builds everywhere else.
PLATFORM ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
# PyTorch's build for GPUs. Named, because `auto` asks the driver, which a docker build has not.
CUDA_BUILD ?= cu130
# Processes that share the tests, two for each of two cores: many tests wait. Whoever is free takes
# the next group of tests; tests/turns.py orders them.
WORKERS ?= 4
# Tests start hundreds of processes, and each would compile every module anew if none could keep it.
TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
SHARED := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
# uv gives up a file after 60 s of compiling, which a busy machine needs, and installs nothing more.
export UV_COMPILE_BYTECODE_TIMEOUT := 0
# Where a folder of wheels is configured for pip, uv must be told; elsewhere it takes PyTorch's build
# from PyTorch's own index.
ifdef PIP_FIND_LINKS
TORCH := --find-links "$(PIP_FIND_LINKS)"
else
TORCH := --torch-backend=$(if $(filter cuda,$(PLATFORM)),$(CUDA_BUILD),cpu)
endif

.PHONY: quickstart setup wheels docs lint type test test-fast test-gpu bench clean

quickstart: setup  ## Install, make a tiny model, train it by RL.
	$(BIN)/python examples/sorting.py quickstart
	$(BIN)/roll run examples/rlvr_quickstart/run.yaml

setup: $(STAMP)  ## A virtual environment with everything in it.

$(STAMP): setup.py mcore_adapter/pyproject.toml $(wildcard requirements/*.txt requirements/*/*/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "roll needs Python 3.11 or newer, $(PYTHON) is %d.%d; say make PYTHON=python3.11" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "uv>=0.9"
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python $(TORCH) \
		-r requirements/$(PLATFORM).txt -r requirements/dev.txt -e . -e mcore_adapter
ifeq ($(PLATFORM),cpu)
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --no-deps -r requirements/sglang-cpu.txt
endif
	touch $@

# Those of requirements/ are for machines without a GPU, see requirements/cpu.txt.
wheels: setup  ## Wheels in dist/, to install where the repository is not (docs/begin.md).
	$(BIN)/uv build --out-dir dist .
	$(BIN)/uv build --out-dir dist mcore_adapter
	for part in stubs/torchaudio stubs/torchcodec python_half/torchvision; do \
		$(BIN)/uv build --wheel --out-dir dist/cpu requirements/$$part || exit 1; done

# The variable silences a notice of the theme about its successor.
docs: setup  ## The documentation as a site: outputs/site/index.html. Needs no network.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=. $(BIN)/lint-imports

type: setup
	$(BIN)/mypy

test: setup  ## Everything that runs on this machine.
	$(TESTS) $(SHARED)

test-fast: setup  ## Parts by themselves and the rules of the repository, without the slow ones.
	$(TESTS) $(SHARED) tests/unit tests/repo -m "not slow"

test-gpu: setup
	$(TESTS) tests/gpu

bench: setup  ## The cost of the framework, as README.md quotes it; benchmarks/README.md has the other figures.
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) outputs dist .pytest_cache .mypy_cache .ruff_cache
