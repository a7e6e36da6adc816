"""The parts that every call of a CUDA kernel needs: a check that the GPU can run it, and a launch on the GPU's current
stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .extension import load_cuda
from .tracing import specialised, traced_as_constant

CUDA = load_cuda()
MAX_ORDER = CUDA.MAX_ORDER


@traced_as_constant
def capability(index: int | None) -> tuple[int, int]:
    """The compute capability of the GPU of this index."""
    return torch.cuda.get_device_capability(index)


@traced_as_constant
def _kernel_problem(index: int | None, shared_bytes_of: str, sizes: tuple[int, ...]) -> str | None:
    problem, available = _properties(index)
    shared_bytes = getattr(CUDA, shared_bytes_of)(*sizes)
    if problem is None and available < shared_bytes:
        return (
            f"it needs {-(-shared_bytes // 1024)} KiB of shared memory in a block for this shape, and the GPU has "
            f"{available // 1024}"
        )
    return problem


def gpu_problem(index: int | None, shared_bytes_of: str, *sizes: int) -> str | None:
    """The reason why the GPU of this index cannot run a kernel, or None if it can. The extension's function of this
    name returns the bytes of shared memory that a block of the kernel needs for these sizes. A compiler does not trace
    functions of the extension, so it treats the result as a constant."""
    return _kernel_problem(index, shared_bytes_of, tuple([specialised(size) for size in sizes]))


@cache
def _properties(index: int | None) -> tuple[str | None, int]:
    """The reason why this GPU cannot run any CUDA kernel, or None, and the bytes of shared memory that a block may
    have."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU", 0
    major, minor = capability(index)
    if major < 8:
        return f"it was built for compute capability 8.0 and up, and the GPU has {major}.{minor}", 0
    try:
        return None, CUDA.shared_memory(torch.cuda.current_device() if index is None else index)
    except RuntimeError as error:
        return f"the CUDA runtime that it was built with cannot use the GPU ({error}); a newer driver may be needed", 0


def launch(function: Callable[..., None], device: torch.device, **arguments: Any) -> None:
    """Call `function`, which launches kernels for tensors on `device`, on the current stream of the device. The
    caller's current device is restored.

    torch changes the device, and csrc does not: torch makes no context on a GPU that the process has not used.
    """
    with torch.cuda._DeviceGuard(device.index):  # like torch.cuda.device, without its checks, which take 2 us
        function(**arguments, stream=torch._C._cuda_getCurrentRawStream(device.index))
