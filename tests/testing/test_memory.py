"""Poisoned memory and guard margins find the errors for which they are made."""

from __future__ import annotations

import pytest
import torch

import cmab_kernels.testing.memory as memory
from cmab_kernels.testing import between_margins, guarded_results, poisoned_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_write_out_of_bounds_is_seen(dtype: torch.dtype) -> None:
    for offset in (-1, 3):
        with pytest.raises(AssertionError, match="out of bounds"), guarded_results():
            result = torch.zeros(3).new_empty((3,), dtype=dtype)
            result.as_strided((1,), (1,), result.storage_offset() + offset).zero_()
    with guarded_results():
        torch.empty_like(torch.zeros(2, 3), dtype=dtype).zero_()


def test_a_read_out_of_bounds_gives_a_nan() -> None:
    inside = between_margins(torch.ones(2, 3))
    assert inside.isfinite().all() and inside.as_strided((1,), (1,), inside.storage_offset() + 6).isnan()
    assert inside.storage_offset() == memory.MARGIN


def test_what_was_switched_on_stays_on() -> None:
    with poisoned_memory():
        with poisoned_memory():
            pass
        assert torch.empty(2).isnan().all()
