"""A stub of NVIDIA's driver library (`driver.c`) under Triton's own launcher. Kernels on CPU tensors are compiled,
loaded and launched as on a GPU. Then they do nothing, or a callback runs them.

It is used to count launches and programs, to measure the time that the host takes, and to run the compiled kernels on a
simulated machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from cmab_kernels.runtime import triton_launch
from cmab_kernels.testing.cubin import as_if_on

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_uint64, *[ctypes.c_uint32] * 5, ctypes.POINTER(ctypes.c_void_p))
_PTX: dict[int, Path] = {}
"""Handle of a loaded function -> the PTX from which it was assembled."""


class Launched(NamedTuple):
    """A launch as the driver sees it: the PTX of the kernel, programs, threads of a block, bytes of shared memory, and
    `parameters`, a pointer to the address of each parameter, in the order of the PTX."""

    ptx: Path
    grid: tuple[int, int, int]
    threads: int
    shared: int
    parameters: Any


class Stub:
    """The stub while it is active."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.stub_launches.restype = ctypes.c_long

    @property
    def launches(self) -> int:
        """The number of launches since the process began."""
        return self._library.stub_launches()


@contextlib.contextmanager
def stub(capability: int = 80, run: Callable[[Launched], None] | None = None) -> Iterator[Stub]:
    """Within this context, Triton's kernels take CPU tensors and are compiled for this compute capability; `run` is
    called for each launch.

    An exception of `run` is raised at the end of the context.
    """
    library, failures = _library(), []

    def on_launch(function: int, x: int, y: int, z: int, threads: int, shared: int, parameters: Any) -> None:
        try:
            if run and not failures:
                run(Launched(_PTX[function], (x, y, z), threads, shared, parameters))
        except BaseException as error:  # an exception must not pass through C
            failures.append(error)

    callback = _SIGNATURE(on_launch)
    before = driver.active if driver._active else None
    with as_if_on(capability), mock.patch.object(triton_launch, "_interpreter_problem", lambda query: None):
        driver.set_active(_Driver(capability + _DEVICE * next(_entered)))
        library.stub_call(callback if run else None)
        try:
            yield Stub(library)
        finally:
            library.stub_call(None)
            driver._active = before
    if failures:
        raise failures[0]


_DEVICE = 1000
_entered = itertools.count()


class _Driver(nvidia.CudaDriver):
    """Triton's driver for a device that is new each time, so that nothing is cached for it; the last digits of its
    number are its compute capability."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.get_device_capability = lambda device: divmod(device % _DEVICE, 10)
        self.get_current_device = lambda: number
        self.get_current_stream = lambda device: 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@cache
def _library() -> ctypes.CDLL:
    """The stub, compiled, and loaded for the rest of the process under the name by which the driver's library is
    opened."""
    folder = tempfile.mkdtemp()
    path = Path(folder, "libcuda.so.1")
    include = nvidia.include_dirs[0]
    source = Path(__file__).with_name("driver.c")
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1", source, "-o", path], check=True
    )
    triton.knobs.nvidia.libcuda_path = folder
    triton.knobs.runtime.kernel_load_end_hook.add(_remember)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _remember(module: Any, function: int, name: str, files: dict[str, str], *rest: Any) -> None:
    _PTX[function] = next(Path(path) for file, path in files.items() if file.endswith(".ptx"))
