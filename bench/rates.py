"""What this machine gives: exponentials, products and bytes a second, which the floors are computed with. Measured, the best of a few."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cmab_kernels.measure import seconds

from .floors import Rates

FMA_AN_EXPONENTIAL = 7
"""Instructions on the multiply-add units that a float32 exponential takes where there is none in hardware: two to reduce the argument, five
of a polynomial; the shortest that we know (NOTES.md)."""

ORDER = 1024
MEMORY_BYTES = 2**28
ROUNDS = 5


def rates_of(device: str) -> Rates:
    """Of the GPU, or of as many threads of the CPU as torch has now."""
    if device == "cuda":
        from .gpu.rates import measured_rates  # which needs Triton

        return measured_rates(device)
    return _cpu_rates(torch.get_num_threads())


@cache
def _cpu_rates(threads: int) -> Rates:
    assert threads == torch.get_num_threads()
    matrix = {str(dtype).removeprefix("torch."): _products(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    matrix["bfloat16"] = max(matrix["bfloat16"], matrix["float32"])  # it can be widened first
    matrix["float16"] = matrix["float32"]
    return Rates(matrix["float32"] / 2 / FMA_AN_EXPONENTIAL, _memory(), matrix, together=True)


def _products(dtype: torch.dtype) -> float:
    a, b = (torch.randn(ORDER, ORDER, device="cpu").to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * ORDER**3 / _best(lambda: torch.mm(a, b, out=out))


def _memory() -> float:
    """Of copying, or of reading alone where that is faster."""
    source = torch.ones(MEMORY_BYTES // 4, device="cpu")
    target = torch.empty_like(source)
    return max(2 * MEMORY_BYTES / _best(lambda: target.copy_(source)), MEMORY_BYTES / _best(source.sum))


def _best(call: Callable[[], Any]) -> float:
    call()
    return min(seconds(call) for _ in range(ROUNDS))
