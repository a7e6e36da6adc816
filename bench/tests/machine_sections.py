"""Runs the GPU check's section of tests on the GPU simulated in software, with faults planted in its kernels.

The section is the check's own: it collects the package's tests for a GPU and runs them. Only some operators are tested,
in small shapes, with tensors on the CPU. Their kernels are compiled, launched through a stub of the driver, and
executed by the machine. This module is also a pytest plugin, with which those tests run there.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench.gpu import suite
from bench.gpu.sections import Perform, Row, Task
from cmab_kernels.runtime import extension
from cmab_kernels.testing import OperatorSuite
from gpu_machine.launch import on_machine
from gpu_machine.machine import Machine

MENDED = Path(os.environ.get("MACHINE_SECTIONS", "")) / "mended"
"""A file in the folder of the test that starts the check: if it exists, the kernels are fixed."""
KEYS = 21
SMALL = {"B": 1, "H": 1, "L": 5, "N": KEYS, "M": 5, "D": 9, "E": 8}
SOME = ("TestAttentionState", "TestRidgeState", "TestRegularisedSolve")


class Planted(Machine):
    """A machine on which one kernel gives wrong results and one crashes, until they are fixed."""

    def launch(
        self, ptx: str, name: str, grid: Sequence[int], threads: int, shared_bytes: int, parameters: Sequence[bytes]
    ) -> None:
        if not MENDED.exists():
            if name == "_gram":  # the last key is left out
                parameters = [
                    struct.pack("<I", KEYS - 1) if value == struct.pack("<I", KEYS) else value for value in parameters
                ]
            if name == "_solve":
                os.kill(os.getpid(), signal.SIGSEGV)
        super().launch(ptx, name, grid, threads, shared_bytes, parameters)


def tests(device: str, before: Mapping[str, list[Row]]) -> Callable[[Perform], None]:
    """The tests, with a new machine for each, and without the extension that has the CUDA kernels."""
    os.environ["PYTEST_ADDOPTS"] = f"-p {__name__}"
    run = suite.tasks(device, before)
    return lambda perform: run(lambda found: perform([task._replace(make=partial(_made, task)) for task in found]))


def _made(task: Task) -> Row:
    missing = {"cuda": {"built": False, "reason": "nvcc was not found"}}
    with on_machine(Planted()), mock.patch.object(extension, "build_report", lambda: missing):
        return task.make()


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Suites are declared as on a GPU, with tensors on the CPU in small shapes."""

    def move(suite: type[OperatorSuite]) -> None:
        plain(suite)
        if suite.batch:  # packed sets have their own numbers of keys
            suite.extents = {
                **suite.extents,
                **{letter: size for letter, size in SMALL.items() if letter in suite.extents},
            }
        suite.shapes, suite.laws = ({},), ("normal",)

    plain = OperatorSuite._move_to_gpu.__func__
    OperatorSuite.gpu, OperatorSuite.device = True, torch.device("cpu")
    OperatorSuite._move_to_gpu = classmethod(move)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The accuracy tests in float32 of some operators."""
    tests = [item for item in items if isinstance(item, pytest.Function) and item.originalname == "test_accuracy"]
    items[:] = [item for item in tests if item.callspec.params["dtype"] == torch.float32 and item.cls.__name__ in SOME]
