"""The rates of this machine for the floors: exponentials, products and bytes per second, each as the best of a few
measurements."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cmab_kernels.measure import seconds

from .devices import tf32
from .floors import Rates

FMA_AN_EXPONENTIAL = 7
"""CPU multiply-add instructions for a float32 exponential without hardware support.

Two instructions reduce the argument, and five compute a polynomial; this is the shortest sequence that we know
(notes/attention.md).
"""

EXPONENTIALS_PER_CLOCK = 16
"""Exponentials per clock of one GPU multiprocessor (CUDA C++ Programming Guide, throughput of native arithmetic
instructions)."""

TF32_AN_EXACT_PRODUCT = 3
"""Products of matrix units in tf32 for one product of float32: each operand is split into two parts, and low times low
is left out.

Six products of bfloat16, with three parts, take as long.
"""

ORDER = {"cpu": 1024, "cuda": 8192}
BYTES = {"cpu": 2**28, "cuda": 2**30}
ROUNDS = 5


@cache
def rates_of(device: str, threads: int | None = None) -> Rates:
    """Rates of the GPU, or of this number of threads of the CPU; None means torch's current number."""
    if device == "cpu" and threads is None:
        return rates_of(device, torch.get_num_threads())
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    matrix = {str(dtype).removeprefix("torch."): _products(dtype, device) for dtype in dtypes}
    if device == "cuda":
        with tf32(True):
            matrix["tf32"] = _products(torch.float32, device)
        matrix["float32"] = max(matrix["float32"], matrix["tf32"] / TF32_AN_EXACT_PRODUCT)
        return Rates(_gpu_exponentials(), _memory(device), {**matrix, "float16": matrix["bfloat16"]})
    matrix["bfloat16"] = max(matrix["bfloat16"], matrix["float32"])  # it can be widened first
    matrix["float16"] = matrix["float32"]
    return Rates(matrix["float32"] / 2 / FMA_AN_EXPONENTIAL, _memory(device), matrix, together=True)


def _gpu_exponentials() -> float:
    import triton

    current = torch.cuda.current_device()
    clock = triton.runtime.driver.active.utils.get_device_properties(current)["sm_clock_rate"] * 1e3
    return EXPONENTIALS_PER_CLOCK * torch.cuda.get_device_properties(current).multi_processor_count * clock


def _products(dtype: torch.dtype, device: str) -> float:
    order = ORDER[device] // (2 if device == "cuda" and dtype == torch.float64 else 1)
    a, b = (torch.randn(order, order, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * order**3 / _best(lambda: torch.mm(a, b, out=out), device)


def _memory(device: str) -> float:
    """Bytes per second of copying, or of reading alone if that is faster."""
    source = torch.ones(BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    return max(
        2 * BYTES[device] / _best(lambda: target.copy_(source), device), BYTES[device] / _best(source.sum, device)
    )


def _best(call: Callable[[], Any], device: str) -> float:
    call()
    return min(seconds(call, device) for _ in range(ROUNDS))
