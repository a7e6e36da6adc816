# mypy: disable-error-code="no-untyped-def"
"""Gradients that are sums over rows: each program stores a share, and one launch adds up the shares of several."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ....runtime.dtypes import state_dtype
from ....runtime.triton_launch import kernel

GRADIENTS = 6
"""The most gradients that one launch adds up: a feed-forward layer has so many."""


@triton.jit
def _add(shares, gradient, count, width, block, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Add up block number `block` of columns of shares (count, width) if there is one.

    Return its number among the blocks that come after these.
    """
    blocks = tl.cdiv(width, BLOCK)
    if (block >= 0) & (block < blocks):
        column = block * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], shares.dtype.element_ty)
        for start in range(0, count, CHUNK):
            row = start + tl.arange(0, CHUNK)
            pointers = shares + (row.to(tl.int64)[:, None] * width + column[None, :])
            total += tl.sum(tl.load(pointers, mask=(row < count)[:, None] & (column < width)[None, :], other=0.0), 0)
        tl.store(gradient + column.to(tl.int64), total.to(gradient.dtype.element_ty), mask=column < width)
    return block - blocks


@kernel()
def _add_shares(
    first,
    second,
    third,
    fourth,
    fifth,
    sixth,
    to_first,
    to_second,
    to_third,
    to_fourth,
    to_fifth,
    to_sixth,
    counts: tl.int32,
    widths: tl.int32,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The sums of up to six sets of shares (count, width) over their rows; a program has BLOCK columns of one set."""
    block = _add(first, to_first, counts[0], widths[0], tl.program_id(0), BLOCK, CHUNK)
    if second is not None:
        block = _add(second, to_second, counts[1], widths[1], block, BLOCK, CHUNK)
    if third is not None:
        block = _add(third, to_third, counts[2], widths[2], block, BLOCK, CHUNK)
    if fourth is not None:
        block = _add(fourth, to_fourth, counts[3], widths[3], block, BLOCK, CHUNK)
    if fifth is not None:
        block = _add(fifth, to_fifth, counts[4], widths[4], block, BLOCK, CHUNK)
    if sixth is not None:
        block = _add(sixth, to_sixth, counts[5], widths[5], block, BLOCK, CHUNK)


def shares_of(x: Tensor, *shape: int) -> Tensor:
    """Memory for shares of sums over x."""
    return x.new_empty(shape, dtype=state_dtype(x.dtype))


def added(shares: Sequence[Tensor | None], x: Tensor) -> list[Tensor | None]:
    """The sums over the first dimension of each of the shares, in the dtype of x, or None for None."""
    sums = [None if each is None else x.new_empty(each.shape[1:]) for each in shares]
    pairs = [(each, into) for each, into in zip(shares, sums, strict=True) if each is not None and into is not None]
    for start in range(0, len(pairs), GRADIENTS):
        _launch(pairs[start : start + GRADIENTS])
    return sums


def gradients(of_rows: Sequence[Tensor | None], shares: Sequence[Tensor | None], x: Tensor) -> tuple[Tensor, ...]:
    """The gradients of rows, and those that are sums of shares, in the dtype of x; an empty tensor for each None."""
    return tuple(x.new_empty(0) if t is None else t for t in (*of_rows, *added(shares, x)))


def _launch(pairs: Sequence[tuple[Tensor, Tensor]], block: int = 64) -> None:
    absent = (None,) * (GRADIENTS - len(pairs))
    counts = [each.shape[0] for each, _ in pairs]
    widths = [into.numel() for _, into in pairs]
    _add_shares(
        sum(-(-width // block) for width in widths),
        *(each for each, _ in pairs),
        *absent,
        *(into for _, into in pairs),
        *absent,
        (*counts, *(0 for _ in absent)),
        (*widths, *(0 for _ in absent)),
        BLOCK=block,
        CHUNK=32,
    )
