# mypy: disable-error-code="no-untyped-def"
"""All gradients of float32 inputs in one pass over the keys, with each product computed as three of tf32 parts.

Tiles are transposed, (keys, queries): P and dS then lie in registers as the products dV = P' dout and dK = dS' Q take
them, and only dQ = scale dS K needs dS moved. A program goes through its run of keys in chunks that fit in a cache, and
through each chunk once for every block of queries. It adds the contribution of a block to dK and dV to the stored sums
of the blocks before, and the contribution of a chunk to dQ to the stored sums of the chunks before. No other program
writes there, so all sums have a fixed order and fixed bits.

The compiler must not move anything out of a loop. It would move the addresses of operands in shared memory, two
registers for each of a hundred matrix instructions, and spill other registers for them.
"""

import triton
import triton.language as tl

from ...runtime.triton_launch import kernel
from ...runtime.triton_products import in_place, parts, product, product_of_parts
from ...runtime.triton_rows import biases_of, kept_keys, load_tile, rows_from, tile_at
from .forward import LOG2_E
from .runs import locate

CHUNK_BYTES = tl.constexpr(32 * 1024)
"""The size of a chunk of keys: 128 KiB with values and both gradients. The L2 cache holds one per running program."""


@triton.jit
def _tile(
    matrix, row, keep, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, column=0
):
    """A tile of a head, given by its address and strides; rows that are not kept are zeros."""
    base, strides = matrix
    return load_tile(tile_at(base, strides, 0, 0, row, ROWS, COLUMNS, ALIGN, column), keep, WIDTH, column)


@triton.jit
def _scores(
    keys,
    start,
    keep,
    queries,
    first,
    inside,
    held,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The products (keys, queries) of two tiles.

    `held` is the tile of the queries; if it is None, both tiles are loaded in pieces of columns.
    """
    if held is not None:
        scores = product(
            _tile(keys, start, keep, BLOCK_N, held.shape[1], WIDTH, ALIGN), tl.trans(held), tl.float32, "tf32x3"
        )
    else:
        scores = tl.zeros([BLOCK_N, BLOCK_L], tl.float32)
        for column in tl.range(0, WIDTH, PIECE, disable_licm=True):
            piece = _tile(queries, first, inside, BLOCK_L, PIECE, WIDTH, ALIGN, column)
            scores += product(
                _tile(keys, start, keep, BLOCK_N, PIECE, WIDTH, ALIGN, column), tl.trans(piece), tl.float32, "tf32x3"
            )
    return scores


@triton.jit
def _product_over_queries(high, low, tile):
    """The product (keys, width) of weights or score gradients, given as two parts,
    and a tile of rows of the queries."""
    a_high, ordered = in_place(high, tile)
    a_low, ordered = in_place(low, tile)
    b_high, b_low = parts(ordered)
    return product_of_parts(a_high, a_low, b_high, b_low)


@triton.jit
def _add(gradient, tile, keep, more, start, last, WIDTH: tl.constexpr, column, RAGGED: tl.constexpr):
    """Store a tile of dK or dV from `column` on; with `more`, add it to the stored values.

    Ignored keys get exact zeros.
    """
    if keep is not None:
        tile = tl.where(keep[:, None], tile, 0.0)
    inside = (column + tl.arange(0, tile.shape[1]) < WIDTH)[None, :]
    if RAGGED:
        inside &= (start + tl.arange(0, tile.shape[0]) < last)[:, None]
    pointers = rows_from(gradient, start, tile.shape[0], WIDTH, tile.shape[1], column)
    tl.store(pointers, tile + tl.load(pointers, mask=inside & more, other=0.0), mask=inside)


@triton.jit
def _add_over_queries(
    gradient,
    weights,
    scale,
    start,
    last,
    keep,
    queries,
    first,
    inside,
    held,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PIECE: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Add to dK or dV, in pieces of columns, the product of weights (keys, queries)
    and a tile of queries or of dout."""
    STEP: tl.constexpr = PIECE if held is None else held.shape[1]
    high, low = parts(weights)
    for column in tl.range(0, WIDTH, STEP, disable_licm=True):
        piece = held if held is not None else _tile(queries, first, inside, BLOCK_L, PIECE, WIDTH, ALIGN, column)
        total = _product_over_queries(high, low, piece)
        if scale is not None:
            total *= scale
        _add(gradient, total, keep, first > 0, start, last, WIDTH, column, RAGGED)


@triton.jit
def _pull(
    dq,
    held,
    matrices,
    mask,
    mask_strides,
    bias,
    bias_strides,
    gradients,
    terms,
    sizes,
    first,
    start,
    last,
    scale,
    log2_scale,
    D: tl.constexpr,
    E: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Process a tile of keys with the block of queries from `first` on; return dq plus the tile's share of dQ."""
    queries, keys, values, douts = matrices
    dquery, dkey, dvalue, dbias = gradients
    high, low, delta = terms
    inside = first + tl.arange(0, BLOCK_L) < sizes[2]
    row = tl.multiple_of(first, BLOCK_L) + tl.arange(0, BLOCK_L).to(tl.int64)
    biases = biases_of(bias, bias_strides, 0, 0, start, last, BLOCK_N)
    keep = kept_keys(mask, mask_strides, 0, start, last, BLOCK_N, RAGGED, biases)
    scores = _scores(keys, start, keep, queries, first, inside, held[0], D, ALIGN[0], BLOCK_L, BLOCK_N, PIECE)
    if biases is not None:
        scores = tl.fma(scores, scale, biases[:, None])
    weights = tl.exp2(tl.fma(scores - tl.load(high + row)[None, :], log2_scale, -tl.load(low + row)[None, :]))
    if keep is not None:
        weights = tl.where(keep[:, None], weights, 0.0)
    if dvalue is not None:
        _add_over_queries(
            dvalue, weights, None, start, last, keep, douts, first, inside, held[1], E, ALIGN[2], BLOCK_L, PIECE, RAGGED
        )
    if dquery is not None or dkey is not None or dbias is not None:
        slopes = _scores(values, start, keep, douts, first, inside, held[1], E, ALIGN[2], BLOCK_L, BLOCK_N, PIECE)
        slopes = weights * (slopes - tl.load(delta + row)[None, :])
        if dbias is not None:
            sums = tl.sum(slopes, 1)[:, None]
            _add(dbias, sums, keep, first > 0, start, last, 1, 0, RAGGED)
        if dkey is not None:
            _add_over_queries(
                dkey,
                slopes,
                scale,
                start,
                last,
                keep,
                queries,
                first,
                inside,
                held[0],
                D,
                ALIGN[0],
                BLOCK_L,
                PIECE,
                RAGGED,
            )
        if dquery is not None:
            high, low = parts(slopes)
            key_high, key_low = parts(_tile(keys, start, keep, BLOCK_N, dq.shape[1], D, ALIGN[0]))
            dq += product_of_parts(tl.trans(high), tl.trans(low), key_high, key_low)
    return dq


@triton.jit
def _head_of(tensor, strides, batch, head):
    """The address of a head of a (B, H, rows, columns) tensor."""
    return tensor + (tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1])


@kernel("query", "key", "value", "mask", "bias")
def _backward_in_parts(
    query,
    key,
    value,
    mask,
    bias,
    offsets,
    dout,
    high,
    low,
    delta,
    shares,
    dkey,
    dvalue,
    dbias,
    strides: tl.int64,
    sizes: tl.int32,
    cut: tl.int32,
    scale: tl.float64,
    bias_strides: tl.int64,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """dK, dV and the gradient of the bias of one run of keys, and its share of dQ in its slot of `shares`, for all
    queries, BLOCK_L at a time.

    The columns of a tile are multiplied PIECE at a time. If PIECE is None, they are multiplied all at once, and tiles
    of the queries and of dout are held in registers.
    """
    D_PAD: tl.constexpr = max(triton.next_power_of_2(D), 16)
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    CHUNK: tl.constexpr = CHUNK_BYTES // (4 * max(D_PAD, E_PAD))
    B, H, L, N = sizes
    head = tl.program_id(0) % H
    batch, first_key, last = locate(tl.program_id(0) // H, offsets, B, N, cut)
    row = (tl.cast(batch, tl.int64) * H + head) * L
    filled = tl.multiple_of((tl.cast(batch, tl.int64) * H + head) * (tl.cdiv(L, BLOCK_L) * BLOCK_L), 16)
    terms = (high + filled, low + filled, delta + filled)
    queries = (_head_of(query, strides[0], batch, head), strides[0])
    douts = (dout + row * E, (0, 0, E, 1))
    if offsets is not None:
        batch = 0
    keys = (_head_of(key, strides[1], batch, head), strides[1])
    values = (_head_of(value, strides[2], batch, head), strides[2])
    if mask is not None:
        mask += tl.cast(batch, tl.int64) * strides[3][0]
    if bias is not None:
        bias += tl.cast(batch, tl.int64) * bias_strides[0] + tl.cast(head, tl.int64) * bias_strides[1]
    stored = (tl.cast(batch, tl.int64) * H + head) * N
    if dkey is not None:
        dkey += stored * D
    if dvalue is not None:
        dvalue += stored * E
    if dbias is not None:
        dbias += stored
    scale_ = tl.full([1], scale, tl.float32)
    log2_scale = (tl.full([1], scale if bias is None else 1.0, tl.float64) * LOG2_E).to(tl.float32)
    for start in tl.range(first_key, last, CHUNK, disable_licm=True):
        end = tl.minimum(start + CHUNK, last)
        whole = end - (end - start) % BLOCK_N
        for first in tl.range(0, L, BLOCK_L, disable_licm=True):
            inside = first + tl.arange(0, BLOCK_L) < L
            held = (None, None)
            if PIECE is None:
                held = (
                    _tile(queries, first, inside, BLOCK_L, D_PAD, D, ALIGN[0]),
                    _tile(douts, first, inside, BLOCK_L, E_PAD, E, ALIGN[2]),
                )
            dq = tl.zeros([BLOCK_L, D_PAD], tl.float32)
            for RAGGED in tl.static_range(2):  # whole tiles, then the rest
                first_tile, end_of_tiles = (whole, end) if RAGGED else (start, whole)
                for tile in tl.range(first_tile, end_of_tiles, BLOCK_N, disable_licm=True):
                    dq = _pull(
                        dq,
                        held,
                        (queries, keys, values, douts),
                        mask,
                        strides[3],
                        bias,
                        bias_strides,
                        (shares, dkey, dvalue, dbias),
                        terms,
                        sizes,
                        first,
                        tile,
                        end,
                        scale_,
                        log2_scale,
                        D,
                        E,
                        ALIGN,
                        BLOCK_L,
                        BLOCK_N,
                        PIECE,
                        RAGGED,
                    )
            if shares is not None:
                pointers = rows_from(shares, tl.program_id(0).to(tl.int64) * L + first, BLOCK_L, D, D_PAD)
                inside = inside[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
                dq += tl.load(pointers, mask=inside & (start > first_key), other=0.0)
                tl.store(pointers, dq, mask=inside)
            tl.debug_barrier()  # other threads add to the stored values
