# mypy: disable-error-code="no-untyped-def"
"""The states of all prefixes.

The state of each window comes first, then a scan over all windows, then the prefixes within each window, merged with
the state of the windows before it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.dtypes import state_dtype
from ....runtime.triton_launch import alignment, kernel, mask_bytes, on_device, strides_of
from ....runtime.triton_rows import biases_of, kept_keys, load_tile, rows_at, tile_at
from ...triton.forward import (
    LOG2_E,
    _factor,
    _offset,
    absorb,
    share_of_weight,
    state_strides,
    units,
    unless_empty,
)
from ...triton.launch import WIDEST_BLOCK, forward_constants
from ..contract import PrefixAttention
from .cut import Windows, chunk_of, cut_windows, decay_of_windows, scan_constants, tile_of_keys, window_of


@triton.jit
def row_of_query(block, BLOCK_L: tl.constexpr, GROUP: tl.constexpr):
    """The query of each row of a tile."""
    return block * (BLOCK_L // GROUP) + tl.arange(0, BLOCK_L) % (BLOCK_L // GROUP)


@triton.jit
def chunk_of_row(BLOCK_L: tl.constexpr, GROUP: tl.constexpr):
    """Which of GROUP chunks each row of a tile belongs to."""
    return tl.arange(0, BLOCK_L) // (BLOCK_L // GROUP)


@triton.jit
def queries_of(
    query, strides, place, L, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_L: tl.constexpr, GROUP: tl.constexpr
):
    """The BLOCK_L rows of a tile: a block of queries, repeated for each of GROUP chunks in turn.

    `place` is (batch, head, block).
    """
    batch, head, block = place
    rows = row_of_query(block, BLOCK_L, GROUP)
    start = query + (tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1])
    offsets = rows.to(tl.int64)[:, None] * strides[2] + tl.arange(0, D_PAD).to(tl.int64)[None, :] * strides[3]
    return load_tile(start + offsets, rows < L, D)


@triton.jit
def weighted(weights, seen, rows):
    """The sums of the `seen` rows with the weights (sums, rows). Other rows take no part, even if they are NaN."""
    return tl.sum(tl.where(seen[:, :, None], weights[:, :, None] * rows[None, :, :], 0.0), 1)


@triton.jit
def plus_log(peak, total):
    """peak + log(total), or -inf for an empty sum; no lane takes a slow path of log, for which others would wait."""
    empty = total == 0
    return tl.where(empty, float("-inf"), peak + tl.log(tl.where(empty, 1, total).to(tl.float64)))


@triton.jit
def _state_of(sums, scale, units, LIFT: tl.constexpr, OPERAND: tl.constexpr):
    """(out, lse) of the sums of `absorb`.

    If no other key counts, lse is exactly the highest score, however its weight was rounded. Prefixes are compared with
    one another by their lse, to the last bit if logits are large.
    """
    peak, total, acc = sums
    factor = _factor(peak, units[0], units[1], LIFT)
    highest = tl.exp2(peak * factor - _offset(peak, factor))
    empty = total == 0
    relative = tl.where(empty, 0, total / tl.where(empty, 1, highest))
    logarithm = plus_log(tl.where(empty, 0, peak).to(tl.float64) * scale, relative)
    return acc * share_of_weight(total, highest, LIFT, OPERAND)[:, None], logarithm


@triton.jit
def _on_top(outs, logarithm, base_out, base_lse):
    """A state merged with the state of earlier keys."""
    DTYPE: tl.constexpr = outs.dtype
    peak = tl.maximum(logarithm, base_lse)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight, base_weight = tl.exp((logarithm - peak).to(DTYPE)), tl.exp((base_lse - peak).to(DTYPE))
    total = weight + base_weight
    share = 1 / tl.where(total == 0, 1, total)
    return outs * (weight * share)[:, None] + base_out * (base_weight * share)[:, None], plus_log(peak, total)


@triton.jit
def _faded(until, of, DTYPE: tl.constexpr):
    """What is added to the scores of keys (columns) in prefixes (rows): the differences of two sums of decays.

    Whole numbers are subtracted apart from the rest, because a float32 difference of large sums would be rounded.
    """
    if DTYPE == tl.float64:  # noqa: SIM300  not a comparison
        faded = until[:, None] - of[None, :]
    else:
        whole, whole_of = tl.floor(until), tl.floor(of)
        rest = (until - whole).to(DTYPE)[:, None] - (of - whole_of).to(DTYPE)[None, :]
        faded = (whole.to(DTYPE)[:, None] - whole_of.to(DTYPE)[None, :]) + rest
    return faded


@kernel("query", "key", "value", "mask", "bias")
def _windows(
    query,
    key,
    value,
    mask,
    bias,
    until,
    base_out,
    base_lse,
    out,
    lse,
    strides: tl.int64,
    sizes: tl.int32,
    every: tl.int32,
    cut: tl.int32,
    scale: tl.float64,
    coarse: tl.float64,
    sign: tl.float32,
    gain: tl.float64,
    D: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    LIFT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The states of GROUP prefixes of one window, for one block of queries, merged with the window's base if any.

    Prefix g of a window has its first (g + 1) `every` keys. The rows of all GROUP prefixes share a tile; each has its
    own maximum. `until` has the sums of the decays of the window's chunks, up to each chunk. With a `bias` or decays,
    `gain` is the scale, and the other three are those of the scale 1.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    D_PAD: tl.constexpr = max(triton.next_power_of_2(D), 16)
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    H, L, N, slots = sizes
    query_strides, key_strides, value_strides, mask_strides, bias_strides = strides
    blocks = tl.cdiv(L, BLOCK_L // GROUP)
    block = tl.program_id(0) % blocks
    window = tl.program_id(0) // blocks % cut[0]
    slot_head = tl.program_id(0) // blocks // cut[0]
    batch, head = slot_head // H, slot_head % H
    first, last = window_of(window, N, cut)
    query_row = row_of_query(block, BLOCK_L, GROUP)
    prefix = chunk_of_row(BLOCK_L, GROUP)
    queries = queries_of(query, query_strides, (batch, head, block), L, D, D_PAD, BLOCK_L, GROUP)
    queries = (queries * sign).to(query.dtype.element_ty)

    scale_ = tl.full([1], scale, tl.float64)
    log2_scale = (scale_ * LOG2_E).to(DTYPE)
    units = (log2_scale, tl.full([1], coarse, DTYPE), tl.full([1], gain, DTYPE))
    sums = (tl.full([BLOCK_L], float("-inf"), DTYPE), tl.zeros([BLOCK_L], DTYPE), tl.zeros([BLOCK_L, E_PAD], DTYPE))
    if until is not None:
        until += (slot_head.to(tl.int64) * cut[0] + window) * (cut[2] // every)
        newest = prefix if GROUP > 1 else (last - 1 - first) // every + tl.zeros([1], tl.int32)
        at = tl.load(until + newest.to(tl.int64))
    for start in tl.range(first, last, BLOCK_N, num_stages=1):
        biases = biases_of(bias, bias_strides, batch, head, start, last, BLOCK_N)
        keep = kept_keys(mask, mask_strides, batch, start, last, BLOCK_N, True, biases)
        keys = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, D_PAD, ALIGN[1]), keep, D)
        values = load_tile(tile_at(value, value_strides, batch, head, start, BLOCK_N, E_PAD, ALIGN[2]), keep, E)
        if GROUP > 1:
            keep = keep[None, :] & (((start - first + tl.arange(0, BLOCK_N)) // every)[None, :] <= prefix[:, None])
        if until is not None:
            before = start - first + tl.arange(0, BLOCK_N)
            of = tl.load(until + (before // every).to(tl.int64), mask=before < last - first, other=0.0)
            faded = _faded(at, of, DTYPE)
            biases = faded if biases is None else biases[None, :] + faded
        sums = absorb(sums, queries, keys, values, keep, biases, units, LIFT, OPERAND, PRECISION)

    outs, logarithm = _state_of(sums, scale_, units, LIFT, OPERAND)
    columns = tl.arange(0, E_PAD)
    if base_lse is not None:
        row = (slot_head.to(tl.int64) * cut[0] + window) * L + query_row
        base = tl.load(
            rows_at(base_out, row, E, E_PAD), mask=(query_row < L)[:, None] & (columns < E)[None, :], other=0.0
        )
        below = tl.load(base_lse + row, mask=query_row < L, other=0.0)
        outs, logarithm = _on_top(outs, logarithm, base, below if until is None else below + at)
    slot = window * GROUP + prefix
    inside = (query_row < L) & (slot < slots)
    row = (slot_head.to(tl.int64) * slots + slot) * L + query_row
    tl.store(rows_at(out, row, E, E_PAD), outs, mask=inside[:, None] & (columns < E)[None, :])
    tl.store(lse + row, logarithm, mask=inside)


@kernel("decay", "state_out", "state_lse")
def _scan(
    run_out,
    run_lse,
    decay,
    state_out,
    state_lse,
    out,
    lse,
    strides: tl.int64,
    sizes: tl.int32,
    parts: tl.int32,
    lag: tl.int32,
    E: tl.constexpr,
    TILE: tl.constexpr,
):
    """The states of all windows up to each one, for one query of a head, merged with the incoming state.

    If `lag` is 1, the state before each window is stored, else the state after the last of each `parts` windows.
    `decay` has a number for each window, which is added to the lse of what was held before it.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    H, L, windows, slots = sizes
    out_strides, lse_strides = strides
    query = tl.program_id(0) % L
    slot_head = tl.program_id(0) // L
    columns = (tl.arange(0, E_PAD) < E)[None, :]
    steps = tl.arange(0, TILE)
    newest = steps == TILE - 1
    acc = tl.zeros([1, E_PAD], DTYPE)
    before = tl.full([1], float("-inf"), tl.float64)
    if state_lse is not None:
        batch, head = slot_head // H, slot_head % H
        before = tl.load(tile_at(state_lse, lse_strides, batch, head, query, 1, 1, 0)).reshape([1])
        acc = tl.load(tile_at(state_out, out_strides, batch, head, query, 1, E_PAD, 0), mask=columns, other=0.0)
        acc = unless_empty(acc, before)
    for first in range(-lag, windows - lag, TILE):
        window = first + steps
        there = (window >= 0) & (window < windows)
        row = (slot_head.to(tl.int64) * windows + window) * L + query
        own = tl.load(run_lse + row, mask=there, other=float("-inf"))
        outs = tl.load(rows_at(run_out, row, E, E_PAD), mask=there[:, None] & columns, other=0.0)
        seen = steps[None, :] <= steps[:, None]
        if decay is not None:
            place = slot_head.to(tl.int64) * windows + window.to(tl.int64)
            logs = tl.load(decay + place, mask=there, other=0.0)
            faded = tl.sum(tl.where(seen, logs[None, :], 0.0), 1)  # since the first window of the tile
            own -= faded
        peak = tl.maximum(tl.max(tl.where(seen, own[None, :], float("-inf")), 1), before)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.where(seen, tl.exp((own[None, :] - peak[:, None]).to(DTYPE)), 0.0)
        weight = tl.exp((before - peak).to(DTYPE))
        total = tl.sum(weights, 1) + weight
        share = 1 / tl.where(total == 0, 1, total)
        accs = weighted(weights * share[:, None], seen, outs) + (weight * share)[:, None] * acc
        slot = window // parts + lag
        ends = (window % parts == parts - 1) | (window == windows - 1)
        inside = (ends | (lag == 1)) & (slot < slots) & (window < windows)
        row = slot_head.to(tl.int64) * slots * L + slot.to(tl.int64) * L + query
        tl.store(rows_at(out, row, E, E_PAD), accs, mask=inside[:, None] & columns)
        logarithm = plus_log(peak, total)
        if decay is not None:
            logarithm += faded
        tl.store(lse + row, logarithm, mask=inside)
        before = tl.sum(tl.where(newest, logarithm, 0.0), 0, keep_dims=True)  # a maximum would lose a NaN
        acc = tl.sum(tl.where(newest[:, None], accs, 0.0), 0, keep_dims=True)


def prefix_forward(inputs: PrefixAttention) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of every prefix."""
    query, key, value, key_padding_mask, state_out, state_lse, bias, log_decay, every, scale, _ = inputs
    (B, H, L, _), (N, E) = query.shape, value.shape[-2:]
    every = chunk_of(every, N)
    prefixes = -(-N // every)
    out = query.new_empty(B, H, prefixes, L, E, dtype=state_dtype(query.dtype))
    lse = query.new_empty(B, H, prefixes, L, dtype=torch.float64)
    if not lse.numel():
        return out, lse
    cut = cut_windows(N, every)
    mask = mask_bytes(key_padding_mask)
    with on_device(query):
        run_out, run_lse = out.new_empty(B, H, cut.windows, L, E), lse.new_empty(B, H, cut.windows, L)
        bases = (out, lse) if cut.group == 1 else (torch.empty_like(run_out), torch.empty_like(run_lse))
        until, decay = decay_of_windows(log_decay, cut)
        given = (query, key, value, mask, bias, until)
        _launch(given, (None, None), (run_out, run_lse), every, cut, scale, 1)
        read, strides = (run_out, run_lse, decay, state_out, state_lse), state_strides(state_out, state_lse)
        numbers = ((H, L, cut.windows, bases[1].shape[2]), cut.parts, int(cut.group > 1))
        _scan(B * H * L, *read, *bases, strides, *numbers, E=E, **scan_constants(E))
        if cut.group > 1:
            _launch(given, bases, (out, lse), every, cut, scale, cut.group)
    return out, lse


def _launch(
    given: tuple[Any, ...],
    base: tuple[Tensor | None, Tensor | None],
    to: tuple[Tensor, Tensor],
    every: int,
    cut: Windows,
    scale: float,
    group: int,
) -> None:
    """Fill the states `to` of `group` prefixes of each window; `base` are the states of the windows before, or None."""
    query, key, value, mask, bias, until = given
    (B, H, L, D), (N, E) = query.shape, value.shape[-2:]
    chosen = forward_constants(query.dtype, query.device, D, E, min(group * L, WIDEST_BLOCK))
    chosen["BLOCK_N"] = tile_of_keys(chosen["BLOCK_N"], cut.group > 1)
    programs = B * H * cut.windows * triton.cdiv(L, chosen["BLOCK_L"] // group)
    strides = (query.stride(), key.stride(), value.stride(), strides_of(mask, 2), strides_of(bias, 3))
    numbers = (every, cut.numbers, *units(scale if bias is None and until is None else 1.0), scale)
    options = {"GROUP": group, "ALIGN": alignment(query, key, value), **chosen}
    _windows(programs, *given, *base, *to, strides, (H, L, N, to[1].shape[2]), *numbers, **options)
