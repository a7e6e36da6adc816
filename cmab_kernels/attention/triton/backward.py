# mypy: disable-error-code="no-untyped-def"
"""Gradients in one pass over the keys, without atomics.

dK and dV are stored tile by tile; dQ is summed over the runs of keys.

With P = exp(S - lse), recomputed tile by tile:

    dV = P' dout      dS = P * (dout V' - rowsum(dout * out) + dlse)      dQ = scale dS K      dK = scale dS' Q
"""

from typing import NamedTuple

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
    on_device,
    strides_of,
    triton_dtype,
)
from ...runtime.triton_products import in_place, product, product_of_wide
from ...runtime.triton_rows import biases_of, kept_keys, load_tile, rows_at, tile_at
from ..contract import AttentionBackward
from .backward_in_parts import _backward_in_parts
from .forward import IN_SHARED, LOG2_E
from .launch import (
    WIDEST_BLOCK,
    backward_keys_tiles,
    backward_products,
    backward_tiles,
    piece_of_columns,
    tile_alignment,
)
from .row_terms import load_rows, row_terms, sum_runs
from .runs import checked_offsets, cut_keys, locate

IN_PLACE = ("half",)
"""For these kinds of products, `_backward_keys` transposes its tiles, so that P and dS are operands without a move."""


@triton.jit
def scores_of(
    keys, queries, TURNED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, HIDDEN: tl.constexpr = True
):
    """The products of a tile of keys and a tile of queries: (queries, keys), or (keys, queries) if TURNED.

    Tiles of float16 are always multiplied in float16, whatever OPERAND is. Matrix units truncate: a score of 1e5 is off
    by 1e-2. A weight agrees with the log-sum-exp of the forward pass only if both passes truncate its score alike.
    """
    first, second = (keys, queries) if TURNED else (queries, keys)
    if first.dtype == tl.float16 and second.dtype == tl.float16:
        scores = tl.dot(first, tl.trans(second))
    else:
        scores = product_of_wide(first, tl.trans(second), OPERAND, PRECISION, HIDDEN)
    return scores


@triton.jit
def weigh(
    keys,
    values,
    rows,
    keep,
    biases,
    units,
    TURNED: tl.constexpr,
    SLOPES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDDEN: tl.constexpr = True,
):
    """The weights P of a tile and the gradient dS of its scores: (queries, keys), or (keys, queries) if TURNED.

    Both are of the dtype OPERAND, and dS is also returned as it was before it was rounded. `units` are (log2_scale,
    gain). With `biases` of the keys, scores are first multiplied by `gain`, and `log2_scale` is that of base 2 alone.

    A thread has few rows of a tile. If the queries are the rows, they and their terms take few registers; if they are
    the columns, P' and dS' lie where the products dV = P' dout and dK = dS' Q need them.
    """
    queries, douts, high, low, delta = rows
    log2_scale, gain = units
    KEYS: tl.constexpr = 0 if TURNED else 1
    high, low, delta = tl.expand_dims(high, KEYS), tl.expand_dims(low, KEYS), tl.expand_dims(delta, KEYS)
    scores = scores_of(keys, queries, TURNED, OPERAND, PRECISION, HIDDEN)
    if biases is not None:
        scores = tl.fma(scores, gain, tl.expand_dims(biases, 1 - KEYS))
    exponents = (scores - high) * log2_scale - low
    if high.dtype == tl.float64:  # beyond 2**53, lse no longer tells neighbouring scores apart
        exponents = tl.where(exponents > 0, 0.0, exponents)
    weights = tl.exp2(exponents)
    if keep is not None:
        weights = tl.where(tl.expand_dims(keep, 1 - KEYS), weights, 0.0)
    slopes = weights
    if SLOPES:
        dweights = scores_of(values, douts, TURNED, OPERAND, PRECISION, HIDDEN)
        slopes = weights * (dweights - delta)
    return weights.to(OPERAND), slopes.to(OPERAND), slopes


@triton.jit
def product_over_queries(weights, tile, TURNED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The product (keys, width) of the weights of `weigh` and a tile of rows of the queries."""
    if not TURNED:
        weights = tl.trans(weights)
    elif PRECISION == "tf32x3":
        weights, tile = in_place(weights, tile)
    return product(weights, tile, OPERAND, PRECISION)


@triton.jit
def store_keys(gradient, tile, keep, sizes, batch, head, start, last, WIDTH: tl.constexpr):
    """Store one tile of a contiguous gradient. Ignored keys get exact zeros, even where dout is not finite."""
    _, H, _, N = sizes
    keys = start + tl.arange(0, tile.shape[0])
    columns = tl.arange(0, tile.shape[1])
    if keep is not None:
        tile = tl.where(keep[:, None], tile, 0.0)
    row = (tl.cast(batch, tl.int64) * H + head) * N + keys
    tl.store(
        rows_at(gradient, row, WIDTH, tile.shape[1]),
        tile.to(gradient.dtype.element_ty),
        mask=(keys < last)[:, None] & (columns < WIDTH)[None, :],
    )


@triton.jit
def store_biases(gradient, sums, keep, sizes, batch, head, start, last):
    """Store one tile of the contiguous gradient of a bias; ignored keys get exact zeros."""
    _, H, _, N = sizes
    keys = start + tl.arange(0, sums.shape[0])
    if keep is not None:
        sums = tl.where(keep, sums, 0.0)
    tl.store(gradient + ((tl.cast(batch, tl.int64) * H + head) * N + keys), sums, mask=keys < last)


@kernel("query", "key", "value", "mask", "bias", "high", "low", "delta")
def _backward(
    query,
    key,
    value,
    mask,
    bias,
    offsets,
    douts,
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
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Process one run of keys for one block of queries, held in registers; store its share of dQ in its slot of
    `shares`.

    dK and dV are complete only if one block holds all queries: otherwise `_backward_keys` computes them.
    """
    DTYPE: tl.constexpr = high.dtype.element_ty
    D_PAD: tl.constexpr = max(triton.next_power_of_2(D), 16)
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    OWN: tl.constexpr = OPERAND if OPERAND.primitive_bitwidth == 16 else query.dtype.element_ty
    QUERY: tl.constexpr = shares is not None
    SLOPES: tl.constexpr = QUERY or dkey is not None or dbias is not None
    WIDEST: tl.constexpr = max(D_PAD, E_PAD)
    # Tiles of 256 columns do not fit where shared memory is little.
    HIDDEN: tl.constexpr = WIDEST < IN_SHARED or WIDEST > 128
    B, H, L, N = sizes
    query_strides, key_strides, value_strides, mask_strides = strides
    blocks = tl.cdiv(L, BLOCK_L)
    block = tl.program_id(0) % blocks
    slot_head = tl.program_id(0) // blocks
    head = slot_head % H
    batch, first, last = locate(slot_head // H, offsets, B, N, cut)
    given, place = (query, douts, high, low, delta), (batch, head, block)
    rows = load_rows(given, query_strides, sizes, place, D, E, BLOCK_L, ALIGN, OWN)
    queries, dout_rows, _, _, _ = rows
    if offsets is not None:
        batch = 0
    gain = tl.full([1], scale, DTYPE)
    units = ((tl.full([1], scale if bias is None else 1.0, tl.float64) * LOG2_E).to(DTYPE), gain)
    dq = tl.zeros([BLOCK_L, D_PAD], DTYPE)
    whole = first + (last - first) // BLOCK_N * BLOCK_N
    for RAGGED in tl.static_range(2):  # whole tiles, then the rest
        for start in tl.range(
            whole if RAGGED else first, last if RAGGED else whole, BLOCK_N, num_stages=1 if RAGGED else None
        ):
            biases = biases_of(bias, bias_strides, batch, head, start, last, BLOCK_N)
            keep = kept_keys(mask, mask_strides, batch, start, last, BLOCK_N, RAGGED, biases)
            keys = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, D_PAD, ALIGN[1]), keep, D)
            values = keys
            if SLOPES:
                values = load_tile(tile_at(value, value_strides, batch, head, start, BLOCK_N, E_PAD, ALIGN[2]), keep, E)
            weights, slopes, exact = weigh(
                keys, values, rows, keep, biases, units, False, SLOPES, OPERAND, PRECISION, HIDDEN
            )
            if dbias is not None:
                store_biases(dbias, tl.sum(exact, 0), keep, sizes, batch, head, start, last)
            if dvalue is not None:
                dv = product(tl.trans(weights), dout_rows, OPERAND, PRECISION, HIDDEN)
                store_keys(dvalue, dv, keep, sizes, batch, head, start, last, E)
            if dkey is not None:
                dk = product(tl.trans(slopes), queries, OPERAND, PRECISION, HIDDEN) * gain
                store_keys(dkey, dk, keep, sizes, batch, head, start, last, D)
            if QUERY:
                dq += product(slopes, keys, OPERAND, PRECISION, HIDDEN)
    if QUERY:
        row = block * BLOCK_L + tl.arange(0, BLOCK_L)
        inside = (row < L)[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
        row = slot_head.to(tl.int64) * L + row
        tl.store(rows_at(shares, row, D, D_PAD), dq, mask=inside)


@kernel("query", "key", "value", "mask", "bias", "high", "low", "delta")
def _backward_keys(
    query,
    key,
    value,
    mask,
    bias,
    offsets,
    douts,
    high,
    low,
    delta,
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
    ALIGN: tl.constexpr,
    TURNED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK, dV and the gradient of the bias of one run of keys, for several blocks of queries.

    A tile of keys stays in registers while the blocks are read in turn.
    """
    DTYPE: tl.constexpr = high.dtype.element_ty
    D_PAD: tl.constexpr = max(triton.next_power_of_2(D), 16)
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    OWN: tl.constexpr = OPERAND if OPERAND.primitive_bitwidth == 16 else query.dtype.element_ty
    B, H, L, N = sizes
    query_strides, key_strides, value_strides, mask_strides = strides
    head = tl.program_id(0) % H
    batch, first, last = locate(tl.program_id(0) // H, offsets, B, N, cut)
    store = batch if offsets is None else 0
    log2_scale = (tl.full([1], scale if bias is None else 1.0, tl.float64) * LOG2_E).to(DTYPE)
    gain = tl.full([1], scale, DTYPE)
    units = (log2_scale, gain)
    SLOPES: tl.constexpr = dkey is not None or dbias is not None
    given = (query, douts, high, low, delta)
    for start in tl.range(first, last, BLOCK_N, num_stages=1):
        biases = biases_of(bias, bias_strides, store, head, start, last, BLOCK_N)
        keep = kept_keys(mask, mask_strides, store, start, last, BLOCK_N, True, biases)
        keys = load_tile(tile_at(key, key_strides, store, head, start, BLOCK_N, D_PAD, ALIGN[1]), keep, D)
        values = load_tile(tile_at(value, value_strides, store, head, start, BLOCK_N, E_PAD, ALIGN[2]), keep, E).to(
            OPERAND
        )
        dk = tl.zeros([BLOCK_N, D_PAD], DTYPE)
        dv = tl.zeros([BLOCK_N, E_PAD], DTYPE)
        db = tl.zeros([BLOCK_N], DTYPE)
        for block in range(0, tl.cdiv(L, BLOCK_L)):
            rows = load_rows(given, query_strides, sizes, (batch, head, block), D, E, BLOCK_L, ALIGN, OWN)
            queries, slopes, _, _, _ = rows
            weights, score_slopes, exact = weigh(
                keys, values, rows, None, biases, units, TURNED, SLOPES, OPERAND, PRECISION
            )
            if dbias is not None:
                db += tl.sum(exact, 1 if TURNED else 0)
            if dvalue is not None:
                dv += product_over_queries(weights, slopes, TURNED, OPERAND, PRECISION)
            if dkey is not None:
                dk += product_over_queries(score_slopes, queries, TURNED, OPERAND, PRECISION)
        if dvalue is not None:
            store_keys(dvalue, dv, keep, sizes, store, head, start, last, E)
        if dbias is not None:
            store_biases(dbias, db, keep, sizes, store, head, start, last)
        if dkey is not None:
            store_keys(dkey, dk * gain, keep, sizes, store, head, start, last, D)


class _Passes(NamedTuple):
    """The passes over the keys, the dtype of their operands, and their blocks of queries.

    A block has `block` rows; the rows of a head are padded to a multiple of `filled_to`. Without `keys`, the pass
    `queries` computes all gradients. With it, if there are several blocks, `keys` computes dK and dV, and `queries`
    only dQ, with one program per block.
    """

    operand: torch.dtype
    block: int
    filled_to: int
    queries: Kernel
    keys: Kernel | None


@chosen_once
def _chosen(
    dtype: torch.dtype,
    of_keys: torch.dtype,
    device: torch.device,
    D: int,
    E: int,
    queries: int,
    aligned: bool,
    tf32: bool,
) -> _Passes:
    """The passes for values of `dtype`; more `queries` than the widest block has make no difference.

    `tf32` says whether torch allows it, as in `forward.py`.
    """
    products = backward_products(dtype, max(D, E), device)
    wide = of_keys != dtype
    tiles = backward_tiles(products, device, max(D, E), queries, wide)
    align = tile_alignment(dtype, of_keys, D, E, aligned)
    options = {"D": D, "E": E, "ALIGN": align, **tiles._asdict()}
    if products.kind == "tf32x3":
        in_parts = _backward_in_parts.given(
            PIECE=piece_of_columns(device, max(D, E)), **options, enable_fp_fusion=False
        )
        return _Passes(products.operand, tiles.BLOCK_L, tiles.BLOCK_L, in_parts, None)
    options |= {"OPERAND": triton_dtype(products.operand), "PRECISION": products.input_precision}
    passing = options | backward_keys_tiles(products, device, max(D, E), wide)._asdict()
    keys = _backward_keys.given(TURNED=products.kind in IN_PLACE, **passing)
    return _Passes(products.operand, tiles.BLOCK_L, 1, _backward.given(**options), keys)


def attention_backward(inputs: AttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients (dquery, dkey, dvalue, dkey_bias); each that `needs` does not ask for is an empty tensor.

    `dlse` None stands for zeros. With values of a half type, queries and keys may be float32; then `dkey` is of the
    half type, and `dquery` is float32.
    """
    dout, dlse, query, key, value, key_padding_mask, cu_seqlens, out, lse, key_bias, scale, needs, _ = inputs
    (B, H, L, D), (N, E) = query.shape, value.shape[-2:]
    mask = mask_bytes(key_padding_mask)
    cut = cut_keys(B, L, N, cu_seqlens is not None)
    passes = _chosen(
        value.dtype, key.dtype, query.device, D, E, min(L, WIDEST_BLOCK), is_aligned(query, key, value), allows_tf32()
    )
    sums = torch.promote_types(query.dtype, torch.float32)
    # Without queries no kernel runs; keys beyond the last packed set belong to no run.
    fresh = torch.empty_like if B * L and cu_seqlens is None else torch.zeros_like
    of_bias = query if key_bias is None else key_bias
    given = ((query, query.dtype), (key, value.dtype), (value, value.dtype), (of_bias, sums))
    grads = [
        fresh(x, dtype=dtype, memory_format=torch.contiguous_format) if need else None
        for (x, dtype), need in zip(given, needs, strict=True)
    ]
    dquery, dkey, dvalue, dbias = grads
    with on_device(query):
        offsets = checked_offsets(cu_seqlens, N)
        unit = scale if key_bias is None else 1.0
        terms = row_terms(dout, dlse, out.contiguous(), lse.contiguous(), unit, passes.operand, sums, passes.filled_to)
        read = (query, key, value, mask, key_bias, offsets, *terms)
        numbers = (
            (query.stride(), key.stride(), value.stride(), strides_of(mask, 2)),
            (B, H, L, N),
            (cut.runs, cut.most_runs),
            scale,
            strides_of(key_bias, 3),
        )
        at_once = cut.runs == 1 and cu_seqlens is None and N > 0
        shares = dquery
        if dquery is not None and not (at_once and dquery.dtype == sums):
            shares = query.new_empty((cut.slots, H, L, D), dtype=sums)
        programs = cut.slots * H
        if passes.keys is not None:
            blocks = -(-L // passes.block)
            if blocks > 1 and not (dkey is None and dvalue is None and dbias is None):
                passes.keys(programs, *read, dkey, dvalue, dbias, *numbers)
                dkey = dvalue = dbias = None
            programs *= blocks
        if not (dquery is None and dkey is None and dvalue is None and dbias is None):
            passes.queries(programs, *read, shares, dkey, dvalue, dbias, *numbers)
        if shares is not None and dquery is not None and not at_once:
            sum_runs(shares, offsets, dquery, *numbers[1:4])
        elif shares is not None and dquery is not None:
            torch.mul(shares, scale, out=dquery)
    dquery, dkey, dvalue, dbias = (query.new_empty((0,)) if grad is None else grad for grad in grads)
    return dquery, dkey, dvalue, dbias
