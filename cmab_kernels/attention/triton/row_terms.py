# mypy: disable-error-code="no-untyped-def"
"""The terms of each query that the gradients need, and the sum of dQ over the runs of keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.tiles import padded
from ...runtime.triton_launch import kernel, strides_of
from ...runtime.triton_rows import load_tile, rows_at, tile_at
from .forward import LOG2_E
from .runs import count_runs, first_slot, set_bounds, unless_bad

RESOLUTION = tl.constexpr(2.0**-52)
"""A difference from a float64 logarithm below this share of it counts as 0: it is the error of a fused multiply-add."""

BEYOND = tl.constexpr(2.0**52)
"""The size of a float64 logarithm from which its neighbours are 1 or more apart: it no longer determines a weight."""


@triton.jit
def base_two(logarithm, scale, reciprocal, DTYPE: tl.constexpr):
    """A logarithm as a score and a remainder in base 2.

    The remainder of an empty sum is inf, so that weights are 2**(score - inf) = 0.
    """
    empty = logarithm == float("-inf")
    logarithm = tl.where(empty, 0.0, logarithm)
    score = (logarithm * tl.full([1], reciprocal, tl.float64)).to(DTYPE)
    rest = logarithm - score.to(tl.float64) * tl.full([1], scale, tl.float64)
    rest = tl.where(tl.abs(rest) > tl.abs(logarithm) * RESOLUTION, rest, 0.0) * LOG2_E
    if DTYPE == tl.float64:  # noqa: SIM300  not a comparison
        # The highest score has weight 1 if `score` is not above it, because weights are at most 1. The logarithm was
        # rounded up to three times.
        far = (tl.abs(logarithm) >= BEYOND) & (tl.abs(logarithm) < float("inf"))
        score = tl.where(far, score - 3 * tl.abs(score) * RESOLUTION, score)
        rest = tl.where(far, 0.0, rest)
    return score, tl.where(empty, float("inf"), rest).to(DTYPE)


@kernel("dout", "dlse", "out", "lse", "high", "low", "delta")
def _row_terms(
    dout,
    dlse,
    out,
    lse,
    douts,
    high,
    low,
    delta,
    strides: tl.int64,
    sizes: tl.int32,
    rows: tl.int32,
    scale: tl.float64,
    reciprocal: tl.float64,
    E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the terms of each query for the gradients.

    They are `douts` = dout; lse as a score `high` and a base-2 remainder `low`; and `delta` = rowsum(dout * out) -
    dlse. None stands for zeros. The last three are stored for `rows` rows of a head; rows beyond the last query have
    weight 0.
    """
    DTYPE: tl.constexpr = high.dtype.element_ty
    E_PAD: tl.constexpr = triton.next_power_of_2(E)
    dout_strides, dlse_strides = strides
    B, H, L = sizes
    stored = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, E_PAD)
    batch, head, query = stored // rows // H, stored // rows % H, stored % rows
    inside = (query < L) & (batch < B)
    row = (batch * H + head) * L + query
    tile = inside[:, None] & (columns < E)[None, :]
    start = batch * dout_strides[0] + head * dout_strides[1] + query * dout_strides[2]
    slopes = tl.load(dout + (start[:, None] + columns.to(tl.int64)[None, :] * dout_strides[3]), mask=tile, other=0.0)
    outs = tl.load(rows_at(out, row, E, E_PAD), mask=tile, other=0.0)
    tl.store(rows_at(douts, row, E, E_PAD), slopes.to(douts.dtype.element_ty), mask=tile)

    term = tl.sum(slopes.to(tl.float64) * outs.to(tl.float64), 1)
    if dlse is not None:
        start = batch * dlse_strides[0] + head * dlse_strides[1] + query * dlse_strides[2]
        term -= tl.load(dlse + start, mask=inside, other=0.0)
    logarithm = tl.load(lse + row, mask=inside, other=float("-inf"))
    score, rest = base_two(logarithm, scale, reciprocal, DTYPE)
    tl.store(high + stored, score, mask=batch < B)
    tl.store(low + stored, rest, mask=batch < B)
    tl.store(delta + stored, tl.where(logarithm == float("-inf"), 0.0, term).to(DTYPE), mask=batch < B)


@triton.jit
def load_rows(
    given,
    strides,
    sizes,
    place,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Load a block of queries and their terms from `_row_terms`; rows beyond the last query get weight 0.

    `given` are the tensors of queries and terms, and `place` is (batch, head, block).
    """
    D_PAD: tl.constexpr = max(triton.next_power_of_2(D), 16)
    E_PAD: tl.constexpr = max(triton.next_power_of_2(E), 16)
    query, douts, high, low, delta = given
    batch, head, block = place
    _, H, L, _ = sizes
    rows = block * BLOCK_L + tl.arange(0, BLOCK_L)
    inside = rows < L
    pointers = tile_at(query, strides, batch, head, block * BLOCK_L, BLOCK_L, D_PAD, ALIGN[0])
    queries = load_tile(pointers, inside, D).to(OPERAND)
    row = (tl.cast(batch, tl.int64) * H + head) * L + rows
    slopes = load_tile(rows_at(douts, row, E, E_PAD), inside, E)
    lows = tl.load(low + row, mask=inside, other=float("inf"))
    highs, deltas = tl.load(high + row, mask=inside, other=0.0), tl.load(delta + row, mask=inside, other=0.0)
    return queries, slopes, highs, lows, deltas


@kernel()
def _sum_runs(
    run_dquery,
    offsets,
    dquery,
    sizes: tl.int32,
    cut: tl.int32,
    scale: tl.float64,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """dQ of ROWS rows of a head: the shares of all runs, added in the order of the runs."""
    DTYPE: tl.constexpr = run_dquery.dtype.element_ty
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    B, H, L, N = sizes
    runs, most_runs = cut
    blocks = tl.cdiv(L, ROWS)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(0) // blocks % H
    batch = tl.program_id(0) // blocks // H
    first, last = set_bounds(offsets, batch, N)
    count = count_runs(last - first, most_runs)
    stride = tl.cast(H, tl.int64) * L
    start = first_slot(offsets, batch, N, runs) * stride + tl.cast(head, tl.int64) * L + row
    columns = tl.arange(0, D_PAD)
    inside = (row < L)[:, None] & (columns < D)[None, :]
    total = tl.zeros([ROWS, D_PAD], DTYPE)
    for chunk in range(0, count, CHUNK):
        run = chunk + tl.arange(0, CHUNK)
        at = (run * stride)[:, None] + start[None, :]
        shares = run_dquery + (at[:, :, None] * D + columns[None, None, :])
        total += tl.sum(tl.load(shares, mask=(run < count)[:, None, None] & inside[None, :, :], other=0.0), 0)
    total = unless_bad(total * tl.full([1, 1], scale, DTYPE), offsets, B)
    stored = (tl.cast(batch, tl.int64) * H + head) * L + row
    tl.store(rows_at(dquery, stored, D, D_PAD), total.to(dquery.dtype.element_ty), mask=inside)


def row_terms(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    operand: torch.dtype,
    sums: torch.dtype,
    block: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (douts, high, low, delta) of `_row_terms`.

    The first is (B, H, L, E) of `operand`, the others are (B, H, rows) of `sums`. There are as many rows as queries,
    rounded up to a multiple of `block`.
    """
    B, H, L, E = out.shape
    douts = out.new_empty((B, H, L, E), dtype=operand)
    rows = -(-L // block) * block
    of_program = max(1024 // padded(E), 16)
    high, low, delta = out.new_empty((3, B, H, rows), dtype=sums)
    given, to = (dout, dlse, out, lse), (douts, high, low, delta)
    numbers = ((dout.stride(), strides_of(dlse, 3)), (B, H, L), rows, scale, 1 / scale if scale else 0.0)
    # Fused with the first addition across lanes, a product would give lanes different sums.
    options = {"E": E, "ROWS": of_program, "enable_fp_fusion": False}
    _row_terms(-(-B * H * rows // of_program), *given, *to, *numbers, **options)
    return douts, high, low, delta


def sum_runs(
    shares: Tensor,
    offsets: Tensor | None,
    dquery: Tensor,
    sizes: tuple[int, int, int, int],
    cut: tuple[int, int],
    scale: float,
) -> None:
    """Fill dQ (B, H, L, D) with the sums of the shares (slots, H, L, D) of all runs."""
    B, H, L, D = dquery.shape
    rows = max(256 // triton.next_power_of_2(max(D, 16)), 1)
    _sum_runs(B * H * triton.cdiv(L, rows), shares, offsets, dquery, sizes, cut, scale, D=D, ROWS=rows, CHUNK=32)
