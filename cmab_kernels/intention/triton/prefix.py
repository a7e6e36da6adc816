# mypy: disable-error-code="no-untyped-def"
"""The sums over all prefixes of the keys, and their gradient.

A key is part of its prefix and of all later ones, so the gradient is a scan in reverse. If chunks between two prefixes
are short, a tile holds STEPS keys in time by part of a matrix: one pass writes each sum, or reads each cotangent, once.
If they are long, `sums` and `row_products` compute the sums and gradients of chunks, and `scan` adds up the sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.dtypes import state_dtype
from ...runtime.triton_launch import alignment, kernel, mask_bytes, on_device, strides_of
from ...runtime.triton_rows import kept_keys, load_tile, load_weights, rows_at, rows_from, tile_at
from ..contract import GramBackward, PrefixRidge, PrefixRidgeBackward
from ..state import in_chunks
from . import scan
from .launch import Cut, row_strides
from .row_products import gram_backward
from .scan import add_up, cut_steps, sums_before, totals_of_runs
from .sums import sums_of_runs

FEW = 16
"""A chunk of fewer keys is short."""

KEYS = 8
"""The STEPS of a tile: as many as its threads can hold in registers, with a part of a matrix."""

ROWS = 16
"""The rows of a tile in the last step of the gradient of keys or values."""


@triton.jit
def _place(runs, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Return (head of a batch element, run, row and column of a tile) of a program."""
    tile = tl.program_id(0) % (DOWN * ACROSS)
    return (
        tl.program_id(0) // (DOWN * ACROSS) // runs,
        tl.program_id(0) // (DOWN * ACROSS) % runs,
        tile // ACROSS,
        tile % ACROSS,
    )


@triton.jit
def _tile_of(
    matrices, number, row, column, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return (pointers to, elements inside) a tile of each of some numbered contiguous (D, E) matrices."""
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    offsets = (
        number.to(tl.int64)[:, None, None] * (D * E) + (rows.to(tl.int64)[:, None] * E + columns[None, :])[None, :, :]
    )
    return matrices + offsets, ((rows < D)[:, None] & (columns < E)[None, :])[None, :, :]


@triton.jit
def _base(base, number, row, column, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of one of the matrices from which runs start, or zeros."""
    total = tl.zeros([ROWS, COLUMNS], tl.float64)
    if base is not None:
        pointers, inside = _tile_of(base, number + tl.zeros([1], tl.int32), row, column, D, E, ROWS, COLUMNS)
        total = tl.sum(tl.load(pointers, mask=inside, other=0.0), 0)
    return total


@triton.jit
def _kept(mask, strides, batch, at, last):
    """Whether each key takes part; keys from `last` on do not."""
    keep = at < last
    if mask is not None:
        keep &= (
            tl.load(mask + (batch.to(tl.int64) * strides[0] + at.to(tl.int64) * strides[1]), mask=keep, other=1) == 0
        )
    return keep


@triton.jit
def _rows(rows, strides, batch, head, at, keep, column, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The rows of these keys in float64, from a column on."""
    start = rows + (batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1])
    columns = (column + tl.arange(0, TILE)).to(tl.int64) * strides[3]
    return load_tile(start + (at.to(tl.int64)[:, None] * strides[2] + columns[None, :]), keep, WIDTH, column).to(
        tl.float64
    )


@kernel("key", "other", "weights", "mask", "base")
def _prefix_sums(
    key,
    other,
    weights,
    mask,
    base,
    sums,
    strides: tl.int64,
    sizes: tl.int32,
    every: tl.int32,
    cut: tl.int32,
    D: tl.constexpr,
    E: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_E: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute one tile of the sums over the prefixes that end in one run of keys.

    `other` are the keys again, or the values.
    """
    heads, keys, prefixes = sizes
    runs, length = cut
    key_strides, other_strides, weight_strides, mask_strides = strides
    slot, run, down, across = _place(runs, triton.cdiv(D, TILE_D), triton.cdiv(E, TILE_E))
    batch, head, row, column = slot // heads, slot % heads, down * TILE_D, across * TILE_E
    last = tl.minimum((run + 1) * length, keys)
    total = _base(base, slot * runs + run, row, column, D, E, TILE_D, TILE_E)
    for start in range(run * length, last, STEPS):
        at = start + tl.arange(0, STEPS)
        keep = _kept(mask, mask_strides, batch, at, last)
        left = _rows(key, key_strides, batch, head, at, keep, row, D, TILE_D)
        right = _rows(other, other_strides, batch, head, at, keep, column, E, TILE_E)
        terms = left[:, :, None] * right[:, None, :]  # unweighted, so that the sum of keys is symmetric to the last bit
        if weights is not None:
            weight = load_weights(weights, weight_strides, batch, head, start, keep)
            terms = terms * weight.to(tl.float64)[:, :, None]
        ends = ((at % every == every - 1) | (at == keys - 1)) & (at < last)
        pointers, inside = _tile_of(sums, slot.to(tl.int64) * prefixes + at // every, row, column, D, E, TILE_D, TILE_E)
        tl.store(pointers, total[None, :, :] + tl.cumsum(terms, 0), mask=inside & ends[:, None, None])
        total += tl.sum(terms, 0)


@kernel("dsums", "key", "other", "mask", "base")
def _send_sums_back(
    dsums,
    key,
    other,
    mask,
    base,
    to_key,
    to_other,
    dstate,
    strides: tl.int64,
    sizes: tl.int32,
    every: tl.int32,
    cut: tl.int32,
    planes: tl.int32,
    D: tl.constexpr,
    E: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_E: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute what one tile of A sends to the keys of one run: A other, A' key.

    A is the sum of the cotangents of all prefixes from a key's own on; it is summed from the last run to the first.
    Each tile has its own plane in the rows of results: `planes` are the number of planes of `to_key` and the first
    plane of this matrix, and the same for `to_other`.
    """
    heads, keys, prefixes = sizes
    runs, length = cut
    planes_key, first_key, planes_other, first_other = planes
    key_strides, other_strides, mask_strides = strides
    slot, run, down, across = _place(runs, triton.cdiv(D, TILE_D), triton.cdiv(E, TILE_E))
    batch, head, row, column = slot // heads, slot % heads, down * TILE_D, across * TILE_E
    first = run * length
    last = tl.minimum(first + length, keys)
    total = _base(base, slot * runs + run, row, column, D, E, TILE_D, TILE_E)
    for back in range(0, last - first, STEPS):
        at = first + ((last - first - 1) // STEPS * STEPS - back + STEPS - 1 - tl.arange(0, STEPS))
        ends = ((at % every == every - 1) | (at == keys - 1)) & (at < last)
        pointers, inside = _tile_of(
            dsums, slot.to(tl.int64) * prefixes + at // every, row, column, D, E, TILE_D, TILE_E
        )
        tile = tl.load(pointers, mask=inside & ends[:, None, None], other=0.0)
        slopes = total[None, :, :] + tl.cumsum(tile, 0)
        total += tl.sum(tile, 0)
        keep = _kept(mask, mask_strides, batch, at, last)
        here = (at < last)[:, None]
        if to_key is not None:
            right = _rows(other, other_strides, batch, head, at, keep, column, E, TILE_E)
            plane = (slot.to(tl.int64) * planes_key + first_key + across) * keys + at
            inside_row = here & (row + tl.arange(0, TILE_D) < D)[None, :]
            tl.store(rows_at(to_key, plane, D, TILE_D, row), tl.sum(slopes * right[:, None, :], 2), mask=inside_row)
        if to_other is not None:
            left = _rows(key, key_strides, batch, head, at, keep, row, D, TILE_D)
            plane = (slot.to(tl.int64) * planes_other + first_other + down) * keys + at
            inside_row = here & (column + tl.arange(0, TILE_E) < E)[None, :]
            tl.store(rows_at(to_other, plane, E, TILE_E, column), tl.sum(slopes * left[:, :, None], 1), mask=inside_row)
    if dstate is not None and run == 0:
        pointers, inside = _tile_of(dstate, slot + tl.zeros([1], tl.int32), row, column, D, E, TILE_D, TILE_E)
        tl.store(pointers, total[None, :, :], mask=inside)


@kernel("rows", "weights", "mask")
def _add_planes(
    planes,
    rows,
    weights,
    mask,
    drows,
    dweights,
    strides: tl.int64,
    heads: tl.int32,
    keys: tl.int32,
    D: tl.constexpr,
    PLANES: tl.constexpr,
    WEIGHED: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The gradients of ROWS rows, by the sum of all planes, and of their weights, by the first WEIGHED planes.

    Masked rows get exact zeros.
    """
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    row_strides, weight_strides, mask_strides = strides
    blocks = tl.cdiv(keys, ROWS)
    slot, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * ROWS
    batch, head = slot // heads, slot % heads
    inside = start + tl.arange(0, ROWS) < keys
    keep = kept_keys(mask, mask_strides, batch, start, keys, ROWS, True)
    total = tl.zeros([ROWS, D_PAD], tl.float64)
    at = slot.to(tl.int64) * keys + start
    for plane in tl.static_range(PLANES):
        if plane == WEIGHED and dweights is not None:
            tile = load_tile(tile_at(rows, row_strides, batch, head, start, ROWS, D_PAD, ALIGN[0]), keep, D).to(
                tl.float64
            )
            slopes = tl.where(keep, tl.sum(tile * total, 1), 0.0)
            tl.store(dweights + (at + tl.arange(0, ROWS)), slopes.to(dweights.dtype.element_ty), mask=inside)
        total += load_tile(
            rows_from(planes, (slot.to(tl.int64) * PLANES + plane) * keys + start, ROWS, D, D_PAD), inside, D
        )
    if drows is not None:
        if weights is not None:
            total = total * load_weights(weights, weight_strides, batch, head, start, keep).to(tl.float64)
        total = tl.where(keep[:, None], total, 0.0)
        to = rows_from(drows, at, ROWS, D, D_PAD)
        tl.store(to, total.to(drows.dtype.element_ty), mask=inside[:, None] & (tl.arange(0, D_PAD) < D)[None, :])


def _tiles(D: int, E: int) -> dict[str, int]:
    """The tile of a matrix (D, E), and the number of its warps."""
    return {"D": D, "E": E, "TILE_D": 16, "TILE_E": 32 if E > 16 else 16, "STEPS": KEYS, "num_warps": 4}


def _cut(prefixes: int, every: int, D: int, E: int) -> Cut:
    """The cut into runs of whole chunks."""
    runs = cut_steps(prefixes, triton.cdiv(D, 16) * triton.cdiv(max(D, E), 32))
    return Cut(runs.number, runs.length * every)


def _programs(key: Tensor, cut: Cut, tiles: dict[str, int]) -> int:
    return (
        key.shape[0]
        * key.shape[1]
        * cut.runs
        * triton.cdiv(tiles["D"], tiles["TILE_D"])
        * triton.cdiv(tiles["E"], tiles["TILE_E"])
    )


def prefix_ridge(inputs: PrefixRidge) -> tuple[Tensor, Tensor]:
    """Return the sums K'WK and K'WV over every prefix, (B, H, T, D, *) in float64, plus `gram` and `moment`."""
    key, value, weights, key_padding_mask, gram, moment, every, _ = inputs
    (B, H, N, D), E = key.shape, value.shape[-1]
    prefixes = -(-N // every)
    if not B * H * N:
        return tuple(key.new_empty(B, H, prefixes, D, width, dtype=torch.float64) for width in (D, E))  # type: ignore[return-value]  # a pair
    states = [None if state is None else state.contiguous() for state in (gram, moment)]
    rows = key, value, weights, key_padding_mask
    with on_device(key):
        if every >= FEW:
            chunks = sums_of_runs(*rows, Cut(prefixes, every))
            return tuple(add_up(part, state, False, part) for part, state in zip(chunks, states, strict=True))  # type: ignore[return-value]  # a pair
        cut = _cut(prefixes, every, D, E)
        bases = states
        if cut.runs > 1:
            bases = [
                sums_before(total, state, False) for total, state in zip(sums_of_runs(*rows, cut), states, strict=True)
            ]
        return _prefixes(rows, key, bases[0], every, cut), _prefixes(rows, value, bases[1], every, cut)


def _prefixes(rows: Any, other: Tensor, base: Tensor | None, every: int, cut: Cut) -> Tensor:
    """The sums over all prefixes of keys by the rows of `other`, added to a base for each run."""
    key, _, weights, mask = rows
    (B, H, N, D), E = key.shape, other.shape[-1]
    prefixes = -(-N // every)
    sums = key.new_empty(B, H, prefixes, D, E, dtype=torch.float64)
    tiles = _tiles(D, E)
    _prefix_sums(
        _programs(key, cut, tiles),
        key,
        other,
        weights,
        mask_bytes(mask),
        base,
        sums,
        (key.stride(), other.stride(), row_strides(weights), strides_of(mask, 2)),
        (H, N, prefixes),
        every,
        tuple(cut),
        **tiles,
    )
    return sums


def prefix_ridge_backward(inputs: PrefixRidgeBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (dkey, dvalue, dweights, dgram, dmoment); the last two are those of the incoming state.

    Each that `needs` leaves out is an empty tensor.
    """
    dgram, dmoment, key, value, weights, key_padding_mask, every, needs, _ = inputs
    dsums = dgram.contiguous(), dmoment.contiguous()
    if not key.shape[0] * key.shape[1] * key.shape[2]:
        dtypes = key.dtype, value.dtype, state_dtype(key.dtype), torch.float64, torch.float64
        shapes = key.shape, value.shape, key.shape[:3], *(part.shape[:2] + part.shape[3:] for part in dsums)
        like = zip(shapes, dtypes, needs, strict=True)
        return tuple(key.new_zeros(shape if need else (0,), dtype=dtype) for shape, dtype, need in like)  # type: ignore[return-value]  # five
    back = _back_by_chunks if every >= FEW else _back_by_tiles
    with on_device(key):
        return back(dsums, key, value, weights, key_padding_mask, every, needs)


def _back_by_chunks(
    dsums: Any, key: Tensor, value: Tensor, weights: Tensor | None, mask: Tensor | None, every: int, needs: Any
) -> tuple[Any, ...]:
    """The gradients from the sums of each chunk.

    A chunk's cotangent is the sum over its own prefix and all later ones.
    """
    B, H, N, _ = key.shape
    slopes = [add_up(part, None, True, torch.empty_like(part)) for part in dsums]
    chunks = in_chunks(key, value, weights, mask, every)
    dgram, dmoment = (part.flatten(0, 2).unsqueeze(1) for part in slopes)
    grads = gram_backward(GramBackward(dgram, dmoment, *chunks, None, needs[:3], True))
    whole = dsums[0].shape[2] * every
    rows = (
        grad.reshape(B, H, whole, *grad.shape[3:])[:, :, :N].contiguous() if need else grad
        for grad, need in zip(grads, needs, strict=False)
    )
    return *rows, *(
        part[:, :, 0].contiguous() if need else part.new_empty(0) for part, need in zip(slopes, needs[3:], strict=True)
    )


def _back_by_tiles(
    dsums: Any, key: Tensor, value: Tensor, weights: Tensor | None, mask: Tensor | None, every: int, needs: Any
) -> tuple[Any, ...]:
    """The gradients from tiles of the cotangents: each tile sends a part to each row, and the parts are added."""
    (B, H, N, D), E = key.shape, value.shape[-1]
    needs_key, needs_value, needs_weights, *needs_state = needs
    prefixes = dsums[0].shape[2]
    cut = _cut(prefixes, every, D, E)
    bases: list[Tensor | None] = [None, None]
    if cut.runs > 1:
        runs = scan.Runs(cut.runs, cut.length // every)
        bases = [sums_before(totals_of_runs(part, runs), None, True) for part in dsums]
    of_gram, of_moment = _tiles(D, D), _tiles(D, E)
    down, across, values_across = (
        triton.cdiv(width, tiles[name])
        for width, tiles, name in ((D, of_gram, "TILE_D"), (D, of_gram, "TILE_E"), (E, of_moment, "TILE_E"))
    )
    weighed = across + values_across
    to_key = key.new_empty(B, H, weighed + down, N, D, dtype=torch.float64) if needs_key or needs_weights else None
    to_value = key.new_empty(B, H, down, N, E, dtype=torch.float64) if needs_value else None
    dstates = [
        part.new_empty(B, H, *part.shape[3:]) if need else None for part, need in zip(dsums, needs_state, strict=True)
    ]
    for dsum, other, base, to_other, dstate, tiles, planes in (
        (dsums[0], key, bases[0], to_key, dstates[0], of_gram, (weighed + down, 0, weighed + down, weighed)),
        (dsums[1], value, bases[1], to_value, dstates[1], of_moment, (weighed + down, across, down, 0)),
    ):
        if to_key is None and to_other is None and dstate is None:
            continue
        _send_sums_back(
            _programs(key, cut, tiles),
            dsum,
            key,
            other,
            mask_bytes(mask),
            base,
            to_key,
            to_other,
            dstate,
            (key.stride(), other.stride(), strides_of(mask, 2)),
            (H, N, prefixes),
            every,
            tuple(cut),
            planes,
            **tiles,
            enable_fp_fusion=False,  # as in `_added`
        )
    dkey, dweights = _added(to_key, weighed, key, weights, mask, needs_key, needs_weights)
    dvalue, _ = _added(to_value, 0, value, weights, mask, needs_value, False)
    return (
        dkey,
        dvalue,
        dweights,
        *(key.new_empty(0, dtype=torch.float64) if part is None else part for part in dstates),
    )


def _added(
    planes: Tensor | None,
    weighed: int,
    rows: Tensor,
    weights: Tensor | None,
    mask: Tensor | None,
    needs_rows: bool,
    needs_weights: bool,
) -> tuple[Tensor, Tensor]:
    """(The gradient of rows, the gradient of their weights) from the planes of all tiles; empty if not needed."""
    B, H, N, D = rows.shape
    drows = rows.new_empty(rows.shape if needs_rows else (0,))
    dweights = rows.new_empty(rows.shape[:3] if needs_weights else (0,), dtype=state_dtype(rows.dtype))
    if planes is not None and planes.numel():
        _add_planes(
            B * H * triton.cdiv(N, ROWS),
            planes,
            rows,
            weights,
            mask_bytes(mask),
            drows if needs_rows else None,
            dweights if needs_weights else None,
            (rows.stride(), row_strides(weights), strides_of(mask, 2)),
            H,
            N,
            D=D,
            PLANES=planes.shape[2],
            WEIGHED=weighed,
            ROWS=ROWS,
            ALIGN=alignment(rows),
            num_warps=4,
            enable_fp_fusion=False,  # as in `_row_terms`
        )
    return drows, dweights
