# `make demo` and `make test` do all the set-up on a fresh machine. They need Python >= 3.10 and a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable
SOURCES := pyproject.toml constraints.txt setup.py $(shell find csrc -type f)
CXX_SOURCES := $(shell find csrc cpp -name '*.h' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-thorough test-all test-fast nightly mutants bench reproduce docs lint format clean

demo: $(VENV)/.demo
	$(BIN)/python -m cmab_kernels demo

# There is one process for each core, with one thread. Tests that need more threads set their number.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Runs the ordinary tests. test-thorough has the tests of GPU kernels without a GPU, compilers, builds and leaks.
# `python -m tests.tiers` lists both.
test: $(VENV)/.test
	$(PYTEST) -m "not thorough and not nightly and not gpu"

test-thorough: $(VENV)/.test
	$(PYTEST) -m "thorough and not nightly and not gpu"

test-all: test test-thorough

# Runs the tests that fail most often after a change, in less than a minute.
test-fast: $(VENV)/.test
	$(PYTEST) $(FAST)

FAST = tests/test_rooms.py tests/test_checks.py tests/test_impl.py tests/test_doctests.py \
       $(foreach name,errors promises reference,$(wildcard tests/*/test_$(name).py tests/*/*/test_$(name).py))

# Runs all tests, and then measures the numbers of docs/numerics.md again.
nightly: $(VENV)/.test
	$(PYTEST) -m "nightly or not nightly"
	$(BIN)/python -m tests.numbers
	$(BIN)/python -m tests.fire
	$(BIN)/python -m bench.report.numbers

# Plants, one at a time, the faults that are new or changed since tests/mutations/CAUGHT.md was written, and records
# which test caught each.
mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutations

bench: $(VENV)/.test
	$(BIN)/python -m cmab_kernels bench --quick --force

# Trains the papers' systems and their baselines, and writes python/cmab_models/RESULTS.md. The next call continues a
# stopped one.
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

# The tests build the CUDA kernels if nvcc is found. The demo does not build them, but keeps those that the tests have
# built.
$(VENV)/.test $(VENV)/.lint $(VENV)/.docs: export CMAB_KERNELS_CUDA ?= auto
$(VENV)/.demo: export CMAB_KERNELS_CUDA ?= $(if $(wildcard $(VENV)/.test),auto,0)

# There is one environment. A stamp for each extra says that it is installed. The stamp is remade when a source of the
# build changes.
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
