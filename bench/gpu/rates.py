"""What this GPU gives, which the floors are computed with: measured where it can be, on random data."""

from __future__ import annotations

from functools import cache

import torch
import triton

from bench.floors import Rates

from .graphs import seconds_of

EXPONENTIALS_PER_CLOCK = 16
"""Of one multiprocessor's special function units (CUDA C++ Programming Guide, throughput of native arithmetic instructions)."""
ORDERS = {"bfloat16": 8192, "float32": 8192, "float64": 4096}
COPIED = 2**28
"""float32 numbers."""


class allow_tf32:
    """Within it torch may multiply float32 in tf32, or may not."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.allowed else "highest")

    def __exit__(self, *exception: object) -> None:
        torch.set_float32_matmul_precision(self.before)


@cache
def measured_rates(device: str) -> Rates:
    """Copying and matrix products; exponentials from the clock. float32 at the rate of tf32: the least that it can take."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    clock = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())["sm_clock_rate"] * 1e3
    matrix = {name: _products(getattr(torch, name), order, device) for name, order in ORDERS.items()}
    return Rates(EXPONENTIALS_PER_CLOCK * multiprocessors * clock, _copying(device), {**matrix, "float16": matrix["bfloat16"]})


def _copying(device: str) -> float:
    source = torch.randn(COPIED, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of([lambda: target.copy_(source)])


def _products(dtype: torch.dtype, order: int, device: str) -> float:
    a, b = (torch.randn(order, order, device=device, dtype=dtype) for _ in range(2))
    with allow_tf32(True):
        return 2 * order**3 / seconds_of([lambda: a @ b], 10)
