# mypy: disable-error-code="no-untyped-def"
"""The state (out, lse) of each run of keys, and their merge."""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.dtypes import state_dtype
from ...runtime.tiles import chosen_once
from ...runtime.triton_launch import Kernel, allows_tf32, is_aligned, kernel, mask_bytes, on_device, strides_of
from ...runtime.triton_products import in_place, product, product_of_wide
from ...runtime.triton_rows import biases_of, kept_keys, load_tile, rows_at, tile_at
from ..contract import Attention
from .launch import WIDEST_BLOCK, forward_constants, merge_constants, tile_alignment
from .runs import checked_offsets, count_runs, cut_keys, first_slot, locate, set_bounds, unless_bad

LOG2_E = tl.constexpr(1.4426950408889634)
IN_SHARED = tl.constexpr(32)
"""The width from which float64 heads are multiplied in shared memory: in registers, most of them would be spilled."""


@triton.jit
def _factor(peak, scale, coarse, LIFT: tl.constexpr):
    """The unit of the weights, which depends on their maximum alone.

    It is `scale`, or the power of two `coarse` where scores are LARGE.
    """
    LARGE: tl.constexpr = 2.0**57 if peak.dtype == tl.float64 else 2.0**28 if LIFT == 1.0 else 2.0**25
    return tl.where(tl.abs(peak * scale) < LARGE, scale, coarse)


@triton.jit
def _offset(peak, factor):
    """A maximum in the unit `factor`, rounded, and finite even if there is no key yet.

    `tl.maximum` separates this product from a later subtraction: fused with it, the product would not be rounded.
    """
    LOWEST: tl.constexpr = -1.7e308 if peak.dtype == tl.float64 else -3.4e38
    return tl.maximum(peak * factor, LOWEST)


@triton.jit
def absorb(
    sums,
    queries,
    keys,
    values,
    keep,
    biases,
    units,
    LIFT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDDEN: tl.constexpr = True,
):
    """Update `sums`, which are (maximum, sum of weights, weighted values), with one tile.

    Scaling and subtracting the maximum are one multiply-add. The maximum is kept as a score. Its product with the scale
    is rounded, but the multiply-add does not round its own product. The sum of weights cancels this difference, unless
    scores are LARGE. Such scores are so far apart that a power of two, `coarse`, can serve as the scale, and it rounds
    nothing. Weights are multiplied by LIFT in the product with the values, but not in their sum. With `biases` of the
    keys, or of keys for each query, scores are first multiplied by `gain`, and `scale` is that of base 2 alone. `units`
    are (scale, coarse, gain).
    """
    peak, total, acc = sums
    scale, coarse, gain = units
    scores = product_of_wide(queries, tl.trans(keys), OPERAND, PRECISION, HIDDEN)
    if biases is not None:
        scores = tl.fma(scores, gain, biases if len(biases.shape) == 2 else biases[None, :])
    if keep is not None:
        scores = tl.where(keep if len(keep.shape) == 2 else keep[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    factor = _factor(higher, scale, coarse, LIFT)
    offset = _offset(higher, factor)
    weights = tl.exp2(scores * factor[:, None] - offset[:, None])
    fade = tl.exp2(_offset(peak, factor) - offset)
    total = total * fade + tl.sum(weights, 1)
    if PRECISION == "tf32x3":
        weights, values = in_place(weights, values)
    acc = acc * fade[:, None] + product(weights * LIFT, values, OPERAND, PRECISION, HIDDEN)
    return higher, total, acc


@triton.jit
def share_of_weight(total, highest, LIFT: tl.constexpr, OPERAND: tl.constexpr):
    """The factor of `acc`: 1 over the sum of the weights as they were multiplied by the values, or 1 for an empty sum.

    The `highest` weight is 1 up to the rounding of its exponent; at scores of 1e6 it may be 1.02. A half type rounds
    this weight in the product with its value. The sum uses the rounded weight, so that a row is exactly a key's value
    if that key has all the weight.
    """
    empty = total == 0
    if OPERAND.primitive_bitwidth == 16:
        highest = tl.where(empty, 1, highest)
        share = highest / (tl.where(empty, 1, total) * (highest * LIFT).to(OPERAND).to(highest.dtype))
    else:
        share = 1 / (tl.where(empty, 1, total) * LIFT)
    return share


@triton.jit
def state_of(sums, scale, units, LIFT: tl.constexpr, OPERAND: tl.constexpr):
    """(out, lse) of the sums of `absorb`; `scale` is in float64."""
    peak, total, acc = sums
    factor = _factor(peak, units[0], units[1], LIFT)
    offset = _offset(peak, factor)
    peak_score = offset.to(tl.float64) / factor.to(tl.float64) * scale
    share = share_of_weight(total, tl.exp2(tl.fma(peak, factor, -offset)), LIFT, OPERAND)
    return acc * share[:, None], peak_score + tl.log(total.to(tl.float64))


@triton.jit
def store_state(to, state, before, strides, slot_head, place, L, E: tl.constexpr):
    """Store the state of one run of keys for one block of queries, merged with the state `before` if there is one.

    The states are (out, lse), with the `strides` of the one before; `place` is (batch, head, block of queries).
    """
    acc, logarithm = state
    state_out, state_lse = before
    batch, head, block = place
    BLOCK_L: tl.constexpr = acc.shape[0]
    E_PAD: tl.constexpr = acc.shape[1]
    rows = block * BLOCK_L + tl.arange(0, BLOCK_L)
    inside = (rows < L)[:, None] & (tl.arange(0, E_PAD) < E)[None, :]
    if state_lse is not None:
        pointers = tile_at(state_lse, strides[1], batch, head, block * BLOCK_L, BLOCK_L, 1, 0)
        lses = tl.load(pointers, mask=(rows < L)[:, None], other=0.0)
        pointers = tile_at(state_out, strides[0], batch, head, block * BLOCK_L, BLOCK_L, E_PAD, 0)
        outs = tl.load(pointers, mask=inside, other=0.0)
        acc, logarithm = _add_state(acc, logarithm, outs, lses.reshape([BLOCK_L]))
    row = slot_head.to(tl.int64) * L + rows
    tl.store(rows_at(to[0], row, E, E_PAD), acc, mask=inside)
    tl.store(to[1] + row, logarithm, mask=rows < L)


@triton.jit
def _add_state(run_out, run_lse, state_out, state_lse):
    """The state of one run of keys merged with another state, with the same bits as from `_merge`."""
    DTYPE: tl.constexpr = run_out.dtype
    peak = tl.maximum(run_lse, state_lse)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    merged = peak + tl.log(tl.exp(run_lse - peak) + tl.exp(state_lse - peak))
    anchor = tl.where(merged == float("-inf"), 0.0, merged)
    acc = run_out * tl.exp(run_lse - anchor).to(DTYPE)[:, None]
    state_out = unless_empty(state_out, state_lse)
    return _plus(acc, tl.exp(state_lse - anchor).to(DTYPE)[:, None], state_out), merged


@triton.jit
def unless_empty(outs, lse):
    """Rows of `outs`, with 0 for rows that saw no key: these may hold a NaN, and 0 times a NaN is not 0."""
    return tl.where((lse == float("-inf"))[:, None], 0.0, outs)


@triton.jit
def _plus(acc, weight, outs):
    """acc + weight * outs, rounded once. Without this, the compiler may fuse a sum of products in one of two ways."""
    return tl.fma(tl.broadcast_to(weight, outs.shape), outs, acc)


@kernel("query", "key", "value", "mask", "bias", "state_out", "state_lse")
def _forward(
    query,
    key,
    value,
    mask,
    bias,
    offsets,
    state_out,
    state_lse,
    out,
    lse,
    strides: tl.int64,
    sizes: tl.int32,
    cut: tl.int32,
    scale: tl.float64,
    coarse: tl.float64,
    sign: tl.float32,
    bias_strides: tl.int64,
    gain: tl.float64,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    LIFT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the state of one run of keys for one block of queries, merged with the incoming state if there is one.

    Keys may be wider than OPERAND, the dtype of the values. The maximum needs a positive scale, so the queries take its
    `sign`. Weights reach up to LIFT, because float16 has few digits below 2**-14. With a `bias`, `gain` is the scale,
    and the other three are those of the scale 1.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    D_PAD: tl.constexpr = max(triton.next_power_of_2(D), 16)
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    B, H, L, N = sizes
    query_strides, key_strides, value_strides, mask_strides, out_strides, lse_strides = strides
    blocks = tl.cdiv(L, BLOCK_L)
    block = tl.program_id(0) % blocks
    slot_head = tl.program_id(0) // blocks
    head = slot_head % H
    batch, first, last = locate(slot_head // H, offsets, B, N, cut)
    rows = block * BLOCK_L + tl.arange(0, BLOCK_L)
    pointers = tile_at(query, query_strides, batch, head, block * BLOCK_L, BLOCK_L, D_PAD, ALIGN[0])
    queries = (load_tile(pointers, rows < L, D) * sign).to(OPERAND)
    if offsets is not None:
        batch = 0

    scale_ = tl.full([1], scale, tl.float64)
    log2_scale = (scale_ * LOG2_E).to(DTYPE)
    units = (log2_scale, tl.full([1], coarse, DTYPE), None if bias is None else tl.full([1], gain, DTYPE))
    sums = (tl.full([BLOCK_L], float("-inf"), DTYPE), tl.zeros([BLOCK_L], DTYPE), tl.zeros([BLOCK_L, E_PAD], DTYPE))
    HIDDEN: tl.constexpr = max(D_PAD, E_PAD) < IN_SHARED
    whole = first + (last - first) // BLOCK_N * BLOCK_N
    for RAGGED in tl.static_range(2):  # whole tiles, then the rest
        for start in tl.range(
            whole if RAGGED else first, last if RAGGED else whole, BLOCK_N, num_stages=1 if RAGGED else None
        ):
            biases = biases_of(bias, bias_strides, batch, head, start, last, BLOCK_N)
            keep = kept_keys(mask, mask_strides, batch, start, last, BLOCK_N, RAGGED, biases)
            keys = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, D_PAD, ALIGN[1]), keep, D)
            values = load_tile(tile_at(value, value_strides, batch, head, start, BLOCK_N, E_PAD, ALIGN[2]), keep, E)
            sums = absorb(sums, queries, keys, values, keep, biases, units, LIFT, OPERAND, PRECISION, HIDDEN)
    state = state_of(sums, scale_, units, LIFT, OPERAND)
    before, place = (state_out, state_lse), (batch, head, block)
    store_state((out, lse), state, before, (out_strides, lse_strides), slot_head, place, L, E)


@kernel("state_out", "state_lse")
def _merge(
    run_out,
    run_lse,
    state_out,
    state_lse,
    offsets,
    out,
    lse,
    strides: tl.int64,
    sizes: tl.int32,
    cut: tl.int32,
    E: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merge the runs of one row and the incoming state into one state.

    MOST, the most runs, and CHUNK, the runs per step, fix the order of additions. They depend only on L and E.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    B, H, L, N = sizes
    out_strides, lse_strides = strides
    runs, most_runs = cut
    row = tl.program_id(0) % L
    head = tl.program_id(0) // L % H
    batch = tl.program_id(0) // L // H
    first, last = set_bounds(offsets, batch, N)
    count = count_runs(last - first, most_runs)
    stride = tl.cast(H, tl.int64) * L
    start = first_slot(offsets, batch, N, runs) * stride + tl.cast(head, tl.int64) * L + row

    every = tl.arange(0, MOST)
    parts = tl.load(run_lse + start + every * stride, mask=every < count, other=float("-inf"))
    state = tl.full([1], float("-inf"), tl.float64)
    if state_lse is not None:
        state = tl.load(tile_at(state_lse, lse_strides, batch, head, row, 1, 1, 0)).reshape([1])
    peak = tl.maximum(tl.max(parts, 0), tl.max(state, 0))
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    merged = peak + tl.log(tl.sum(tl.exp(parts - peak), 0) + tl.sum(tl.exp(state - peak), 0))
    anchor = tl.where(merged == float("-inf"), 0.0, merged)

    columns = tl.arange(0, E_PAD)
    acc = tl.zeros([1, E_PAD], DTYPE)
    for chunk in range(0, count, CHUNK):
        run = chunk + tl.arange(0, CHUNK)
        weights = tl.exp(tl.load(run_lse + start + run * stride, mask=run < count, other=float("-inf")) - anchor).to(
            DTYPE
        )
        outs = tl.load(
            rows_at(run_out, start + run * stride, E, E_PAD),
            mask=(run < count)[:, None] & (columns < E)[None, :],
            other=0.0,
        )
        acc += tl.sum(weights[:, None] * outs, 0)[None, :]
    if state_lse is not None:
        outs = tl.load(
            tile_at(state_out, out_strides, batch, head, row, 1, E_PAD, 0), mask=(columns < E)[None, :], other=0.0
        )
        acc = _plus(acc, tl.exp(state - anchor).to(DTYPE)[:, None], unless_empty(outs, state))
    acc = unless_bad(acc, offsets, B)
    tl.store(rows_at(out, tl.program_id(0) + tl.arange(0, 1), E, E_PAD), acc, mask=(columns < E)[None, :])
    tl.store(lse + tl.program_id(0), unless_bad(merged, offsets, B))


def attention_forward(inputs: Attention) -> tuple[Tensor, Tensor]:
    """Return (out, lse): the attention over all keys, merged with the incoming state if there is one.

    With values of a half type, queries and keys may be float32: the queries are rounded, and the keys are not.
    """
    query, key, value, key_padding_mask, cu_seqlens, state_out, state_lse, key_bias, scale, _ = inputs
    (B, H, L, D), (*_, N, E) = query.shape, value.shape
    mask = mask_bytes(key_padding_mask)
    runs, most_runs, slots = cut_keys(B, L, N, cu_seqlens is not None)
    at_once = runs == 1 and cu_seqlens is None
    forward, block = _chosen(
        value.dtype, key.dtype, query.device, D, E, min(L, WIDEST_BLOCK), is_aligned(query, key, value), allows_tf32()
    )
    of_state = state_strides(state_out, state_lse)
    with on_device(query):
        offsets = checked_offsets(cu_seqlens, N)
        out = query.new_empty(slots, H, L, E, dtype=state_dtype(query.dtype))
        lse = query.new_empty(slots, H, L, dtype=torch.float64)
        given = (query, key, value, mask, key_bias, offsets)
        before = (state_out, state_lse) if at_once else (None, None)
        strides = (query.stride(), key.stride(), value.stride(), strides_of(mask, 2), *of_state)
        numbers = (*units(scale if key_bias is None else 1.0), strides_of(key_bias, 3), scale)
        programs, cut = slots * H * -(-L // block), (runs, most_runs)
        forward(programs, *given, *before, out, lse, strides, (B, H, L, N), cut, *numbers)
        if at_once:
            return out, lse
        merged = out.new_empty(B, H, L, E), lse.new_empty(B, H, L)
        read, constants = (out, lse, state_out, state_lse, offsets), merge_constants(most_runs, E)
        _merge(B * H * L, *read, *merged, of_state, (B, H, L, N), cut, **constants)
        return merged


def state_strides(state_out: Tensor | None, state_lse: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strides of an incoming state, in the form that kernels take."""
    return _NO_STRIDES if state_out is None or state_lse is None else (state_out.stride(), (*state_lse.stride(), 0))


_NO_STRIDES = ((0,) * 4, (0,) * 4)


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
) -> tuple[Kernel, int]:
    """`_forward` for values of `dtype`, and the number of queries in a block.

    More `queries` than the widest block has make no difference. `tf32` says whether torch allows it.
    """
    align = tile_alignment(dtype, of_keys, D, E, aligned)
    constants = forward_constants(dtype, device, D, E, queries, of_keys != dtype)
    return _forward.given(ALIGN=align, **constants), constants["BLOCK_L"]


@cache
def units(scale: float) -> tuple[float, float, float]:
    """The size of the scale, the largest power of two not above it in units of base 2, and its sign."""
    return (
        abs(scale) or 1.0,
        2.0 ** math.floor(math.log2(abs(scale or 1.0) / math.log(2))),
        float((scale > 0) - (scale < 0)),
    )
