"""Fixtures for the tests of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench import devices
from bench.runs import Run
from cmab_kernels import testing

from . import synthetic


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Seed torch, and fill uninitialised memory with NaN, so that an unwritten element is noticed."""
    torch.manual_seed(0)
    with testing.poisoned_memory():
        yield


@pytest.fixture(scope="session")
def run() -> Run:
    return synthetic.run()


@pytest.fixture
def on_a_gpu() -> Iterator[None]:
    """Cases as on a GPU."""
    devices.measure_on("cuda")
    yield
    devices.measure_on("cpu")
