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
    block,
    held,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The products (keys, queries) of a tile of keys and a block (queries, first row, rows inside).

    `held` is the tile of the queries; if it is None, both tiles are loaded in pieces of columns.
    """
    queries, first, inside = block
    if held is not None:
        tile = _tile(keys, start, keep, BLOCK_N, held.shape[1], WIDTH, ALIGN)
        scores = product(tile, tl.trans(held), tl.float32, "tf32x3")
    else:
        scores = tl.zeros([BLOCK_N, BLOCK_L], tl.float32)
        for column in tl.range(0, WIDTH, PIECE, disable_licm=True):
            piece = _tile(queries, first, inside, BLOCK_L, PIECE, WIDTH, ALIGN, column)
            tile = _tile(keys, start, keep, BLOCK_N, PIECE, WIDTH, ALIGN, column)
            scores += product(tile, tl.trans(piece), tl.float32, "tf32x3")
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
def _add(gradient, tile, keep, more, span, WIDTH: tl.constexpr, column, RAGGED: tl.constexpr):
    """Store a tile of dK or dV from `column` on; with `more`, add it to the stored values.

    `span` are the tile's first key and the end of all keys. Ignored keys get exact zeros.
    """
    start, last = span
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
    span,
    keep,
    block,
    held,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    PIECE: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Add to dK or dV, in pieces of columns, the product of weights (keys, queries)
    and a tile of queries or of dout."""
    queries, first, inside = block
    STEP: tl.constexpr = PIECE if held is None else held.shape[1]
    high, low = parts(weights)
    for column in tl.range(0, WIDTH, STEP, disable_licm=True):
        piece = (
            held if held is not None else _tile(queries, first, inside, inside.shape[0], PIECE, WIDTH, ALIGN, column)
        )
        total = _product_over_queries(high, low, piece)
        if scale is not None:
            total *= scale
        _add(gradient, total, keep, first > 0, span, WIDTH, column, RAGGED)


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
    high, low, delta = high + filled, low + filled, delta + filled
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
            rows, slopes = (queries, first, inside), (douts, first, inside)
            dq = tl.zeros([BLOCK_L, D_PAD], tl.float32)
            for RAGGED in tl.static_range(2):  # whole tiles, then the rest
                for tile in tl.range(whole if RAGGED else start, end if RAGGED else whole, BLOCK_N, disable_licm=True):
                    at = tl.multiple_of(first, BLOCK_L) + tl.arange(0, BLOCK_L).to(tl.int64)
                    biases = biases_of(bias, bias_strides, 0, 0, tile, end, BLOCK_N)
                    keep = kept_keys(mask, strides[3], 0, tile, end, BLOCK_N, RAGGED, biases)
                    scores = _scores(keys, tile, keep, rows, held[0], D, ALIGN[0], BLOCK_L, BLOCK_N, PIECE)
                    if biases is not None:
                        scores = tl.fma(scores, scale_, biases[:, None])
                    scores -= tl.load(high + at)[None, :]
                    weights = tl.exp2(tl.fma(scores, log2_scale, -tl.load(low + at)[None, :]))
                    if keep is not None:
                        weights = tl.where(keep[:, None], weights, 0.0)
                    span = (tile, end)
                    if dvalue is not None:
                        _add_over_queries(
                            dvalue, weights, None, span, keep, slopes, held[1], E, ALIGN[2], PIECE, RAGGED
                        )
                    if shares is not None or dkey is not None or dbias is not None:
                        dscores = _scores(values, tile, keep, slopes, held[1], E, ALIGN[2], BLOCK_L, BLOCK_N, PIECE)
                        dscores = weights * (dscores - tl.load(delta + at)[None, :])
                        if dbias is not None:
                            _add(dbias, tl.sum(dscores, 1)[:, None], keep, first > 0, span, 1, 0, RAGGED)
                        if dkey is not None:
                            _add_over_queries(
                                dkey, dscores, scale_, span, keep, rows, held[0], D, ALIGN[0], PIECE, RAGGED
                            )
                        if shares is not None:
                            a_high, a_low = parts(dscores)
                            b_high, b_low = parts(_tile(keys, tile, keep, BLOCK_N, D_PAD, D, ALIGN[0]))
                            dq += product_of_parts(tl.trans(a_high), tl.trans(a_low), b_high, b_low)
            if shares is not None:
                pointers = rows_from(shares, tl.program_id(0).to(tl.int64) * L + first, BLOCK_L, D, D_PAD)
                inside = inside[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
                dq += tl.load(pointers, mask=inside & (start > first_key), other=0.0)
                tl.store(pointers, dq, mask=inside)
            tl.debug_barrier()  # other threads add to the stored values
