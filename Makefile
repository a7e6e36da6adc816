# Two commands do all the set-up on a fresh machine with Python >= 3.10 and a C++ compiler: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable
SOURCES := pyproject.toml constraints.txt setup.py $(shell find csrc -type f)
CXX_SOURCES := $(shell find csrc cpp -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-thorough test-all test-fast nightly mutants bench reproduce docs lint format clean

demo: $(VENV)/.demo
	$(BIN)/python -m cmab_kernels demo

# A process for each core, and a thread for each process: tests that want more threads ask for them.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# The ordinary tests; those of GPU kernels without a GPU, of compilers, builds and leaks are in test-thorough. `python -m tests.tiers` lists both.
test: $(VENV)/.test
	$(PYTEST) -m "not thorough and not nightly and not gpu"

test-thorough: $(VENV)/.test
	$(PYTEST) -m "thorough and not nightly and not gpu"

test-all: test test-thorough

# What a change breaks most often, in less than a minute.
test-fast: $(VENV)/.test
	$(PYTEST) $(FAST)

FAST = tests/test_rooms.py tests/test_checks.py tests/test_impl.py tests/test_doctests.py \
       $(foreach name,errors promises reference,$(wildcard tests/*/test_$(name).py tests/*/*/test_$(name).py))

# The tests, and then the numbers to plan with, docs/numerics.md, measured anew.
nightly: $(VENV)/.test
	$(PYTEST) -m "nightly or not nightly"
	$(BIN)/python -m tests.numbers
	$(BIN)/python -m tests.fire
	$(BIN)/python -m bench.report.numbers

# Plants the faults that tests/mutations/CAUGHT.md does not know or that have changed, one at a time, and writes and prints what caught each.
mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutations

bench: $(VENV)/.test
	$(BIN)/python -m cmab_kernels bench --quick --force

# Trains the papers' systems and their baselines, and writes python/cmab_models/RESULTS.md; stopped, it goes on where it was.
reproduce: $(VENV)/.test
	$(BIN)/python -m cmab_models.reproduce

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# Tests want the CUDA kernels where there is nvcc; the demo does not wait for them, and keeps those that are there.
$(VENV)/.test $(VENV)/.lint $(VENV)/.docs: export CMAB_KERNELS_CUDA ?= auto
$(VENV)/.demo: export CMAB_KERNELS_CUDA ?= $(if $(wildcard $(VENV)/.test),auto,0)

# One environment; a stamp says which extras are in it, and is remade when what is built changes.
$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: $(SOURCES) | $(BIN)/python
	$(INSTALL) ".[$*]"
	touch $@

$(VENV)/.lint $(VENV)/.docs: $(VENV)/.%: $(VENV)/.test
	$(INSTALL) ".[$*]"
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist site *.egg-info cmab_kernels/_C*.so cmab_kernels/_cuda*.so cmab_kernels/_build.json
