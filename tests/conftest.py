"""What holds around the whole suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cmab_kernels.extension import load


def _instruction_sets() -> list[str]:
    try:
        return [name for name in load().instruction_sets() if name in ("portable", "avx2", "avx512")]
    except ImportError:
        return []


@pytest.fixture(params=_instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Those that every family has kernels for."""
    monkeypatch.setenv("CMAB_KERNELS_ISA", request.param)
    assert load().instruction_set() == request.param
    return request.param


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """One thread, unless a test sets another number: what is for small inputs takes ten times as long with more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that an element that nobody wrote is seen."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
