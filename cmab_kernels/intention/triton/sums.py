# mypy: disable-error-code="no-untyped-def"
"""The sums K'WK and K'WV of each run of keys, and their sum over the runs.

A program forms one tile of one sum. If all columns fit in one tile, it forms both sums and reads each key once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.tiles import chosen_once
from ...runtime.triton_launch import (
    Kernel,
    allows_tf32,
    is_aligned,
    kernel,
    mask_bytes,
    natural_alignment,
    on_device,
    strides_of,
    triton_dtype,
)
from ...runtime.triton_products import product
from ...runtime.triton_rows import kept_keys, load_tile, load_weights, rows_at, tile_at
from ..contract import Gram, RidgeUpdate
from ..state import count_keys
from .launch import Cut, GramTiles, cut_keys, gram_products, gram_tiles, over_sets, row_strides

IN_FLOAT32 = tl.constexpr(512)
"""The keys that are summed in float32 before the sum is added to a float64 total.

A million additions in float32 would cost four digits.
"""


@triton.jit
def _add_keys(
    sums,
    given,
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
    """Add one tile of keys to the sums; `given` are (key, value, weights, mask)."""
    key, value, weights, mask = given
    gram, moment = sums
    batch, head, row, column = place
    key_strides, value_strides, weight_strides, mask_strides = strides
    keep = kept_keys(mask, mask_strides, batch, start, last, BLOCK_N, True)
    left = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, gram.shape[0], ALIGN[0], row), keep, D, row)
    right = left
    if GRAM and gram.shape[0] < D:
        pointers = tile_at(key, key_strides, batch, head, start, BLOCK_N, gram.shape[1], ALIGN[0], column)
        right = load_tile(pointers, keep, D, column)
    if weights is not None:
        weight = load_weights(weights, weight_strides, batch, head, start, keep)
        left = left.to(OPERAND) * weight.to(OPERAND)
    if GRAM:
        gram += product(tl.trans(left), right, OPERAND, PRECISION)
    if MOMENT:
        pointers = tile_at(value, value_strides, batch, head, start, BLOCK_N, moment.shape[1], ALIGN[1], column)
        values = load_tile(pointers, keep, E, column)
        moment += product(tl.trans(left), values, OPERAND, PRECISION)
    return gram, moment


@triton.jit
def _put(total, before, after, rows, column, keep, WIDTH: tl.constexpr, TURNED: tl.constexpr):
    """Store a tile of sums, or its transpose if TURNED, into `rows` of `after` from `column` on.

    If `before` is not None, its tile is added.
    """
    COLUMNS: tl.constexpr = total.shape[0] if TURNED else total.shape[1]
    to = rows_at(after, rows, WIDTH, COLUMNS, column)
    to = tl.trans(to) if TURNED else to
    if before is not None:
        source = rows_at(before, rows, WIDTH, COLUMNS, column)
        total = tl.load(tl.trans(source) if TURNED else source, mask=keep, other=0.0) + total
    tl.store(to, total, mask=keep)


@triton.jit
def _is_finite(total):
    return tl.min(tl.min((tl.abs(total) < float("inf")).to(tl.int32), 1), 0) != 0


@kernel("key", "value", "weights", "mask", "gram_before", "moment_before", "count_before")
def _gram(
    key,
    value,
    weights,
    mask,
    offsets,
    gram_before,
    moment_before,
    count_before,
    gram,
    moment,
    count,
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
    """Compute one tile of the sums of one run of keys, added to sums before them if there are any.

    This also counts the keys of a head. With `offsets` a run is one of the packed sets.
    """
    GRAM: tl.constexpr = gram is not None
    MOMENT: tl.constexpr = moment is not None
    DOWN: tl.constexpr = triton.cdiv(D, TILE_D)
    ACROSS: tl.constexpr = DOWN if GRAM else triton.cdiv(E, TILE_E)
    runs, length = cut
    slot = tl.program_id(0) // (DOWN * ACROSS)
    row = tl.program_id(0) // ACROSS % DOWN * TILE_D
    column = tl.program_id(0) % ACROSS * (TILE_D if GRAM else TILE_E)
    if count is not None and tl.program_id(0) % (DOWN * ACROSS * runs) == 0:
        seen = tl.load(count_before + slot // runs) if count_before is not None else tl.cast(0, tl.int64)
        tl.store(count + slot // runs, seen + keys)
    if GRAM and column > row:  # by symmetry the program of the mirrored tile stores this one
        return
    given = (key, value, weights, mask)
    place = (slot // runs // heads, slot // runs % heads, row, column)
    first = slot % runs * length
    last = tl.minimum(first + length, keys)
    if offsets is not None:
        first = tl.load(offsets + place[0])
        last = tl.load(offsets + place[0] + 1)

    totals = (tl.zeros([TILE_D, TILE_D], tl.float64), tl.zeros([TILE_D, TILE_E], tl.float64))
    exact = last
    if tl.float64 != OPERAND:
        sums = (tl.zeros([TILE_D, TILE_D], tl.float32), tl.zeros([TILE_D, TILE_E], tl.float32))
        for start in range(first, last, BLOCK_N):
            sums = _add_keys(
                sums, given, strides, place, start, last, D, E, GRAM, MOMENT, BLOCK_N, ALIGN, OPERAND, PRECISION
            )
            if (start - first) % IN_FLOAT32 == IN_FLOAT32 - BLOCK_N:
                totals = (totals[0] + sums[0].to(tl.float64), totals[1] + sums[1].to(tl.float64))
                sums = (tl.zeros([TILE_D, TILE_D], tl.float32), tl.zeros([TILE_D, TILE_E], tl.float32))
        totals = (totals[0] + sums[0].to(tl.float64), totals[1] + sums[1].to(tl.float64))
        sound = _is_finite(totals[0]) & _is_finite(totals[1])  # else float32 overflowed
        totals = (tl.where(sound, totals[0], 0.0), tl.where(sound, totals[1], 0.0))
        exact = tl.where(sound, first, last)
    for start in range(first, exact, EXACT_N):
        totals = _add_keys(
            totals, given, strides, place, start, last, D, E, GRAM, MOMENT, EXACT_N, ALIGN, tl.float64, "ieee"
        )
    if offsets is not None:
        bad = tl.load(offsets + tl.num_programs(0) // (heads * DOWN * ACROSS) + 1) != 0
        totals = (tl.where(bad, float("nan"), totals[0]), tl.where(bad, float("nan"), totals[1]))

    rows = row + tl.arange(0, TILE_D)
    if GRAM:
        columns = column + tl.arange(0, TILE_D)
        lower = (rows[:, None] >= columns[None, :]) & (rows < D)[:, None]
        _put(totals[0], gram_before, gram, slot.to(tl.int64) * D + rows, column, lower, D, False)
        _put(totals[0], gram_before, gram, slot.to(tl.int64) * D + columns, row, lower, D, True)
    if MOMENT:
        columns = column + tl.arange(0, TILE_E)
        inside = (rows < D)[:, None] & (columns < E)[None, :]
        _put(totals[1], moment_before, moment, slot.to(tl.int64) * D + rows, column, inside, E, False)


@kernel("before")
def _add_runs(parts, before, total, runs: tl.int32, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Add the partial sums of all runs, in the order of the runs, and then the sums `before` if not None."""
    BLOCKS: tl.constexpr = triton.cdiv(ELEMENTS, BLOCK)
    matrix = (tl.program_id(0) // BLOCKS).to(tl.int64)
    element = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = element < ELEMENTS
    sums = tl.zeros([BLOCK], tl.float64)
    for chunk in range(0, runs, CHUNK):
        run = chunk + tl.arange(0, CHUNK)
        pointers = parts + ((matrix * runs + run)[:, None] * ELEMENTS + element[None, :])
        sums += tl.sum(tl.load(pointers, mask=(run < runs)[:, None] & inside[None, :], other=0.0), 0)
    if before is not None:
        sums = tl.load(before + (matrix * ELEMENTS + element), mask=inside, other=0.0) + sums
    tl.store(total + (matrix * ELEMENTS + element), sums, mask=inside)


@chosen_once
def _chosen(
    dtype: torch.dtype, device: torch.device, D: int, E: int, exact: bool, weighted: bool, aligned: bool, tf32: bool
) -> tuple[Kernel, GramTiles]:
    """`_gram` for such inputs, and its tiles; `tf32` says whether torch allows it."""
    products = gram_products(dtype, exact, weighted)
    tiles = gram_tiles(products, device, D, E)
    align = tuple([natural_alignment(dtype, width) if aligned else 0 for width in (D, E)])
    precision = {"OPERAND": triton_dtype(products.operand), "PRECISION": products.input_precision}
    return _gram.given(D=D, E=E, ALIGN=align, **precision, **tiles._asdict()), tiles


Sums = tuple[Any, Any]
"""The tensors K'WK and K'WV, or None if not wanted."""

_NOTHING = (None, None, None)


def gram(inputs: Gram) -> tuple[Tensor, Tensor]:
    """Return (K'WK, K'WV) in float64; each that `parts` does not ask for is an empty tensor."""
    key, value, weights, key_padding_mask, cu_seqlens, parts, exact, _ = inputs
    gram, moment = _sums(key, value, weights, key_padding_mask, cu_seqlens, parts, exact, _NOTHING, None)
    return _or_empty(gram, key), _or_empty(moment, key)


def _or_empty(sums: Tensor | None, key: Tensor) -> Tensor:
    return key.new_empty(0, dtype=torch.float64) if sums is None else sums


def ridge_update(inputs: RidgeUpdate) -> tuple[Tensor, ...]:
    """Return the sums over the keys, formed in float64, and the number of keys,
    each plus the one before if not None."""
    key, value, weights, key_padding_mask, cu_seqlens, gram, moment, count, _ = inputs
    B, H, _, _ = key.shape
    before = _contiguous(gram), _contiguous(moment), _contiguous(count)
    if key_padding_mask is not None or cu_seqlens is not None:
        sums = _sums(key, value, weights, key_padding_mask, cu_seqlens, (True, True), True, (*before[:2], None), None)
        return *sums, count_keys(key, key_padding_mask, cu_seqlens, count)
    counted = key.new_empty(B, H, dtype=torch.int64)
    return *_sums(key, value, weights, None, None, (True, True), True, before, counted), counted


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _sums(
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    parts: tuple[int, int],
    exact: bool,
    before: tuple[Any, Any, Any],
    count: Tensor | None,
) -> Sums:
    """The `parts` of the sums, added to those `before`: these are sums and a number of keys, or None.

    `count` receives the number of keys.
    """
    launch, tiles, inputs, shape = _prepared(key, value, weights, key_padding_mask, cu_seqlens, exact)
    with on_device(key):
        if _both_at_once(tiles, shape):
            return _in_one_pass(launch, tiles, inputs, shape, parts, before, count)
        gram_before, moment_before, count_before = before
        gram = moment = None
        if parts[0]:
            before = (gram_before, None, count_before)
            gram, _ = _in_one_pass(launch, tiles, inputs, shape, (True, False), before, count)
        if parts[1]:
            before = (None, moment_before, None)
            _, moment = _in_one_pass(launch, tiles, inputs, shape, (False, True), before, None)
    return gram, moment


def sums_of_runs(
    key: Tensor, value: Tensor, weights: Tensor | None, key_padding_mask: Tensor | None, cut: Cut
) -> tuple[Tensor, Tensor]:
    """K'WK and K'WV of each run of keys, formed in float64: (B, H, runs, D, *)."""
    launch, tiles, inputs, shape = _prepared(key, value, weights, key_padding_mask, None, True)
    with on_device(key):
        if _both_at_once(tiles, shape):
            gram, moment = _of_runs(launch, tiles, inputs, shape, (True, True), cut, _NOTHING, None)
        else:
            gram, _ = _of_runs(launch, tiles, inputs, shape, (True, False), cut, _NOTHING, None)
            _, moment = _of_runs(launch, tiles, inputs, shape, (False, True), cut, _NOTHING, None)
    B, H, _, D, E = shape
    return gram.view(B, H, cut.runs, D, D), moment.view(B, H, cut.runs, D, E)


def _prepared(
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    exact: bool,
) -> tuple[Any, ...]:
    """The kernel for these inputs, its tiles, the inputs in its form, and their extents B, H, N, D, E."""
    *_, D = key.shape
    E = value.shape[-1]
    launch, tiles = _chosen(
        key.dtype, key.device, D, E, exact, weights is not None, is_aligned(key, value), allows_tf32()
    )
    offsets, rows = None, (key, value, weights, mask_bytes(key_padding_mask))
    if cu_seqlens is not None:
        offsets, rows = over_sets(cu_seqlens, rows)
    return launch, tiles, (*rows, offsets), (*rows[0].shape, E)


def _both_at_once(tiles: GramTiles, shape: Any) -> bool:
    """Whether a tile holds all columns, so that one pass over the keys gives both sums."""
    *_, D, E = shape
    return tiles.TILE_D >= D and tiles.TILE_E >= E


def _in_one_pass(
    launch: Kernel, tiles: GramTiles, inputs: Any, shape: Any, parts: tuple[int, int], before: Any, count: Tensor | None
) -> Sums:
    """Like `_sums`, with one reading of the keys; `shape` is B, H, N, D, E.

    If the keys are one run, as those of packed sets are, the same kernel adds the sums before.
    """
    *_, N, D, _ = shape
    packed = inputs[-1] is not None
    cut = Cut(1, N) if packed else cut_keys(N, D, _programs(tiles, shape, parts))
    if cut.runs == 1:
        return _of_runs(launch, tiles, inputs, shape, parts, cut, before, count)
    gram, moment = _of_runs(launch, tiles, inputs, shape, parts, cut, _NOTHING, count)
    if count is not None and before[2] is not None:
        count += before[2]
    return _over_runs(gram, before[0]), _over_runs(moment, before[1])


def _programs(tiles: GramTiles, shape: Any, parts: tuple[int, int]) -> int:
    """The number of programs that a run of the keys takes."""
    *_, D, E = shape
    down = -(-D // tiles.TILE_D)
    return down * (down if parts[0] else -(-E // tiles.TILE_E))


def _of_runs(
    launch: Kernel,
    tiles: GramTiles,
    inputs: Any,
    shape: Any,
    parts: tuple[int, int],
    cut: Cut,
    before: Any,
    count: Tensor | None,
) -> Sums:
    """The `parts` of the sums of each run: (B, H, runs, D, *), or (B, H, D, *) if there is a single run."""
    key, value, weights, mask, _ = inputs
    B, H, N, D, E = shape
    over = (B, H) if cut.runs == 1 else (B, H, cut.runs)
    gram = key.new_empty(*over, D, D, dtype=torch.float64) if parts[0] else None
    moment = key.new_empty(*over, D, E, dtype=torch.float64) if parts[1] else None
    strides = (key.stride(), value.stride(), row_strides(weights), strides_of(mask, 2))
    programs, to = B * H * cut.runs * _programs(tiles, shape, parts), (gram, moment if E else None, count)
    launch(programs, *inputs, *before, *to, strides, H, N, tuple(cut))
    return gram, moment


def _over_runs(parts: Tensor | None, before: Tensor | None) -> Tensor | None:
    """The sums (B, H, D, width) over the runs of `parts` (B, H, runs, D, width), plus those `before` if not None."""
    if parts is None:
        return None
    B, H, runs, D, width = parts.shape
    total = parts.new_empty(B, H, D, width)
    _add_runs(B * H * -(-D * width // 64), parts, before, total, runs, ELEMENTS=D * width, BLOCK=64, CHUNK=32)
    return total
