"""Compile the kernels of the GPU check where there is no GPU: `python -m bench.gpu.ahead FILE`, for `bench/gpu_check.py
--compiled FILE`.

The check's tests, candidates and timings run with the stub of the driver (gpu_machine/driver.py), on tensors on the
CPU: the kernels that they launch are compiled, and the launch does nothing. This takes an hour on two cores, and saves
five minutes of time on the GPU. The file holds the parts of each kernel that Triton's cache needs, for any version of
Python. This module is also a pytest plugin that compiles the kernels of the tests for a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import runs
from bench.devices import measure_on
from bench.provenance import ROOT
from cmab_kernels.runtime import backends, tiles
from cmab_kernels.testing import OperatorSuite
from gpu_machine.driver import stub

from . import timings
from .cached import pack, same_keys
from .candidates import Target, candidates, prepared, targets

# ---- the tests


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Declare suites as on a GPU, with tensors on the CPU. One distribution of the inputs is enough to reach all
    kernels."""

    def move(suite: type[OperatorSuite]) -> None:
        plain(suite)
        suite.laws, suite.impls = ("normal",), tuple(impl for impl in suite.impls if impl == "triton")
        suite.repeatable = suite.impls if suite.repeatable else ()

    same_keys()
    plain = OperatorSuite._move_to_gpu.__func__
    OperatorSuite.gpu, OperatorSuite.device = True, torch.device("cpu")
    OperatorSuite._move_to_gpu = classmethod(move)
    held = contextlib.ExitStack()
    held.enter_context(stub(int(os.environ["CMAB_KERNELS_AHEAD"])))
    config.add_cleanup(held.close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if "cuda" not in item.name]


# ---- candidates and timings


def _calls() -> Iterator[Callable[[], Any]]:
    """The calls of the other sections, whose kernels this module compiles."""
    place = torch.device("cpu")
    for target in targets():
        for chosen in candidates(target, place):
            yield partial(_tried, target, target.key(place), chosen)
    for case in timings.all_cases():
        for name, implementation in case.implementations.items():
            if runs.is_ours(name):
                yield lambda implementation=implementation, case=case: implementation(case.inputs(0))


def _tried(target: Target, key: tiles.Key, chosen: tuple[int, ...]) -> None:
    with tiles.using({key: chosen}):
        prepared(target, "cpu", "small")()


def _compile(part: int, parts: int, capability: int) -> None:
    """Run a share of the calls. Calls that fail, because no kernel has written their inputs, have nevertheless compiled
    their kernels."""
    same_keys()
    torch.set_num_threads(1)
    measure_on("cpu")
    runs.KERNELS["cpu"] = ("triton",)
    backends.use_impl("triton")
    with stub(capability):
        calls = list(itertools.islice(_calls(), part, None, parts))
        for number, call in enumerate(calls):
            with contextlib.suppress(Exception):
                call()
            if part == 0 and number % 20 == 0:
                print(f"\r{number} of {len(calls)} calls", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what is written: a .tar.xz")
    parser.add_argument("--capability", type=int, default=90, help="the compute capability to compile for")
    options = parser.parse_args()
    workers = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": folder, "CMAB_KERNELS_AHEAD": str(options.capability)}
        tests = f"-m pytest -m gpu tests -o addopts= -p {__spec__.name} -p no:cacheprovider -q --tb=no -n {workers}"
        subprocess.run([sys.executable, *tests.split()], cwd=ROOT)  # most fail: no kernel wrote anything
        parts = [
            multiprocessing.get_context("spawn").Process(target=_compile, args=(part, workers, options.capability))
            for part in range(workers)
        ]
        for part in parts:
            part.start()
        for part in parts:
            part.join()
        print(f"\n{options.file}: {pack(Path(folder), options.file)} kernels")


if __name__ == "__main__":
    main()
