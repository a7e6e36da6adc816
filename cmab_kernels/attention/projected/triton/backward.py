# mypy: disable-error-code="no-untyped-def"
"""Gradients without atomics, and without a key or a value in memory: both passes project the inputs again.

With dy, the gradients [dK, dV] of the projections of a tile (see `attention.triton.backward`):

    dQ = scale dS K      dW = dy' x^      db = sum dy      dx^ = sum over heads of dy W

One pass holds a head's queries and sums dQ, dW and db over its rows. The other holds a tile of rows and sums dx^ over
the heads of all blocks. The gradient of the norm is dx = (dx^ - mean(dx^) - x^ mean(dx^ x^)) / sqrt(variance + eps).
Its means are computed from dy as means of dy (W 1) and of dy (x^ W')', so that a column of dx^ does not need the
others.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.triton_launch import alignment, kernel, mask_bytes, on_device
from ....runtime.triton_products import in_place, product
from ....runtime.triton_rows import kept_keys, rows_at
from ...triton.backward import product_over_queries, scores_of, weigh
from ...triton.forward import LOG2_E
from ...triton.rows import load_rows, row_terms, sum_runs
from ...triton.runs import Cut, checked_offsets, cut_keys, locate
from ..contract import ProjectedAttentionBackward
from .launch import (
    MOST_PROGRAMS,
    SPLIT,
    apart,
    chunks,
    input_constants,
    joined,
    products,
    queries_at_once,
    query_constants,
    query_products,
    row_strides,
)
from .tiles import columns_of_chunk, head_bias, head_columns, head_rows, normed_columns, projected, row_norms


@triton.jit
def _in_order(slopes, keys, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The product of the gradients of scores of `weigh` and the keys."""
    if PRECISION == "tf32x3":
        slopes, keys = in_place(slopes, keys)
    return product(slopes, keys, OPERAND, PRECISION)


@triton.jit
def _of_other_chunks(
    given,
    terms,
    bias,
    at,
    chunk,
    keep,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    NORMED: tl.constexpr,
    TURNED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The contributions of all other chunks of a wide head to the scores of a tile, and to their gradients."""
    D_PAD: tl.constexpr = columns_of_chunk(D)
    E_PAD: tl.constexpr = columns_of_chunk(E)
    CHUNKS: tl.constexpr = max(triton.cdiv(D, D_PAD), triton.cdiv(E, E_PAD))
    mean = given[5]
    BLOCK_N: tl.constexpr = mean.shape[0]
    scores = tl.zeros([BLOCK_N, BLOCK_L] if TURNED else [BLOCK_L, BLOCK_N], mean.dtype)
    dweights = tl.zeros(scores.shape, mean.dtype)
    for ahead in range(1, CHUNKS):
        other = (chunk + ahead) % CHUNKS
        keys, values = projected(*given, *at, other, keep, C, D, E, D_PAD, E_PAD, COLUMNS, ALIGN[1], NORMED, OPERAND, PRECISION)
        key_bias, value_bias = head_bias(bias, *at, other, D, E, D_PAD, E_PAD)
        queries, slopes, _, _, _ = load_rows(*terms, D, E, D_PAD, E_PAD, BLOCK_L, ALIGN, OPERAND, other)
        scores += scores_of(keys + key_bias[None, :], queries, TURNED, OPERAND, PRECISION)
        dweights += scores_of((values + value_bias[None, :]).to(OPERAND), slopes, TURNED, OPERAND, PRECISION)
    return scores, dweights


@kernel("query", "inputs", "weight", "bias", "mask", "high", "low", "delta")
def _projected_backward(
    query,
    inputs,
    weight,
    bias,
    mask,
    offsets,
    douts,
    high,
    low,
    delta,
    dquery,
    dweight,
    dbias,
    strides: tl.int64,
    sizes: tl.int32,
    cut: tl.int32,
    programs: tl.int32,
    scale: tl.float64,
    eps: tl.float64,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    ALIGN: tl.constexpr,
    NORMED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Shares of dQ, dW and db for one block of queries of one head.

    A program takes every `most`-th run. It stores a share of dQ for each run, and one share of dW and db for all its
    runs: PIECE columns of them, and for wide heads the rows of one chunk.
    """
    DTYPE: tl.constexpr = high.dtype.element_ty
    D_PAD: tl.constexpr = columns_of_chunk(D)
    E_PAD: tl.constexpr = columns_of_chunk(E)
    CHUNKS: tl.constexpr = max(triton.cdiv(D, D_PAD), triton.cdiv(E, E_PAD))
    QUERY: tl.constexpr = dquery is not None
    PROJECTION: tl.constexpr = dweight is not None or dbias is not None
    B, K, H, L, N = sizes
    slots, most = programs
    query_strides, input_strides, mask_strides = strides
    PIECES: tl.constexpr = triton.cdiv(C, PIECE) if dweight is not None else 1
    piece = tl.program_id(0) % PIECES * PIECE
    chunk = tl.program_id(0) // PIECES % CHUNKS
    part = tl.program_id(0) // PIECES // CHUNKS
    blocks = tl.cdiv(L, BLOCK_L)
    block = part % blocks
    head = part // blocks % (K * H)
    share = part // blocks // (K * H)
    at = (head // H, head % H, H)
    key_bias, value_bias = head_bias(bias, *at, chunk, D, E, D_PAD, E_PAD)
    scale_ = tl.full([1], scale, DTYPE)
    log2_scale = (tl.full([1], scale, tl.float64) * LOG2_E).to(DTYPE)
    dkey_weight = tl.zeros([D_PAD, PIECE], DTYPE)
    dvalue_weight = tl.zeros([E_PAD, PIECE], DTYPE)
    dkey_bias = tl.zeros([D_PAD], DTYPE)
    dvalue_bias = tl.zeros([E_PAD], DTYPE)
    for slot in range(share, slots, most):
        batch, first, last = locate(slot, offsets, B, N, cut)
        terms = (query, douts, high, low, delta, query_strides, (B, K * H, L, N), batch, head, block)
        rows = load_rows(*terms, D, E, D_PAD, E_PAD, BLOCK_L, ALIGN, OPERAND, chunk)
        queries, slopes, _, _, _ = rows
        store = batch if offsets is None else 0
        dq = tl.zeros([BLOCK_L, D_PAD], DTYPE)
        for start in tl.range(first, last, BLOCK_N, num_stages=1):
            keep = kept_keys(mask, mask_strides, store, start, last, BLOCK_N, True)
            mean, factor = row_norms(inputs, input_strides, store, start, keep, eps, C, BLOCK_N, COLUMNS, ALIGN[1], NORMED, DTYPE)
            given = (inputs, input_strides, weight, store, start, mean, factor)
            keys, values = projected(*given, *at, chunk, keep, C, D, E, D_PAD, E_PAD, COLUMNS, ALIGN[1], NORMED, OPERAND, PRECISION)
            keys += key_bias[None, :]
            values += value_bias[None, :]
            others = None
            if CHUNKS > 1:
                others = _of_other_chunks(
                    given, terms, bias, at, chunk, keep, C, D, E, BLOCK_L, COLUMNS, ALIGN, NORMED, False, OPERAND, PRECISION
                )
            weights, score_slopes = weigh(keys, values.to(OPERAND), rows, keep, log2_scale, False, True, OPERAND, PRECISION, others)
            if QUERY:
                dq += _in_order(score_slopes, keys, OPERAND, PRECISION)
            if PROJECTION:
                dkeys = product(tl.trans(score_slopes), queries, OPERAND, PRECISION) * scale_
                dvalues = product(tl.trans(weights), slopes, OPERAND, PRECISION)
                dkey_bias += tl.sum(dkeys, 0)
                dvalue_bias += tl.sum(dvalues, 0)
                if dweight is not None:
                    normed = normed_columns(inputs, input_strides, store, start, keep, piece, mean, factor, C, PIECE, ALIGN[1], NORMED)
                    dkey_weight += product(tl.trans(dkeys), normed, OPERAND, PRECISION)
                    dvalue_weight += product(tl.trans(dvalues), normed, OPERAND, PRECISION)
        if QUERY:
            row = block * BLOCK_L + tl.arange(0, BLOCK_L)
            first_column = chunk * D_PAD
            inside = (row < L)[:, None] & (first_column + tl.arange(0, D_PAD) < D)[None, :] & (piece == 0)
            tl.store(rows_at(dquery, (tl.cast(slot, tl.int64) * (K * H) + head) * L + row, D, D_PAD, first_column), dq, mask=inside)
    if PROJECTION:
        first_row = (tl.cast(share, tl.int64) * blocks + block) * K * H * (D + E)
        key_rows, value_rows, is_key, is_value = head_rows(*at, chunk, D, E, D_PAD, E_PAD)
        if dbias is not None:
            tl.store(dbias + (first_row + key_rows), dkey_bias, mask=is_key & (piece == 0))
            tl.store(dbias + (first_row + value_rows), dvalue_bias, mask=is_value & (piece == 0))
        if dweight is not None:
            inside = (piece + tl.arange(0, PIECE) < C)[None, :]
            tl.store(rows_at(dweight, first_row + key_rows, C, PIECE, piece), dkey_weight, mask=is_key[:, None] & inside)
            tl.store(rows_at(dweight, first_row + value_rows, C, PIECE, piece), dvalue_weight, mask=is_value[:, None] & inside)


@kernel("query", "inputs", "weight", "bias", "mask", "high", "low", "delta")
def _projected_backward_inputs(
    query,
    inputs,
    weight,
    bias,
    mask,
    offsets,
    douts,
    high,
    low,
    delta,
    dinputs,
    strides: tl.int64,
    sizes: tl.int32,
    cut: tl.int32,
    scale: tl.float64,
    eps: tl.float64,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNED: tl.constexpr,
    ALIGN: tl.constexpr,
    NORMED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """PIECE columns of dx for every SPLIT-th tile of a run.

    A tile stays in registers while all heads and blocks of queries are read in turn.
    """
    DTYPE: tl.constexpr = high.dtype.element_ty
    D_PAD: tl.constexpr = columns_of_chunk(D)
    E_PAD: tl.constexpr = columns_of_chunk(E)
    CHUNKS: tl.constexpr = max(triton.cdiv(D, D_PAD), triton.cdiv(E, E_PAD))
    PIECES: tl.constexpr = triton.cdiv(C, PIECE)
    B, K, H, L, N = sizes
    query_strides, input_strides, mask_strides = strides
    piece = tl.program_id(0) % PIECES * PIECE
    step = tl.program_id(0) // PIECES % SPLIT
    batch, first, last = locate(tl.program_id(0) // PIECES // SPLIT, offsets, B, N, cut)
    store = batch if offsets is None else 0
    scale_ = tl.full([1], scale, DTYPE)
    log2_scale = (tl.full([1], scale, tl.float64) * LOG2_E).to(DTYPE)
    for start in tl.range(first + step * BLOCK_N, last, SPLIT * BLOCK_N, num_stages=1):
        keep = kept_keys(mask, mask_strides, store, start, last, BLOCK_N, True)
        mean, factor = row_norms(inputs, input_strides, store, start, keep, eps, C, BLOCK_N, COLUMNS, ALIGN[1], NORMED, DTYPE)
        dnormed = tl.zeros([BLOCK_N, PIECE], DTYPE)
        total = tl.zeros([BLOCK_N], DTYPE)
        along = tl.zeros([BLOCK_N], DTYPE)
        for part in range(0, K * H * CHUNKS):
            head, chunk = part // CHUNKS, part % CHUNKS
            at = (head // H, head % H, H)
            given = (inputs, input_strides, weight, store, start, mean, factor)
            keys, values = projected(*given, *at, chunk, keep, C, D, E, D_PAD, E_PAD, COLUMNS, ALIGN[1], NORMED, OPERAND, PRECISION)
            key_bias, value_bias = head_bias(bias, *at, chunk, D, E, D_PAD, E_PAD)
            keys += key_bias[None, :]
            values += value_bias[None, :]
            dkeys = tl.zeros([BLOCK_N, D_PAD], DTYPE)
            dvalues = tl.zeros([BLOCK_N, E_PAD], DTYPE)
            for block in range(0, tl.cdiv(L, BLOCK_L)):
                terms = (query, douts, high, low, delta, query_strides, (B, K * H, L, N), batch, head, block)
                rows = load_rows(*terms, D, E, D_PAD, E_PAD, BLOCK_L, ALIGN, OPERAND, chunk)
                queries, slopes, _, _, _ = rows
                others = None
                if CHUNKS > 1:
                    others = _of_other_chunks(
                        given, terms, bias, at, chunk, keep, C, D, E, BLOCK_L, COLUMNS, ALIGN, NORMED, TURNED, OPERAND, PRECISION
                    )
                weights, score_slopes = weigh(keys, values.to(OPERAND), rows, None, log2_scale, TURNED, True, OPERAND, PRECISION, others)
                dvalues += product_over_queries(weights, slopes, TURNED, OPERAND, PRECISION)
                dkeys += product_over_queries(score_slopes, queries, TURNED, OPERAND, PRECISION)
            dkeys *= scale_
            key_weight, value_weight = head_columns(weight, *at, chunk, piece, C, D, E, D_PAD, E_PAD, PIECE)
            dnormed += product(dkeys, key_weight, OPERAND, PRECISION) + product(dvalues, value_weight, OPERAND, PRECISION)
            if NORMED:
                along += tl.sum(dkeys * (keys - key_bias[None, :]), 1) + tl.sum(dvalues * (values - value_bias[None, :]), 1)
                key_sum, value_sum = _row_sums(weight, *at, chunk, C, D, E, D_PAD, E_PAD, COLUMNS, DTYPE)
                total += tl.sum(dkeys * key_sum[None, :], 1) + tl.sum(dvalues * value_sum[None, :], 1)
        if NORMED:
            normed = normed_columns(inputs, input_strides, store, start, keep, piece, mean, factor, C, PIECE, ALIGN[1], NORMED)
            dnormed = (dnormed - (total / C)[:, None] - normed * (along / C)[:, None]) * factor[:, None]
        row = start + tl.arange(0, BLOCK_N)
        inside = (row < last)[:, None] & (piece + tl.arange(0, PIECE) < C)[None, :]
        dnormed = tl.where(keep[:, None], dnormed, 0.0)
        tl.store(rows_at(dinputs, tl.cast(store, tl.int64) * N + row, C, PIECE, piece), dnormed.to(dinputs.dtype.element_ty), mask=inside)


@triton.jit
def _row_sums(
    weight,
    block,
    head,
    heads,
    chunk,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """W 1 for a chunk of the keys and the values of a head."""
    keys = tl.zeros([D_PAD], DTYPE)
    values = tl.zeros([E_PAD], DTYPE)
    for column in range(0, C, COLUMNS):
        key_weight, value_weight = head_columns(weight, block, head, heads, chunk, column, C, D, E, D_PAD, E_PAD, COLUMNS)
        keys += tl.sum(key_weight, 1)
        values += tl.sum(value_weight, 1)
    return keys, values


def projected_attention_backward(given: ProjectedAttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return contiguous gradients (dquery, dinputs, dweight, dbias), an empty tensor for each that is not needed."""
    dout, dlse, query, inputs, weight, bias, key_padding_mask, cu_seqlens, out, lse, scale, eps, needs, _ = given
    queries, mask, normed = joined(query), mask_bytes(key_padding_mask), eps is not None
    E, operand = out.shape[-1], products(inputs.dtype).operand
    with on_device(query):
        offsets = checked_offsets(cu_seqlens, inputs.shape[1])
        made = joined(out).contiguous(), joined(lse).contiguous()
        terms = row_terms(joined(dout), joined(dlse), *made, scale, operand, query.dtype)
        call = _Call(
            (queries, inputs, weight.contiguous(), bias.contiguous(), mask, offsets, *terms),
            (queries.stride(), row_strides(inputs), (0, 0) if mask is None else mask.stride()),
            (inputs.shape[0] if cu_seqlens is None else query.shape[1], query.shape[0], query.shape[2], query.shape[3], inputs.shape[1]),
            (scale, eps or 0.0),
            {"ALIGN": alignment(queries, inputs), "NORMED": normed},
        )
        dquery, dweight, dbias = _of_queries(call, E, (needs[0], *needs[2:]))
        dinputs = _of_inputs(call, E) if needs[1] else inputs.new_empty(0)
    return dquery, dinputs, dweight, dbias


class _Call(NamedTuple):
    """The arguments of both passes: tensors, strides, sizes (B, K, H, L, N), scale and eps, and constants."""

    given: tuple[Any, ...]
    strides: tuple[tuple[int, ...], ...]
    sizes: tuple[int, int, int, int, int]
    numbers: tuple[float, float]
    constants: dict[str, Any]

    def cut(self, most: int) -> Cut:
        """The cut of the rows if `most` queries are processed at once."""
        B, _, _, _, N = self.sizes
        return cut_keys(B, most, N, self.given[5] is not None)


def _of_queries(call: _Call, E: int, needs: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dquery, dweight, dbias); those that `needs` does not ask for are empty."""
    queries, inputs, weight, bias, _, offsets, *_ = call.given
    B, K, H, L, N = call.sizes
    if not any(needs):
        return queries.new_empty(0), weight.new_empty(0), bias.new_empty(0)
    D = queries.shape[-1]
    constants = query_constants(query_products(inputs.dtype, max(D, E), queries.device), inputs.shape[2], D, E, L)
    cut, blocks = call.cut(queries_at_once(K * H, L)), triton.cdiv(L, constants["BLOCK_L"])
    most = min(cut.slots, max(MOST_PROGRAMS // max(K * H * blocks, 1), 1))
    shares = [
        queries.new_empty((cut.slots, *queries.shape[1:])) if needs[0] else None,
        *(queries.new_empty((most * blocks, *t.shape)) if need else None for t, need in zip((weight, bias), needs[1:], strict=True)),
    ]
    pieces = triton.cdiv(inputs.shape[2], constants["PIECE"]) if needs[1] else 1
    lengths = (call.strides, call.sizes, (cut.runs, cut.most_runs), (cut.slots, most))
    programs = most * K * H * blocks * max(chunks(D), chunks(E)) * pieces
    _projected_backward(programs, *call.given, *shares, *lengths, *call.numbers, **call.constants, **constants)
    dquery, dweight, dbias = (queries.new_empty(0) if share is None else share.sum(0) for share in (None, *shares[1:]))
    if shares[0] is not None:
        dquery = torch.empty_like(queries, memory_format=torch.contiguous_format)
        sum_runs(shares[0], offsets, dquery, (B, K * H, L, N), (cut.runs, cut.most_runs), call.numbers[0])
        dquery = apart(dquery, K)
    return dquery, dweight, dbias


def _of_inputs(call: _Call, E: int) -> Tensor:
    """dinputs, contiguous."""
    queries, inputs, *_ = call.given
    constants = input_constants(products(inputs.dtype), inputs.shape[2], queries.shape[-1], E, call.sizes[3])
    cut, dinputs = call.cut(1), torch.empty_like(inputs, memory_format=torch.contiguous_format)
    programs = cut.slots * SPLIT * triton.cdiv(inputs.shape[2], constants["PIECE"])
    lengths = (call.strides, call.sizes, (cut.runs, cut.most_runs))
    _projected_backward_inputs(programs, *call.given, dinputs, *lengths, *call.numbers, SPLIT=SPLIT, **call.constants, **constants)
    return dinputs
