"""The device of the measurements, and settings that depend on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from cmab_kernels.measure import available_memory

_device = "cpu"


def device() -> str:
    """The measured device: "cpu" or "cuda"."""
    return _device


def measure_on(device: str) -> None:
    """Choose the device.

    It is not torch's default device: that is a mode, and every call would pass through it.
    """
    global _device
    _device = device


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set the number of threads of torch and of this package, here and in the process that measures memory; None keeps
    it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Set whether torch may multiply float32 in tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def generator(seed: int) -> torch.Generator:
    """The source of random numbers for `normal` on the measured device.

    A CPU needs seconds to draw numbers that a GPU reads in 1 ms.
    """
    return torch.Generator(device()).manual_seed(seed)


def normal(random: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """Normally distributed numbers on the measured device; `grad`: they require gradients."""
    return torch.randn(*shape, generator=random, device=random.device).to(dtype).requires_grad_(grad)


def lacking_memory(needed: float) -> str | None:
    """Return a report if `needed` bytes would take more than half of the free memory."""
    left = available_memory(device())
    return f"needs {needed / 2**30:.1f} GiB, of {left / 2**30:.1f} available" if needed > left / 2 else None
