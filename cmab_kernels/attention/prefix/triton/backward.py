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
from ....runtime.triton_launch import alignment, kernel, mask_bytes, on_device, strides_of, triton_dtype
from ....runtime.triton_products import product
from ....runtime.triton_rows import GRAIN, biases_of, kept_keys, load_tile, rows_at, tile_at
from ...triton.backward import product_over_queries, store_biases, store_keys, weigh
from ...triton.forward import LOG2_E, state_strides
from ...triton.launch import WIDEST_BLOCK, backward_products, backward_tiles
from ...triton.row_terms import RESOLUTION, base_two, sum_runs
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
def _sent_by_later(run_a, run_c, lse, until, place, cut, L, E: tl.constexpr, E_PAD: tl.constexpr, MOST: tl.constexpr):
    """A and c that the later runs send back, relative to the first prefix of the next run.

    `place` is (head of a batch element, run, query).
    """
    slot_head, run, query = place
    runs, length = cut
    later = run + 1 + tl.arange(0, MOST)
    there = later < runs
    row = (slot_head.to(tl.int64) * runs + later) * L + query
    own = tl.load(lse + later.to(tl.int64) * length * L, mask=there, other=float("inf"))
    following = tl.load(lse + (run + 1).to(tl.int64) * length * L, mask=run + 1 < runs, other=float("-inf"))
    if until is not None:
        own -= tl.load(until + later.to(tl.int64) * length, mask=there, other=0.0)
        following -= tl.load(until + (run + 1).to(tl.int64) * length, mask=run + 1 < runs, other=0.0)
    share = tl.where(there, _share(following, own, tl.float64), 0.0)
    sent = tl.load(rows_at(run_a, row, E, E_PAD), mask=there[:, None] & (tl.arange(0, E_PAD) < E)[None, :], other=0.0)
    a = tl.sum(share.to(sent.dtype)[:, None] * sent, 0, keep_dims=True)
    return a, tl.sum(share * tl.load(run_c + row, mask=there, other=0.0), 0, keep_dims=True)


@triton.jit
def _of_decay(out, lse, until, row, prefix, here, a, c, relative, L, E: tl.constexpr, E_PAD: tl.constexpr):
    """The gradient of the decay before each prefix but the first, for one query: what was held before acts like a key
    whose bias it is. `relative` is the lse of the prefixes less `until`."""
    held = here & (prefix > 0)
    before = tl.load(lse + (prefix - 1).to(tl.int64) * L, mask=held, other=float("-inf"))
    held = held & (before != float("-inf"))
    inside = held[:, None] & (tl.arange(0, E_PAD) < E)[None, :]
    outs = tl.load(rows_at(out, row - L, E, E_PAD), mask=inside, other=0.0)
    before -= tl.load(until + (prefix - 1).to(tl.int64), mask=held, other=0.0)
    slope = c + tl.sum(a.to(tl.float64) * outs.to(tl.float64), 1)
    return tl.where(held, _share(before, relative, tl.float64) * slope, 0.0)


@kernel("dout", "dlse", "out", "lse", "state_out", "state_lse")
def _send_back(
    dout,
    dlse,
    out,
    lse,
    until,
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
    ddecay,
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
    taken in, if there are any. `until` has the sums of the decays of all chunks up to each one: the difference of lse
    and `until` falls from no prefix to the next.
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
    if until is not None:
        until += slot_head.to(tl.int64) * T
    a = tl.zeros([1, E_PAD], DTYPE)
    c = tl.zeros([1], tl.float64)
    if slopes is not None and run_a is not None:
        a, c = _sent_by_later(run_a, run_c, lse, until, (slot_head, run, query), cut, L, E, E_PAD, MOST)
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
        relative = logarithm
        if until is not None:
            relative -= tl.load(until + t, mask=here, other=0.0)
            following -= tl.load(until + end.to(tl.int64), mask=end < T, other=0.0)
        share = _share(relative[:, None], relative[None, :], DTYPE)
        carried = _share(relative, following, tl.float64)
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
            if ddecay is not None:
                of_decay = _of_decay(out, lse, until, row, prefix, here, slope, added, relative, L, E, E_PAD)
                tl.store(ddecay + row, of_decay, mask=here)
    one = tl.arange(0, 1)
    if slopes is None:
        row = (slot_head.to(tl.int64) * runs + run) * L + query + one
        tl.store(rows_at(run_a, row, E, E_PAD), a, mask=(columns < E)[None, :])
        tl.store(run_c + row, c)
    elif dstate_out is not None and run == 0:
        before = tl.load(tile_at(state_lse, lse_strides, batch, head, query, 1, 1, 0)).reshape([1])
        newest = tl.load(lse + one)
        if until is not None:
            newest -= tl.load(until + one.to(tl.int64))
        share = tl.where(before < float("inf"), _share(before, newest, tl.float64), float("nan"))
        some = before != float("-inf")
        inside = some[:, None] & (columns < E)[None, :]
        outs = tl.load(tile_at(state_out, out_strides, batch, head, query, 1, E_PAD, 0), mask=inside, other=0.0)
        row = slot_head.to(tl.int64) * L + query + one
        down = tl.where(some[:, None], share.to(DTYPE)[:, None] * a, 0.0)
        slope = tl.where(some, share * (c + tl.sum(a.to(tl.float64) * outs.to(tl.float64), 1)), 0.0)
        tl.store(rows_at(dstate_out, row, E, E_PAD), down, mask=(columns < E)[None, :])
        tl.store(dstate_lse + row, slope)


@triton.jit
def _terms(sent, sizes, place, group, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_L: tl.constexpr, GROUP: tl.constexpr):
    """Load what `_send_back` stored for a block of queries and GROUP prefixes, and return it with each row's prefix.

    The prefixes start at `group`, and `place` is (batch, head, block). Rows without a query or a prefix get weight 0.
    """
    slopes, high, low, delta = sent
    batch, head, block = place
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


@kernel("query", "key", "value", "mask", "bias")
def _prefix_keys(
    query,
    key,
    value,
    mask,
    bias,
    slopes,
    high,
    low,
    delta,
    dkey,
    dvalue,
    dbias,
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
    """dK, dV and the gradient of the bias of one tile of keys.

    The tile stays in registers while the chunks that its keys belong to, and their queries, are read in turn.
    """
    DTYPE: tl.constexpr = high.dtype.element_ty
    D_PAD: tl.constexpr = max(triton.next_power_of_2(D), 16)
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    H, L, N, _ = sizes
    query_strides, key_strides, value_strides, mask_strides, bias_strides = strides
    tiles = tl.cdiv(N, BLOCK_N)
    start = tl.program_id(0) % tiles * BLOCK_N
    head = tl.program_id(0) // tiles % H
    batch = tl.program_id(0) // tiles // H
    last = start + tl.minimum(BLOCK_N, N - start)
    log2_scale = (tl.full([1], scale if bias is None else 1.0, tl.float64) * LOG2_E).to(DTYPE)
    gain = tl.full([1], scale, DTYPE)
    biases = biases_of(bias, bias_strides, batch, head, start, last, BLOCK_N)
    kept = kept_keys(mask, mask_strides, batch, start, last, BLOCK_N, True, biases)
    keys = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, D_PAD, ALIGN[1]), kept, D)
    values = load_tile(tile_at(value, value_strides, batch, head, start, BLOCK_N, E_PAD, ALIGN[2]), kept, E).to(OPERAND)
    chunk = (start + tl.arange(0, BLOCK_N)) // every
    dk = tl.zeros([BLOCK_N, D_PAD], DTYPE)
    dv = tl.zeros([BLOCK_N, E_PAD], DTYPE)
    db = tl.zeros([BLOCK_N], DTYPE)
    SLOPES: tl.constexpr = dkey is not None or dbias is not None
    sent, units = (slopes, high, low, delta), (log2_scale, gain)
    for group in range(start // every, (last - 1) // every + 1, GROUP):
        for block in tl.range(0, tl.cdiv(L, BLOCK_L // GROUP), num_stages=1):
            place = (batch, head, block)
            queries = queries_of(query, query_strides, place, L, D, D_PAD, BLOCK_L, GROUP)
            a, highs, lows, deltas, prefix = _terms(sent, sizes, place, group, E, E_PAD, BLOCK_L, GROUP)
            keep = kept[None, :] & (chunk[None, :] == prefix[:, None])
            terms = (queries, a, highs, lows, deltas)
            weights, score_slopes, exact = weigh(
                keys, values, terms, None, biases, units, False, SLOPES, OPERAND, PRECISION
            )
            if dbias is not None:
                db += tl.sum(_own(exact, keep), 0)
            if dvalue is not None:
                dv += product_over_queries(_own(weights, keep), a, False, OPERAND, PRECISION)
            if dkey is not None:
                dk += product_over_queries(_own(score_slopes, keep), queries, False, OPERAND, PRECISION)
    if dvalue is not None:
        store_keys(dvalue, dv, kept, (0, H, L, N), batch, head, start, last, E)
    if dbias is not None:
        store_biases(dbias, db, kept, (0, H, L, N), batch, head, start, last)
    if dkey is not None:
        store_keys(dkey, dk * gain, kept, (0, H, L, N), batch, head, start, last, D)


@kernel("query", "key", "value", "mask", "bias")
def _prefix_queries(
    query,
    key,
    value,
    mask,
    bias,
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
    query_strides, key_strides, value_strides, mask_strides, bias_strides = strides
    runs, length = cut
    blocks = tl.cdiv(L, QUERIES)
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % H
    slot = tl.program_id(0) // blocks // H
    batch, first = slot // runs, slot % runs * length
    last = first + tl.minimum(length, N - first)
    place, sent = (batch, head, block), (slopes, high, low, delta)
    queries = queries_of(query, query_strides, place, L, D, D_PAD, BLOCK_L, GROUP)
    log2_scale = (tl.full([1], scale if bias is None else 1.0, tl.float64) * LOG2_E).to(DTYPE)
    gain = tl.full([1], scale, DTYPE)
    dq = tl.zeros([BLOCK_L, D_PAD], DTYPE)
    for start in tl.range(first, last, BLOCK_N, num_stages=1):
        end = start + tl.minimum(BLOCK_N, last - start)
        biases = biases_of(bias, bias_strides, batch, head, start, end, BLOCK_N)
        kept = kept_keys(mask, mask_strides, batch, start, end, BLOCK_N, True, biases)
        keys = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, D_PAD, ALIGN[1]), kept, D)
        values = load_tile(tile_at(value, value_strides, batch, head, start, BLOCK_N, E_PAD, ALIGN[2]), kept, E).to(
            OPERAND
        )
        chunk = (start + tl.arange(0, BLOCK_N)) // every
        for group in range(start // every, (end - 1) // every + 1, GROUP):
            a, highs, lows, deltas, prefix = _terms(sent, sizes, place, group, E, E_PAD, BLOCK_L, GROUP)
            keep = kept[None, :] & (chunk[None, :] == prefix[:, None])
            terms = (queries, a, highs, lows, deltas)
            both = weigh(keys, values, terms, None, biases, (log2_scale, gain), False, True, OPERAND, PRECISION)
            dq += product(_own(both[1], keep), keys, OPERAND, PRECISION)
    dq = tl.sum(dq.reshape([GROUP, QUERIES, D_PAD]), 0)
    rows = block * QUERIES + tl.arange(0, QUERIES)
    row = (slot.to(tl.int64) * H + head) * L + rows
    tl.store(rows_at(dquery, row, D, D_PAD), dq, mask=(rows < L)[:, None] & (tl.arange(0, D_PAD) < D)[None, :])


def prefix_backward(inputs: PrefixAttentionBackward) -> tuple[Tensor, ...]:
    """Return (dquery, dkey, dvalue, dstate_out, dstate_lse, dkey_bias, dlog_decay); each that `needs` does not ask for
    is an empty tensor."""
    fresh = torch.empty_like if inputs.lse.numel() else torch.zeros_like  # without queries or keys no kernel runs
    state = (inputs.state_out, inputs.state_lse)
    like = (inputs.query, inputs.key, inputs.value, *state, inputs.key_bias, inputs.log_decay)
    *grads, dlog_decay = (
        None if t is None or not need else fresh(t, memory_format=torch.contiguous_format)
        for t, need in zip(like, inputs.needs, strict=True)
    )
    if inputs.lse.numel():
        with on_device(inputs.query):
            dlog_decay = _fill(inputs, grads, None if dlog_decay is None else torch.empty_like(inputs.lse))
    grads.append(dlog_decay)
    return tuple(inputs.query.new_empty(0) if grad is None else grad for grad in grads)


def _fill(inputs: PrefixAttentionBackward, grads: list[Tensor | None], ddecay: Tensor | None) -> Tensor | None:
    """Fill those of (dquery, dkey, dvalue, dstate_out, dstate_lse, dkey_bias) that are not None; return dlog_decay,
    with memory for its rows in `ddecay`, or None."""
    dout, dlse, query, key, value, key_padding_mask, *state, out, lse, bias, log_decay, every, scale, _, _ = inputs
    (B, H, L, D), (N, E), T = query.shape, value.shape[-2:], lse.shape[2]
    mask, every = mask_bytes(key_padding_mask), chunk_of(every, N)
    dquery, dkey, dvalue, *dstate, dbias = grads
    if ddecay is not None and dstate[0] is None:
        dstate = [t if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in state]
    products = backward_products(query.dtype, max(D, E), query.device)
    sent = _sent_back(
        dout,
        dlse,
        out.contiguous(),
        lse.contiguous(),
        None if log_decay is None else log_decay.cumsum(-1),
        state,
        [*dstate, ddecay],
        scale if bias is None else 1.0,
        products.operand,
    )
    dlog_decay = None if ddecay is None else ddecay.sum(-1)
    if dlog_decay is not None and dstate[1] is not None:
        dlog_decay[..., 0] = dstate[1].sum(-1)  # the incoming state is what was held before the first chunk
    if dquery is None and dkey is None and dvalue is None and dbias is None:
        return dlog_decay
    read = (query, key, value, mask, bias, *sent)
    strides = (query.stride(), key.stride(), value.stride(), strides_of(mask, 2), strides_of(bias, 3))
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
    if dkey is not None or dvalue is not None or dbias is not None:
        wide = query.dtype == torch.float32 and products.kind == "tf32" and max(D, E) > 128
        crowded = wide and has_little_shared_memory(query.device)
        most = 16 if crowded else 64  # more would not fit, or spill
        few = tiles._replace(BLOCK_L=min(tiles.BLOCK_L, most), BLOCK_N=tile_of_keys(tiles.BLOCK_N, True))
        programs, numbers = B * H * triton.cdiv(N, few.BLOCK_N), (strides, (H, L, N, T), every, scale)
        _prefix_keys(programs, *read, dkey, dvalue, dbias, *numbers, **options, **few._asdict())
    if dquery is not None:
        tiles = tiles._replace(BLOCK_N=tile_of_keys(tiles.BLOCK_N, group > 1))
        runs, length = cut_runs(N, KEYS)
        shares = out.new_empty(B * runs, H, L, D)
        programs = B * runs * H * triton.cdiv(L, tiles.BLOCK_L // group)
        of_runs = ((H, L, N, T), (runs, length), every, scale)
        _prefix_queries(programs, *read, shares, strides, *of_runs, **options, **tiles._asdict())
        sum_runs(shares, None, dquery, (B, H, L, runs * GRAIN.value), (runs, MOST_SHARES), scale)
    return dlog_decay


def _sent_back(
    dout: Tensor,
    dlse: Tensor,
    out: Tensor,
    lse: Tensor,
    until: Tensor | None,
    state: list[Tensor | None],
    gradients: list[Tensor | None],
    scale: float,
    operand: torch.dtype,
) -> tuple[Tensor, ...]:
    """The results of `_send_back`: `slopes` (B, H, T, L, E) of `operand`; `high`, `low` and `delta` (B, H, T, L).

    Those of `gradients`, for the state and for each row of the decay, that are not None are filled.
    """
    B, H, T, L, E = out.shape
    runs, length = cut_runs(T, PREFIXES)
    slopes = out.new_empty(out.shape, dtype=operand)
    terms = out.new_empty(3, B, H, T, L).unbind(0)
    carried = (out.new_empty(B, H, runs, L, E), lse.new_empty(B, H, runs, L)) if runs > 1 else (None, None)
    strides = (dout.stride(), dlse.stride(), *state_strides(*state))
    numbers = ((H, L, T), (runs, length), scale, 1 / scale if scale else 0.0)
    options = {"E": E, "MOST": MOST_RUNS, "enable_fp_fusion": False, **scan_constants(E)}
    read, programs, nothing = (dout, dlse, out, lse, until, *state, *carried), B * H * runs * L, 7 * (None,)
    if runs > 1:
        _send_back(programs, *read, *nothing, strides, *numbers, **options)
    _send_back(programs, *read, slopes, *terms, *gradients, strides, *numbers, **options)
    return slopes, *terms
