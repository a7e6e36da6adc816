from __future__ import annotations

import pytest
import torch

import cmab_kernels


def _usable(operator: str, impl: str) -> str:
    sample = torch.zeros(1, 1, 1, 1)
    given = (sample[0],) if operator == "iterative_pinv" else (sample, sample, sample)
    row = next(row for row in cmab_kernels.explain(operator, *given) if row.impl == impl)
    if not row.usable:
        pytest.skip(f"{row.impl} cannot run here: {row.reason}")
    return impl


@pytest.fixture(params=["reference", "native"])
def impl(request: pytest.FixtureRequest) -> str:
    """Every implementation of Nyström attention that this processor runs."""
    return _usable("iterative_pinv", request.param)


@pytest.fixture(params=["reference", "native"])
def step_impl(request: pytest.FixtureRequest) -> str:
    """Every implementation of the continual steps that this processor runs."""
    return _usable("continual_nystrom_step", request.param)


@pytest.fixture
def native() -> str:
    """Where tests are of the native implementation alone."""
    return _usable("iterative_pinv", "native")


@pytest.fixture
def native_step() -> str:
    return _usable("continual_nystrom_step", "native")
