# mypy: disable-error-code="no-untyped-def"
"""Kernels that work row by row: the gradients of the sums with respect to keys, values and weights, and rows times a
matrix.

With S = dG + dG', a key k with value v and weight w has

    dk = w (S k + dC v)      dv = w dC' k      dw = k.(S k / 2 + dC v)

A program takes a run of rows. A matrix that fits in one tile stays in registers; a wider one is read tile after tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.triton_launch import alignment, kernel, mask_bytes, on_device, strides_of, triton_dtype
from ...runtime.triton_products import as_operand, product
from ...runtime.triton_rows import kept_keys, load_tile, load_weights, rows_at, tile_at
from ..contract import ApplyRows, GramBackward
from .launch import ROWS, apply_tiles, backward_tiles, over_sets, row_products, row_strides


@triton.jit
def _matrix(
    matrix, slot, row, column, SHAPE: tl.constexpr, TILE: tl.constexpr, TURNED: tl.constexpr, OPERAND: tl.constexpr
):
    """Load a tile, as OPERAND, of matrix `slot` of contiguous matrices of this SHAPE, which are stored TURNED."""
    if TURNED:
        tile = tl.trans(_matrix(matrix, slot, column, row, (SHAPE[1], SHAPE[0]), (TILE[1], TILE[0]), False, OPERAND))
    else:
        rows = row + tl.arange(0, TILE[0])
        pointers = rows_at(matrix + slot.to(tl.int64) * (SHAPE[0] * SHAPE[1]), rows, SHAPE[1], TILE[1], column)
        tile = as_operand(load_tile(pointers, rows < SHAPE[0], SHAPE[1], column), OPERAND, False)
    return tile


@triton.jit
def _at_hand(matrix, slot, SHAPE: tl.constexpr, TILE: tl.constexpr, TURNED: tl.constexpr, OPERAND: tl.constexpr):
    """Load the whole matrix if it fits in one tile, else return None."""
    tile = None
    if SHAPE[0] <= TILE[0] and SHAPE[1] <= TILE[1]:
        tile = _matrix(matrix, slot, 0, 0, SHAPE, TILE, TURNED, OPERAND)
    return tile


@triton.jit
def _times(
    rows,
    matrix,
    at_hand,
    place,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    TURNED: tl.constexpr = False,
):
    """A tile of rows times a tile of columns of their matrix; `at_hand` is the loaded matrix, or None to load it.

    `rows` are (tensor, strides), `matrix` is (matrices, number), and `place` is (batch, head, first row, rows to keep,
    column).
    """
    batch, head, start, keep, column = place
    BLOCK_N: tl.constexpr = keep.shape[0]
    sums = tl.zeros([BLOCK_N, TILE[1]], tl.float64 if tl.float64 == OPERAND else tl.float32)
    for inner in range(0, SHAPE[0], TILE[0]):
        pointers = tile_at(rows[0], rows[1], batch, head, start, BLOCK_N, TILE[0], ALIGN, inner)
        left = load_tile(pointers, keep, SHAPE[0], inner)
        right = at_hand
        if at_hand is None:
            right = _matrix(matrix[0], matrix[1], inner, column, SHAPE, TILE, TURNED, OPERAND)
        sums += product(left, right, OPERAND, PRECISION, False)
    return sums


@triton.jit
def _store(out, tile, row, inside, column, WIDTH: tl.constexpr):
    """Store a tile of a contiguous (rows, WIDTH) tensor."""
    columns = column + tl.arange(0, tile.shape[1])
    tl.store(
        rows_at(out, row, WIDTH, tile.shape[1], column),
        tile.to(out.dtype.element_ty),
        mask=inside[:, None] & (columns < WIDTH)[None, :],
    )


@kernel("dmoment", "key", "value", "weights", "mask")
def _gram_backward(
    slope,
    dmoment,
    key,
    value,
    weights,
    mask,
    offsets,
    dkey,
    dvalue,
    dweights,
    strides: tl.int64,
    heads: tl.int32,
    keys: tl.int32,
    D: tl.constexpr,
    E: tl.constexpr,
    RUN: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of one run of keys. Masked keys get exact zeros, even where dG or dC is not finite.

    With `offsets` a run is one of the packed sets, whose gradients share the rows of a head.
    """
    DTYPE: tl.constexpr = tl.float64 if tl.float64 == OPERAND else tl.float32
    key_strides, value_strides, weight_strides, mask_strides = strides
    runs = tl.cdiv(keys, RUN) if offsets is None else 1
    slot = tl.program_id(0) // runs
    batch, head = slot // heads, slot % heads
    first = tl.program_id(0) % runs * RUN
    last = tl.minimum(first + RUN, keys)
    group = slot
    if offsets is not None:
        first = tl.load(offsets + batch)
        last = tl.load(offsets + batch + 1)
        group = head
    slope_tile = _at_hand(slope, slot, (D, D), (TILE_D, TILE_D), False, OPERAND)
    dmoment_tile = _at_hand(dmoment, slot, (D, E), (TILE_D, TILE_E), False, OPERAND)
    turned = _at_hand(dmoment, slot, (E, D), (TILE_E, TILE_D), True, OPERAND)
    key_rows, value_rows, of_moment = (key, key_strides), (value, value_strides), (dmoment, slot)
    for start in range(first, last, BLOCK_N):
        inside = start + tl.arange(0, BLOCK_N) < last
        keep = kept_keys(mask, mask_strides, batch, start, last, BLOCK_N, True)
        row = group.to(tl.int64) * keys + start + tl.arange(0, BLOCK_N)
        weight = tl.full([BLOCK_N, 1], 1.0, DTYPE)
        if weights is not None:
            weight = load_weights(weights, weight_strides, batch, head, start, keep).to(DTYPE)
        if dvalue is not None:
            for column in range(0, E, TILE_E):
                place = (batch, head, start, keep, column)
                y = _times(
                    key_rows, of_moment, dmoment_tile, place, (D, E), (TILE_D, TILE_E), ALIGN[0], OPERAND, PRECISION
                )
                _store(dvalue, tl.where(keep[:, None], y * weight, 0.0), row, inside, column, E)
        if dkey is not None or dweights is not None:
            slopes = tl.zeros([BLOCK_N], DTYPE)
            for column in range(0, D, TILE_D):
                place = (batch, head, start, keep, column)
                a = _times(
                    key_rows, (slope, slot), slope_tile, place, (D, D), (TILE_D, TILE_D), ALIGN[0], OPERAND, PRECISION
                )
                b = _times(
                    value_rows, of_moment, turned, place, (E, D), (TILE_E, TILE_D), ALIGN[1], OPERAND, PRECISION, True
                )
                if dkey is not None:
                    _store(dkey, tl.where(keep[:, None], (a + b) * weight, 0.0), row, inside, column, D)
                if dweights is not None:
                    pointers = tile_at(key, key_strides, batch, head, start, BLOCK_N, TILE_D, ALIGN[0], column)
                    tile = load_tile(pointers, keep, D, column)
                    slopes += tl.sum(tile.to(DTYPE) * (a / 2 + b), 1)
            if dweights is not None:
                tl.store(dweights + row, tl.where(keep, slopes, 0.0), mask=inside)


@kernel("query", "weight")
def _apply(
    query,
    weight,
    out,
    strides: tl.int64,
    heads: tl.int32,
    queries: tl.int32,
    D: tl.constexpr,
    E: tl.constexpr,
    RUN: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply one run of rows by the matrix of their head."""
    runs = tl.cdiv(queries, RUN)
    slot = tl.program_id(0) // runs
    first = tl.program_id(0) % runs * RUN
    tile = _at_hand(weight, slot, (D, E), (TILE_D, TILE_E), False, OPERAND)
    for start in range(first, tl.minimum(first + RUN, queries), BLOCK_N):
        inside = start + tl.arange(0, BLOCK_N) < queries
        row = slot.to(tl.int64) * queries + start + tl.arange(0, BLOCK_N)
        batch, head = slot // heads, slot % heads
        for column in range(0, E, TILE_E):
            place = (batch, head, start, inside, column)
            outs = _times(
                (query, strides), (weight, slot), tile, place, (D, E), (TILE_D, TILE_E), ALIGN[0], OPERAND, PRECISION
            )
            _store(out, outs, row, inside, column, E)


def gram_backward(inputs: GramBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dkey, dvalue, dweights); each that `needs` does not ask for is an empty tensor."""
    dgram, dmoment, key, value, weights, key_padding_mask, cu_seqlens, needs, exact, _ = inputs
    products = row_products(key.dtype, exact)
    dtypes = key.dtype, value.dtype, torch.promote_types(key.dtype, torch.float32)
    shapes = key.shape, value.shape, key.shape[:-1]
    grads = [
        key.new_empty(shape if need else (0,), dtype=dtype)
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    ]
    align = alignment(key, value)
    with on_device(key):
        offsets, rows = None, (key, value, weights, mask_bytes(key_padding_mask))
        if cu_seqlens is not None:
            offsets, rows = over_sets(cu_seqlens, rows)
            for grad in grads:  # rows of no set get zeros, and all rows NaN if offsets are invalid
                grad.zero_().masked_fill_(offsets[-1] != 0, torch.nan)
        key, value, weights, mask = rows
        (B, H, N, D), E = key.shape, value.shape[-1]
        slope = dgram + dgram.mT
        _gram_backward(
            B * H * (triton.cdiv(N, ROWS) if offsets is None else 1),
            slope.contiguous(),
            dmoment.contiguous(),
            key,
            value,
            weights,
            mask,
            offsets,
            *(grad if need else None for grad, need in zip(grads, needs, strict=True)),
            (key.stride(), value.stride(), row_strides(weights), strides_of(mask, 2)),
            H,
            N,
            D=D,
            E=E,
            RUN=ROWS,
            ALIGN=align,
            OPERAND=triton_dtype(products.operand),
            PRECISION=products.input_precision,
            **backward_tiles(products, key.device, D, E)._asdict(),
        )
    dkey, dvalue, dweights = grads
    return dkey, dvalue, dweights


def apply_rows(inputs: ApplyRows) -> Tensor:
    """Return query @ weight in the dtype of the query."""
    query, weight, _ = inputs
    (B, H, M, D), E = query.shape, weight.shape[-1]
    products = row_products(query.dtype, exact=False)
    with on_device(query):
        out = query.new_empty((B, H, M, E))
        _apply(
            B * H * triton.cdiv(M, ROWS),
            query,
            weight.contiguous(),
            out,
            query.stride(),
            H,
            M,
            D=D,
            E=E,
            RUN=ROWS,
            ALIGN=alignment(query),
            OPERAND=triton_dtype(products.operand),
            PRECISION=products.input_precision,
            **apply_tiles(products, query.device, D, E)._asdict(),
        )
    return out
