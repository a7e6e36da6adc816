"""The functions that the cases share: this rank's part of data that all ranks know, and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_iter

COLLECTIVES = (
    *(name for name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single") if hasattr(dist, name)),
    *("all_gather", "all_reduce", "broadcast", "barrier", "reduce", "reduce_scatter_tensor", "all_gather_object"),
    *(() if hasattr(dist, "all_gather_single") else ("all_gather_into_tensor",)),
)
"""The functions of torch.distributed that communicate."""


def own(points: Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's part of `points`: the parts have different sizes, and if there are three ranks, the last part
    is empty."""
    if sizes is None:
        sizes = {1: [points.shape[dim]], 2: [3, points.shape[dim] - 3], 3: [3, points.shape[dim] - 3, 0]}[
            dist.get_world_size()
        ]
    return points.split(list(sizes), dim)[dist.get_rank()]


def close(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    for mine, other in zip(tree_iter(ours), tree_iter(theirs), strict=True):
        largest = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * max(1.0, largest))


def same_bits_on_all_ranks(tensors: Any) -> None:
    """Assert that every rank holds the same bits."""
    for tensor in tree_iter(tensors):
        numbers = tensor.detach().contiguous().view(-1).view(torch.uint8)
        found = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(found, numbers)
        assert all(torch.equal(each, numbers) for each in found)


def summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums over all ranks."""
    total = [tensor.detach().clone() for tensor in tensors]
    for tensor in total:
        dist.all_reduce(tensor)
    return total


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Yield a list, to which each collective in the context adds its name and the bytes that this rank sends."""
    calls: list[tuple[str, int]] = []
    before = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            message = args[1] if "gather" in name else args[0] if args else None
            calls.append((name, message.nbytes if isinstance(message, Tensor) else 0))
            return before[name](*args, **options)

        return call

    for name in before:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


@contextmanager
def raises(error: type[Exception], *words: str) -> Iterator[None]:
    """Assert that the context raises exactly this error, whose message has these words."""
    try:
        yield
    except Exception as raised:
        if type(raised) is not error or not all(word in str(raised) for word in words):
            raise
    else:
        raise AssertionError(f"no {error.__name__} was raised")
