# mypy: disable-error-code="no-untyped-def"
"""Gradients of the states of all prefixes.

A scan in reverse computes what the prefixes send back. The gradient of attention then takes this in place of dout,
chunk by chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.tiles import has_little_shared_memory
from ....runtime.triton_launch import alignment, kernel, mask_bytes, on_device, triton_dtype
from ....runtime.triton_products import product
from ....runtime.triton_rows import GRAIN, kept_keys, load_tile, rows_at, tile_at
from ...triton.backward import product_over_queries, store_keys, weigh
from ...triton.forward import LOG2_E, state_strides
from ...triton.launch import WIDEST_BLOCK, backward_products, backward_tiles
from ...triton.rows import RESOLUTION, base_two, sum_runs
from ...triton.runs import MOST_RUNS as MOST_SHARES
from ..contract import PrefixAttentionBackward
from .cut import KEYS, MOST_RUNS, PREFIXES, chunk_of, cut_runs, group_of, scan_constants, tile_of_keys
from .forward import chunk_of_row, queries_of, row_of_query, weighted


@triton.jit
def _share(lse, of, DTYPE: tl.constexpr):
    """The share of sums with the logarithm `lse` in sums with the logarithm `of`; tiny differences count as 0.

    Exponents stop at -700, because exp takes a slow path for smaller ones, and the other lanes would wait.
    """
    difference = tl.where(lse - of > -2 * RESOLUTION * tl.abs(of), 0.0, lse - of)
    share = tl.exp(tl.maximum(difference, -700.0).to(DTYPE))
    return tl.where(lse == float("-inf"), 0.0, tl.where(difference < -700.0, 0.0, share))


@triton.jit
def _sent_by_later(
    run_a, run_c, lse, slot_head, run, query, runs, length, L, E: tl.constexpr, E_PAD: tl.constexpr, MOST: tl.constexpr
):
    """A and c that the later runs send back, relative to the first prefix of the next run."""
    later = run + 1 + tl.arange(0, MOST)
    there = later < runs
    row = (slot_head.to(tl.int64) * runs + later) * L + query
    own = tl.load(lse + later.to(tl.int64) * length * L, mask=there, other=float("inf"))
    following = tl.load(lse + (run + 1).to(tl.int64) * length * L, mask=run + 1 < runs, other=float("-inf"))
    share = tl.where(there, _share(following, own, tl.float64), 0.0)
    sent = tl.load(rows_at(run_a, row, E, E_PAD), mask=there[:, None] & (tl.arange(0, E_PAD) < E)[None, :], other=0.0)
    a = tl.sum(share.to(sent.dtype)[:, None] * sent, 0, keep_dims=True)
    return a, tl.sum(share * tl.load(run_c + row, mask=there, other=0.0), 0, keep_dims=True)


@kernel("dout", "dlse", "out", "lse", "state_out", "state_lse")
def _send_back(
    dout,
    dlse,
    out,
    lse,
    state_out,
    state_lse,
    run_a,
    run_c,
    slopes,
    high,
    low,
    delta,
    dstate_out,
    dstate_lse,
    strides: tl.int64,
    sizes: tl.int32,
    cut: tl.int32,
    scale: tl.float64,
    reciprocal: tl.float64,
    E: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    """One run of the scan of reference.py, for one query of a head.

    A is stored as `slopes`, -c as `delta`, and lse as a score `high` and a remainder `low`. Without `slopes`, only the
    values that the run sends to the prefixes before it are stored. With `slopes`, the values that later runs send are
    taken in, if there are any.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    E_PAD: tl.constexpr = triton.next_power_of_2(E)
    dout_strides, dlse_strides, out_strides, lse_strides = strides
    H, L, T = sizes
    runs, length = cut
    query = tl.program_id(0) % L
    run = tl.program_id(0) // L % runs
    slot_head = tl.program_id(0) // L // runs
    batch, head = (slot_head // H).to(tl.int64), (slot_head % H).to(tl.int64)
    columns = tl.arange(0, E_PAD)
    steps = tl.arange(0, TILE)
    first = run * length
    last = first + tl.minimum(length, T - first)
    lse += slot_head.to(tl.int64) * T * L + query  # of the first prefix
    a = tl.zeros([1, E_PAD], DTYPE)
    c = tl.zeros([1], tl.float64)
    if slopes is not None and run_a is not None:
        a, c = _sent_by_later(run_a, run_c, lse, slot_head, run, query, runs, length, L, E, E_PAD, MOST)
    dout += batch * dout_strides[0] + head * dout_strides[1] + query.to(tl.int64) * dout_strides[3]
    dlse += batch * dlse_strides[0] + head * dlse_strides[1] + query.to(tl.int64) * dlse_strides[3]
    for back in range(0, last - first, TILE):
        end = last - back
        prefix = end - TILE + steps
        here = prefix >= first
        t = prefix.to(tl.int64)
        logarithm = tl.load(lse + t * L, mask=here, other=float("-inf"))
        following = tl.load(lse + end.to(tl.int64) * L, mask=end < T, other=float("inf"))
        seen = logarithm != float("-inf")  # not even a NaN of a prefix without keys may reach other prefixes
        inside = seen[:, None] & (columns < E)[None, :]
        row = slot_head.to(tl.int64) * T * L + t * L + query
        slope = tl.load(
            dout + (t[:, None] * dout_strides[2] + columns.to(tl.int64)[None, :] * dout_strides[4]),
            mask=inside,
            other=0.0,
        )
        outs = tl.load(rows_at(out, row, E, E_PAD), mask=inside, other=0.0)
        added = tl.load(dlse + t * dlse_strides[2], mask=seen, other=0.0) - tl.sum(
            slope.to(tl.float64) * outs.to(tl.float64), 1
        )
        later = (steps[None, :] >= steps[:, None]) & seen[:, None]
        share = _share(logarithm[:, None], logarithm[None, :], DTYPE)
        carried = _share(logarithm, following, tl.float64)
        slope = weighted(share, later, slope.to(DTYPE)) + carried.to(DTYPE)[:, None] * a
        added = tl.sum(tl.where(later, share.to(tl.float64) * added[None, :], 0.0), 1) + carried * c
        oldest = prefix == tl.maximum(end - TILE, first)
        a = tl.sum(tl.where(oldest[:, None], slope, 0.0), 0, keep_dims=True)
        c = tl.sum(tl.where(oldest, added, 0.0), 0, keep_dims=True)
        if slopes is not None:
            score, rest = base_two(logarithm, scale, reciprocal, DTYPE)
            tl.store(
                rows_at(slopes, row, E, E_PAD),
                slope.to(slopes.dtype.element_ty),
                mask=here[:, None] & (columns < E)[None, :],
            )
            tl.store(high + row, score, mask=here)
            tl.store(low + row, rest, mask=here)
            tl.store(delta + row, (-added).to(DTYPE), mask=here)
    one = tl.arange(0, 1)
    if slopes is None:
        row = (slot_head.to(tl.int64) * runs + run) * L + query + one
        tl.store(rows_at(run_a, row, E, E_PAD), a, mask=(columns < E)[None, :])
        tl.store(run_c + row, c)
    elif dstate_out is not None and run == 0:
        before = tl.load(tile_at(state_lse, lse_strides, batch, head, query, 1, 1, 0)).reshape([1])
        share = tl.where(before < float("inf"), _share(before, tl.load(lse + one), tl.float64), float("nan"))
        some = before != float("-inf")
        inside = some[:, None] & (columns < E)[None, :]
        outs = tl.load(tile_at(state_out, out_strides, batch, head, query, 1, E_PAD, 0), mask=inside, other=0.0)
        row = slot_head.to(tl.int64) * L + query + one
        down = tl.where(some[:, None], share.to(DTYPE)[:, None] * a, 0.0)
        slope = tl.where(some, share * (c + tl.sum(a.to(tl.float64) * outs.to(tl.float64), 1)), 0.0)
        tl.store(rows_at(dstate_out, row, E, E_PAD), down, mask=(columns < E)[None, :])
        tl.store(dstate_lse + row, slope)


@triton.jit
def _terms(
    sent,
    sizes,
    batch,
    head,
    group,
    block,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK_L: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Load what `_send_back` stored for a block of queries and GROUP prefixes, and return it with each row's prefix.

    The prefixes start at `group`. Rows without a query or a prefix get weight 0.
    """
    slopes, high, low, delta = sent
    H, L, _, T = sizes
    query = row_of_query(block, BLOCK_L, GROUP)
    prefix = group + chunk_of_row(BLOCK_L, GROUP)
    inside = (query < L) & (prefix < T)
    row = ((tl.cast(batch, tl.int64) * H + head) * T + prefix) * L + query
    lows = tl.load(low + row, mask=inside, other=float("inf"))
    highs, deltas = tl.load(high + row, mask=inside, other=0.0), tl.load(delta + row, mask=inside, other=0.0)
    return load_tile(rows_at(slopes, row, E, E_PAD), inside, E), highs, lows, deltas, prefix


@triton.jit
def _own(weights, keep):
    """The weights of each row's own chunk alone: those of other chunks are meaningless, and may be infinite."""
    return tl.where(keep, weights, 0.0).to(weights.dtype)


@kernel("query", "key", "value", "mask")
def _prefix_keys(
    query,
    key,
    value,
    mask,
    slopes,
    high,
    low,
    delta,
    dkey,
    dvalue,
    strides: tl.int64,
    sizes: tl.int32,
    every: tl.int32,
    scale: tl.float64,
    D: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK and dV of one tile of keys.

    The tile stays in registers while the chunks that its keys belong to, and their queries, are read in turn.
    """
    DTYPE: tl.constexpr = high.dtype.element_ty
    D_PAD: tl.constexpr = max(triton.next_power_of_2(D), 16)
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    H, L, N, _ = sizes
    query_strides, key_strides, value_strides, mask_strides = strides
    tiles = tl.cdiv(N, BLOCK_N)
    start = tl.program_id(0) % tiles * BLOCK_N
    head = tl.program_id(0) // tiles % H
    batch = tl.program_id(0) // tiles // H
    last = start + tl.minimum(BLOCK_N, N - start)
    log2_scale = (tl.full([1], scale, tl.float64) * LOG2_E).to(DTYPE)
    kept = kept_keys(mask, mask_strides, batch, start, last, BLOCK_N, True)
    keys = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, D_PAD, ALIGN[1]), kept, D)
    values = load_tile(tile_at(value, value_strides, batch, head, start, BLOCK_N, E_PAD, ALIGN[2]), kept, E).to(OPERAND)
    chunk = (start + tl.arange(0, BLOCK_N)) // every
    dk = tl.zeros([BLOCK_N, D_PAD], DTYPE)
    dv = tl.zeros([BLOCK_N, E_PAD], DTYPE)
    for group in range(start // every, (last - 1) // every + 1, GROUP):
        for block in tl.range(0, tl.cdiv(L, BLOCK_L // GROUP), num_stages=1):
            queries = queries_of(query, query_strides, batch, head, block, L, D, D_PAD, BLOCK_L, GROUP)
            a, highs, lows, deltas, prefix = _terms(
                (slopes, high, low, delta), sizes, batch, head, group, block, E, E_PAD, BLOCK_L, GROUP
            )
            keep = kept[None, :] & (chunk[None, :] == prefix[:, None])
            terms = (queries, a, highs, lows, deltas)
            weights, score_slopes, _exact = weigh(
                keys, values, terms, None, log2_scale, False, dkey is not None, OPERAND, PRECISION
            )
            if dvalue is not None:
                dv += product_over_queries(_own(weights, keep), a, False, OPERAND, PRECISION)
            if dkey is not None:
                dk += product_over_queries(_own(score_slopes, keep), queries, False, OPERAND, PRECISION)
    if dvalue is not None:
        store_keys(dvalue, dv, kept, (0, H, L, N), batch, head, start, last, E)
    if dkey is not None:
        store_keys(dkey, dk * tl.full([1], scale, DTYPE), kept, (0, H, L, N), batch, head, start, last, D)


@kernel("query", "key", "value", "mask")
def _prefix_queries(
    query,
    key,
    value,
    mask,
    slopes,
    high,
    low,
    delta,
    dquery,
    strides: tl.int64,
    sizes: tl.int32,
    cut: tl.int32,
    every: tl.int32,
    scale: tl.float64,
    D: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The share of dQ of one run of keys, for one block of queries."""
    DTYPE: tl.constexpr = high.dtype.element_ty
    D_PAD: tl.constexpr = max(triton.next_power_of_2(D), 16)
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    QUERIES: tl.constexpr = BLOCK_L // GROUP
    H, L, N, _ = sizes
    query_strides, key_strides, value_strides, mask_strides = strides
    runs, length = cut
    blocks = tl.cdiv(L, QUERIES)
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % H
    slot = tl.program_id(0) // blocks // H
    batch, first = slot // runs, slot % runs * length
    last = first + tl.minimum(length, N - first)
    queries = queries_of(query, query_strides, batch, head, block, L, D, D_PAD, BLOCK_L, GROUP)
    log2_scale = (tl.full([1], scale, tl.float64) * LOG2_E).to(DTYPE)
    dq = tl.zeros([BLOCK_L, D_PAD], DTYPE)
    for start in tl.range(first, last, BLOCK_N, num_stages=1):
        end = start + tl.minimum(BLOCK_N, last - start)
        kept = kept_keys(mask, mask_strides, batch, start, end, BLOCK_N, True)
        keys = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, D_PAD, ALIGN[1]), kept, D)
        values = load_tile(tile_at(value, value_strides, batch, head, start, BLOCK_N, E_PAD, ALIGN[2]), kept, E).to(
            OPERAND
        )
        chunk = (start + tl.arange(0, BLOCK_N)) // every
        for group in range(start // every, (end - 1) // every + 1, GROUP):
            a, highs, lows, deltas, prefix = _terms(
                (slopes, high, low, delta), sizes, batch, head, group, block, E, E_PAD, BLOCK_L, GROUP
            )
            keep = kept[None, :] & (chunk[None, :] == prefix[:, None])
            terms = (queries, a, highs, lows, deltas)
            both = weigh(keys, values, terms, None, log2_scale, False, True, OPERAND, PRECISION)
            dq += product(_own(both[1], keep), keys, OPERAND, PRECISION)
    dq = tl.sum(dq.reshape([GROUP, QUERIES, D_PAD]), 0)
    rows = block * QUERIES + tl.arange(0, QUERIES)
    row = (slot.to(tl.int64) * H + head) * L + rows
    tl.store(rows_at(dquery, row, D, D_PAD), dq, mask=(rows < L)[:, None] & (tl.arange(0, D_PAD) < D)[None, :])


def prefix_backward(inputs: PrefixAttentionBackward) -> tuple[Tensor, ...]:
    """Return (dquery, dkey, dvalue, dstate_out, dstate_lse); each that `needs` does not ask for is an empty tensor."""
    fresh = torch.empty_like if inputs.lse.numel() else torch.zeros_like  # without queries or keys no kernel runs
    like = zip((inputs.query, inputs.key, inputs.value, inputs.state_out, inputs.state_lse), inputs.needs, strict=True)
    grads = [None if t is None or not need else fresh(t, memory_format=torch.contiguous_format) for t, need in like]
    if inputs.lse.numel():
        with on_device(inputs.query):
            _fill(inputs, grads)
    return tuple(inputs.query.new_empty(0) if grad is None else grad for grad in grads)


def _fill(inputs: PrefixAttentionBackward, grads: list[Tensor | None]) -> None:
    """Fill those of (dquery, dkey, dvalue, dstate_out, dstate_lse) that are not None."""
    dout, dlse, query, key, value, key_padding_mask, state_out, state_lse, out, lse, every, scale, _, _ = inputs
    (B, H, L, D), (N, E), T = query.shape, value.shape[-2:], lse.shape[2]
    mask, every = mask_bytes(key_padding_mask), chunk_of(every, N)
    dquery, dkey, dvalue, *dstate = grads
    products = backward_products(query.dtype, max(D, E), query.device)
    sent = _sent_back(
        dout, dlse, (state_out, state_lse), out.contiguous(), lse.contiguous(), dstate, scale, products.operand
    )
    if dquery is None and dkey is None and dvalue is None:
        return
    read = (query, key, value, mask, *sent)
    strides = (query.stride(), key.stride(), value.stride(), (0, 0) if mask is None else mask.stride())
    group = group_of(every)
    options = {
        "D": D,
        "E": E,
        "GROUP": group,
        "ALIGN": alignment(query, key, value),
        "OPERAND": triton_dtype(products.operand),
        "PRECISION": products.input_precision,
    }
    tiles = backward_tiles(products, query.device, max(D, E), min(group * L, WIDEST_BLOCK))
    if dkey is not None or dvalue is not None:
        wide = query.dtype == torch.float32 and products.kind == "tf32" and max(D, E) > 128
        crowded = wide and has_little_shared_memory(query.device)
        rows = 16 if crowded else 64  # more would not fit, or spill
        few = tiles._replace(BLOCK_L=min(tiles.BLOCK_L, rows), BLOCK_N=tile_of_keys(tiles.BLOCK_N, True))
        programs = B * H * triton.cdiv(N, few.BLOCK_N)
        _prefix_keys(programs, *read, dkey, dvalue, strides, (H, L, N, T), every, scale, **options, **few._asdict())
    if dquery is not None:
        tiles = tiles._replace(BLOCK_N=tile_of_keys(tiles.BLOCK_N, group > 1))
        runs, length = cut_runs(N, KEYS)
        shares = out.new_empty(B * runs, H, L, D)
        programs = B * runs * H * triton.cdiv(L, tiles.BLOCK_L // group)
        numbers = ((H, L, N, T), (runs, length), every, scale)
        _prefix_queries(programs, *read, shares, strides, *numbers, **options, **tiles._asdict())
        sum_runs(shares, None, dquery, (B, H, L, runs * GRAIN.value), (runs, MOST_SHARES), scale)


def _sent_back(
    dout: Tensor,
    dlse: Tensor,
    state: tuple[Tensor | None, Tensor | None],
    out: Tensor,
    lse: Tensor,
    dstate: list[Tensor | None],
    scale: float,
    operand: torch.dtype,
) -> tuple[Tensor, ...]:
    """The results of `_send_back`: `slopes` (B, H, T, L, E) of `operand`; `high`, `low` and `delta` (B, H, T, L)."""
    B, H, T, L, E = out.shape
    runs, length = cut_runs(T, PREFIXES)
    slopes = out.new_empty(out.shape, dtype=operand)
    terms = out.new_empty(3, B, H, T, L).unbind(0)
    carried = (out.new_empty(B, H, runs, L, E), lse.new_empty(B, H, runs, L)) if runs > 1 else (None, None)
    strides = (dout.stride(), dlse.stride(), *state_strides(*state))
    numbers = ((H, L, T), (runs, length), scale, 1 / scale if scale else 0.0)
    options = {"E": E, "MOST": MOST_RUNS, "enable_fp_fusion": False, **scan_constants(E)}
    nothing = 6 * (None,)
    if runs > 1:
        _send_back(B * H * runs * L, dout, dlse, out, lse, *state, *carried, *nothing, strides, *numbers, **options)
    _send_back(
        B * H * runs * L, dout, dlse, out, lse, *state, *carried, slopes, *terms, *dstate, strides, *numbers, **options
    )
    return slopes, *terms
