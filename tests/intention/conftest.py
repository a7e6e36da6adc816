from __future__ import annotations

import pytest
import torch

import cmab_kernels


@pytest.fixture(params=["reference", "native"])
def impl(request: pytest.FixtureRequest) -> str:
    """Every implementation that this processor runs."""
    sample = torch.zeros(1, 1, 1, 1)
    row = next(row for row in cmab_kernels.explain("intention", sample, sample, sample) if row.impl == request.param)
    if not row.usable:
        pytest.skip(f"{row.impl} cannot run here: {row.reason}")
    return request.param
