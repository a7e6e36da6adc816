"""The sections of the GPU check with the GPU made of software in the place of a GPU, and faults planted in its kernels.

The sections are the check's own: they list their rows, and make them, in small shapes, of tensors on the CPU whose kernels are compiled,
launched through a stub of the driver and executed by the machine. Its times mean nothing. This module is a pytest plugin too, with which
the package's tests for a GPU run there.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench import harness, runs
from bench.floors import Rates
from bench.gpu import candidates, suite, timings
from bench.gpu.sections import Perform, Row, Task
from bench.scans import attention, continual, intention, nystrom
from cmab_kernels import backends, extension, tiles
from cmab_kernels.measure import Peak
from cmab_kernels.testing import OperatorSuite
from cmab_kernels.testing.cubin import as_if_on
from gpu_machine import cuda_launch
from gpu_machine.launch import on_machine
from gpu_machine.machine import Machine

FOLDER = Path(os.environ["MACHINE_SECTIONS"])
"""Where the test that starts the check keeps the table of tiles, `cuda` (the CUDA kernels for the machine), and `mended`."""
tiles.FILE = FOLDER / "tiles.json"
from bench.gpu import tune  # noqa: E402  it takes the table's place for a default

WHOLE = (FOLDER / "cuda").exists()
"""Whether all operators are checked, CUDA kernels too, or some of Triton's."""
MENDED = (FOLDER / "mended").exists()
KEYS = 21
SMALL = {"B": 1, "H": 1, "L": 5, "N": KEYS, "M": 5, "D": 9, "E": 8}
SOME = ("TestAttentionState", "TestRidgeState", "TestRegularisedSolve")
RATES = Rates(4e12, 4e12, {"float64": 6e13, "float32": 4e14, "bfloat16": 8e14, "float16": 8e14})
"""The rates of no GPU that exists."""
Tasks = list[Task] | Callable[[Perform], None]


# ---- the machine and its faults


class Planted(Machine):
    """A machine on which one kernel gives wrong results, one hangs and one crashes, until they are mended."""

    def launch(self, ptx: str, name: str, grid: Sequence[int], threads: int, shared_bytes: int, parameters: Sequence[bytes]) -> None:
        if not MENDED:
            if name == "_gram":  # the last key is left out
                parameters = [struct.pack("<I", KEYS - 1) if value == struct.pack("<I", KEYS) else value for value in parameters]
            if name == "_nystrom_step" and WHOLE:  # so that the other test need not wait
                ptx = ptx.replace("\tret;", "$hangs:\n\tbra.uni $hangs;\n\tret;")
            if name == "_solve":
                os.kill(os.getpid(), signal.SIGSEGV)
        self.lenient = "solve_kernel" in name or "ridge_kernel" in name  # of csrc, as docs/gpu_machine.md says
        super().launch(ptx, name, grid, threads, shared_bytes, parameters)


@contextmanager
def in_place_of_a_gpu() -> Iterator[None]:
    """Within this context kernels run on the machine. The extension with the CUDA kernels is missing, until it is mended."""
    machine = Planted()
    with on_machine(machine), cuda_on(machine) if WHOLE and MENDED else without_extension():
        yield


@contextmanager
def cuda_on(machine: Machine) -> Iterator[None]:
    launchers = [backends.implementation(name, "cuda") for name in ("intention", "intention.solve")]
    with ExitStack() as patched:
        for launcher in launchers:
            patched.enter_context(mock.patch.object(launcher, "unsupported", lambda *tensors: None))
        patched.enter_context(cuda_launch.cuda_on_machine(machine, _built(), *launchers))
        yield


def without_extension() -> AbstractContextManager[object]:
    missing = {"cuda": {"built": False, "reason": "nvcc was not found"}}
    return mock.patch.object(extension, "build_report", lambda: missing)


@cache
def _built() -> cuda_launch.Built:
    return cuda_launch.built_in(FOLDER / "cuda")


def _there(tasks: Iterable[Task]) -> list[Task]:
    """The tasks, with a new machine for each."""

    def made(task: Task) -> Row:
        with in_place_of_a_gpu():
            return task.make()

    return [task._replace(make=partial(made, task)) for task in tasks]


# ---- the package's tests


def tests(device: str, before: Mapping[str, list[Row]]) -> Tasks:
    return _of_pytest(suite.tasks(device, before))


def tuned_tests(device: str, before: Mapping[str, list[Row]]) -> Tasks:
    found = suite.tuned_tasks(device, before)
    return _of_pytest(found) if callable(found) else found


def _of_pytest(run: Callable[[Perform], None]) -> Tasks:
    os.environ["PYTEST_ADDOPTS"] = f"-p {__name__}"
    return lambda perform: run(lambda tasks: perform(_there(tasks)))


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Suites are declared as on a GPU, of tensors on the CPU in small shapes."""

    def move(suite: type[OperatorSuite]) -> None:
        plain(suite)
        if suite.batch:  # packed sets say themselves how many keys they have
            suite.extents = {**suite.extents, **{letter: size for letter, size in SMALL.items() if letter in suite.extents}}
        suite.shapes, suite.laws = ({},), ("normal",)

    plain = OperatorSuite._move_to_gpu.__func__
    OperatorSuite.gpu, OperatorSuite.device = True, torch.device("cpu")
    OperatorSuite._move_to_gpu = classmethod(move)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The accuracy tests of a GPU: of all operators in two dtypes, or of some operators in one.

    CUDA's steps are left out, whose streams have their position on the GPU: tests/gpu_machine/test_cuda.py runs them.
    """
    dtypes = (torch.float32, torch.bfloat16) if WHOLE else (torch.float32,)
    tests = [item for item in items if isinstance(item, pytest.Function) and item.originalname == "test_accuracy"]
    tests = [item for item in tests if item.callspec.params["impl"] == "triton" or "continual" not in item.nodeid]
    items[:] = [item for item in tests if item.callspec.params["dtype"] in dtypes and (WHOLE or item.cls.__name__ in SOME)]


# ---- tiles


TARGET = candidates.Target("attention.forward", "float32", 16)


def some_tiles(device: str, before: Mapping[str, list[Row]]) -> Tasks:
    """The built-in tiles of a kernel and two others."""
    return _there(_candidates(device, before)[:3])


def tuning(device: str, before: Mapping[str, list[Row]]) -> Tasks:
    """The clock says that the last of the tiles is the fastest."""
    found = {row["key"]: row.get("sound", False) for row in before["candidates"]}
    every = [{"key": task.key, "sound": found.get(task.key, False)} for task in _candidates(device, before)]
    tune.captured, tune.interleave, tune.gpu_name = lambda call: call, _made_up, lambda device: "a GPU made of software"
    return _there(tune.tasks(device, {"candidates": every}))


def _candidates(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    tune.targets = lambda: iter([TARGET])
    candidates.LENGTHS.update(small=60, large=20)
    with as_if_on(80):
        return tune.candidate_tasks(device, before)


def _made_up(calls: Mapping[str, Callable[[], object]], rounds: int, *rest: object) -> dict[str, list[float]]:
    for call in calls.values():
        call()
    return {name: rounds * [1e-4 if name == list(calls)[-1] else 2e-4] for name in calls}


# ---- times, which mean nothing


def times(device: str, before: Mapping[str, list[Row]]) -> Tasks:
    _small_times()
    return _there(timings.tasks(device, before))


def intention_times(device: str, before: Mapping[str, list[Row]]) -> Tasks:
    _small_times()
    return _there(timings.intention_tasks(device, before))


def nystrom_times(device: str, before: Mapping[str, list[Row]]) -> Tasks:
    _small_times()
    return _there(timings.nystrom_tasks(device, before))


def continual_times(device: str, before: Mapping[str, list[Row]]) -> Tasks:
    """Steps are timed as "auto" takes them, which takes other kernels for tensors on the CPU."""
    _small_times()
    backends.use_impl("triton")
    return _there(timings.continual_tasks(device, before))


def tuned_times(device: str, before: Mapping[str, list[Row]]) -> Tasks:
    _small_times()
    return _there(timings.tuned_tasks(device, before))


def compiled_times(device: str, before: Mapping[str, list[Row]]) -> Tasks:
    _small_times()
    return _there(timings.compiled_tasks(device, before))


def _small_times() -> None:
    """One small case of each family, of those that are timed on a GPU."""
    timings.attention_cases = lambda: iter([attention.attention(1, 16, keys=40, latents=5)])
    timings.intention_cases = lambda: iter([intention.layer(9, width=8)] if WHOLE else [])
    timings.nystrom_cases = lambda: iter([nystrom.pinv(5, 2)] if WHOLE else [])
    timings.continual_cases = lambda: iter([continual.step(8, 8, landmarks=3, calls=2)] if WHOLE else [])
    timings.rates_of = harness.rates_of = lambda device: RATES
    timings.BUDGET = 0.0
    runs.KERNELS["cpu"] = ("triton",)
    harness.peak_memory = lambda *_, **__: Peak(0, 0)
