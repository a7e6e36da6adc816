# mypy: disable-error-code="no-untyped-def"
"""The sums K'WK and K'WV of each run of keys, and their sum over the runs.

A program forms one tile of one sum. If all columns fit in one tile, it forms both sums and reads each key once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tiles import chosen_once
from ...triton_common import (
    alignment,
    allows_tf32,
    kept_keys,
    kernel,
    load_tile,
    mask_bytes,
    on_device,
    product,
    rows_at,
    tile_at,
    triton_dtype,
)
from .launch import cut_keys, gram_products, gram_tiles, row_strides

IN_FLOAT32 = tl.constexpr(512)
"""The keys that are summed in float32 before the sum is added to a float64 total: a million additions in float32 cost four digits."""


@triton.jit
def _add_keys(
    sums,
    key,
    value,
    weights,
    mask,
    strides,
    place,
    start,
    last,
    D: tl.constexpr,
    E: tl.constexpr,
    GRAM: tl.constexpr,
    MOMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of keys to the sums."""
    gram, moment = sums
    batch, head, row, column = place
    key_strides, value_strides, weight_strides, mask_strides = strides
    keep = kept_keys(mask, mask_strides, batch, start, last, BLOCK_N, True)
    left = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, gram.shape[0], ALIGN[0], row), keep, D, row)
    right = left
    if GRAM and gram.shape[0] < D:
        right = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, gram.shape[1], ALIGN[0], column), keep, D, column)
    if weights is not None:
        weight = tl.load(tile_at(weights, weight_strides, batch, head, start, BLOCK_N, 1, 0), mask=keep[:, None], other=0.0)
        left = left.to(OPERAND) * weight.to(OPERAND)
    if GRAM:
        gram += product(tl.trans(left), right, OPERAND, PRECISION)
    if MOMENT:
        values = load_tile(tile_at(value, value_strides, batch, head, start, BLOCK_N, moment.shape[1], ALIGN[1], column), keep, E, column)
        moment += product(tl.trans(left), values, OPERAND, PRECISION)
    return gram, moment


@triton.jit
def _is_finite(total):
    return tl.min(tl.min((tl.abs(total) < float("inf")).to(tl.int32), 1), 0) != 0


@kernel("key", "value", "weights", "mask")
def _gram(
    key,
    value,
    weights,
    mask,
    gram,
    moment,
    strides: tl.int64,
    heads: tl.int32,
    keys: tl.int32,
    cut: tl.int32,
    D: tl.constexpr,
    E: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT_N: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one tile of the sums of one run of keys."""
    GRAM: tl.constexpr = gram is not None
    MOMENT: tl.constexpr = moment is not None
    DOWN: tl.constexpr = triton.cdiv(D, TILE_D)
    ACROSS: tl.constexpr = DOWN if GRAM else triton.cdiv(E, TILE_E)
    runs, length = cut
    slot = tl.program_id(0) // (DOWN * ACROSS)
    row = tl.program_id(0) // ACROSS % DOWN * TILE_D
    column = tl.program_id(0) % ACROSS * (TILE_D if GRAM else TILE_E)
    if GRAM and column > row:  # by symmetry the program of the mirrored tile stores this one
        return
    place = (slot // runs // heads, slot // runs % heads, row, column)
    first = slot % runs * length
    last = tl.minimum(first + length, keys)

    totals = (tl.zeros([TILE_D, TILE_D], tl.float64), tl.zeros([TILE_D, TILE_E], tl.float64))
    exact = last
    if tl.float64 != OPERAND:
        sums = (tl.zeros([TILE_D, TILE_D], tl.float32), tl.zeros([TILE_D, TILE_E], tl.float32))
        for start in range(first, last, BLOCK_N):
            sums = _add_keys(
                sums, key, value, weights, mask, strides, place, start, last, D, E, GRAM, MOMENT, BLOCK_N, ALIGN, OPERAND, PRECISION
            )
            if (start - first) % IN_FLOAT32 == IN_FLOAT32 - BLOCK_N:
                totals = (totals[0] + sums[0].to(tl.float64), totals[1] + sums[1].to(tl.float64))
                sums = (tl.zeros([TILE_D, TILE_D], tl.float32), tl.zeros([TILE_D, TILE_E], tl.float32))
        totals = (totals[0] + sums[0].to(tl.float64), totals[1] + sums[1].to(tl.float64))
        sound = _is_finite(totals[0]) & _is_finite(totals[1])  # else float32 may have overflowed, and the run is summed again in float64
        totals = (tl.where(sound, totals[0], 0.0), tl.where(sound, totals[1], 0.0))
        exact = tl.where(sound, first, last)
    for start in range(first, exact, EXACT_N):
        totals = _add_keys(
            totals, key, value, weights, mask, strides, place, start, last, D, E, GRAM, MOMENT, EXACT_N, ALIGN, tl.float64, "ieee"
        )

    rows = row + tl.arange(0, TILE_D)
    if GRAM:
        columns = column + tl.arange(0, TILE_D)
        lower = (rows[:, None] >= columns[None, :]) & (rows < D)[:, None]
        tl.store(rows_at(gram, slot.to(tl.int64) * D + rows, D, TILE_D, column), totals[0], mask=lower)
        tl.store(tl.trans(rows_at(gram, slot.to(tl.int64) * D + columns, D, TILE_D, row)), totals[0], mask=lower)
    if MOMENT:
        columns = column + tl.arange(0, TILE_E)
        inside = (rows < D)[:, None] & (columns < E)[None, :]
        tl.store(rows_at(moment, slot.to(tl.int64) * D + rows, E, TILE_E, column), totals[1], mask=inside)


@kernel()
def _add_runs(parts, total, runs: tl.int32, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Add the partial sums of all runs, in the order of the runs."""
    BLOCKS: tl.constexpr = triton.cdiv(ELEMENTS, BLOCK)
    matrix = (tl.program_id(0) // BLOCKS).to(tl.int64)
    element = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = element < ELEMENTS
    sums = tl.zeros([BLOCK], tl.float64)
    for chunk in range(0, runs, CHUNK):
        run = chunk + tl.arange(0, CHUNK)
        pointers = parts + ((matrix * runs + run)[:, None] * ELEMENTS + element[None, :])
        sums += tl.sum(tl.load(pointers, mask=(run < runs)[:, None] & inside[None, :], other=0.0), 0)
    tl.store(total + (matrix * ELEMENTS + element), sums, mask=inside)


@chosen_once
def _constants(dtype: torch.dtype, device: torch.device, D: int, E: int, exact: bool, weighted: bool, tf32: bool) -> dict[str, Any]:
    """The constants of `_gram`, but for what is known of the addresses; `tf32` is what `gram_products` sees."""
    products = gram_products(dtype, exact, weighted)
    precision = {"OPERAND": triton_dtype(products.operand), "PRECISION": products.input_precision}
    return {"D": D, "E": E, **precision, **gram_tiles(products, device, D, E)._asdict()}


def _sums(
    parts: tuple[bool, bool], key: Tensor, value: Tensor, weights: Tensor | None, mask: Tensor | None, chosen: dict[str, Any]
) -> list[Tensor | None]:
    """[K'WK, K'WV] in one pass over the keys; None for one that `parts` does not ask for."""
    B, H, N, D = key.shape
    down, across = -(-D // chosen["TILE_D"]), -(-chosen["E"] // chosen["TILE_E"])
    programs = down * (down if parts[0] else across)
    runs, length = cut_keys(N, D, programs)
    over = (B, H) if runs == 1 else (B, H, runs)
    sums = [key.new_empty(*over, D, E, dtype=torch.float64) if part else None for part, E in zip(parts, (D, chosen["E"]), strict=True)]
    _gram(
        B * H * runs * programs,
        key,
        value,
        weights,
        mask,
        sums[0],
        sums[1] if chosen["E"] else None,
        (key.stride(), value.stride(), row_strides(weights), (0, 0) if mask is None else mask.stride()),
        H,
        N,
        (runs, length),
        ALIGN=alignment(key, value),
        **chosen,
    )
    return sums if runs == 1 else [None if part is None else _over_runs(part) for part in sums]


def _over_runs(parts: Tensor) -> Tensor:
    """Partial sums (B, H, runs, D, width) added over the runs: (B, H, D, width)."""
    B, H, runs, D, width = parts.shape
    total = parts.new_empty(B, H, D, width)
    _add_runs(B * H * -(-D * width // 64), parts, total, runs, ELEMENTS=D * width, BLOCK=64, CHUNK=32)
    return total


def gram(
    key: Tensor, value: Tensor, weights: Tensor | None, key_padding_mask: Tensor | None, parts: tuple[bool, bool], exact: bool
) -> tuple[Tensor, Tensor]:
    """Return (K'WK, K'WV) in float64; an empty tensor for one that `parts` does not ask for."""
    mask = mask_bytes(key_padding_mask)
    D, E = key.shape[-1], value.shape[-1]
    chosen = _constants(key.dtype, key.device, D, E, exact, weights is not None, allows_tf32())
    with on_device(key):
        at_once = chosen["TILE_D"] >= D and chosen["TILE_E"] >= E
        passes = [parts] if at_once else [wanted for wanted in ((parts[0], False), (False, parts[1])) if any(wanted)]
        made = [_sums(wanted, key, value, weights, mask, chosen) for wanted in passes]
    first, second = (next((part for part in of_all if part is not None), None) for of_all in zip(*made, strict=True))
    return _or_empty(first, key), _or_empty(second, key)


def _or_empty(sums: Tensor | None, key: Tensor) -> Tensor:
    return key.new_empty(0, dtype=torch.float64) if sums is None else sums
