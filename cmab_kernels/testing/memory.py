"""Memory that reveals faults: uninitialised memory filled with NaN, inputs and outputs between guard margins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

MARGIN = 512
"""The number of elements in each of the two guard margins, before and after a tensor."""


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within this context `torch.empty` and similar functions return NaN on any device, so elements that are never
    written show.

    torch fills memory while its deterministic algorithms are on. At the end that setting is restored.

    >>> with poisoned_memory():
    ...     torch.empty(2)
    tensor([nan, nan])
    """
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # Not all operators are deterministic on a GPU.
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    if not torch.empty(3).isnan().all():
        raise RuntimeError(
            "torch.utils.deterministic.fill_uninitialized_memory is off: uninitialised memory cannot be poisoned"
        )
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def between_margins(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of `tensor` with `MARGIN` elements of NaN (False for a bool mask) before and after it in
    memory.

    A kernel that reads out of bounds then returns NaN. For a mask, the kernel would count a key that does not exist.
    """
    filler = 0 if tensor.dtype == torch.bool else math.nan
    storage = torch.full((tensor.numel() + 2 * MARGIN,), filler, dtype=tensor.dtype, device=tensor.device)
    storage[MARGIN : MARGIN + tensor.numel()] = tensor.reshape(-1)
    return storage[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)


@contextmanager
def guarded_results() -> Iterator[None]:
    """Within this context `Tensor.new_empty` and `torch.empty_like` return tensors of NaN (77, True) between margins of
    the same value.

    At the end, raise `AssertionError` if a margin was written. Calls with other options, such as those of Triton's
    interpreter, are not changed.
    """
    storages: list[Tensor] = []
    plain = Tensor.new_empty

    def guarded(like: Tensor, *sizes: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        shape = sizes if isinstance(sizes[0], int) else tuple(sizes[0])
        if options:
            return plain(like, shape, dtype=dtype, **options)
        chosen = dtype or like.dtype
        storage = torch.full((math.prod(shape) + 2 * MARGIN,), _filler(chosen), dtype=chosen, device=like.device)
        storages.append(storage)
        return storage[MARGIN : storage.numel() - MARGIN].view(shape)

    def guarded_like(like: Tensor, dtype: torch.dtype | None = None, memory_format: Any = None) -> Tensor:
        return guarded(like, like.shape, dtype=dtype)

    with mock.patch.object(Tensor, "new_empty", guarded), mock.patch.object(torch, "empty_like", guarded_like):
        yield
    for storage in storages:
        margins = storage[:MARGIN], storage[storage.numel() - MARGIN :]
        untouched = (
            margin.isnan() if margin.is_floating_point() else margin == _filler(margin.dtype) for margin in margins
        )
        assert all(bool(part.all()) for part in untouched), "a result was written out of bounds"


def _filler(dtype: torch.dtype) -> float | bool:
    """Return the value that fills a margin of `guarded_results`."""
    return math.nan if dtype.is_floating_point else True if dtype == torch.bool else 77
