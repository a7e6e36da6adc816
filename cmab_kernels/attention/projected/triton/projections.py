# mypy: disable-error-code="no-untyped-def"
"""Rows times matrices after a norm, and the gradients: here to keys and values, and in the layers of latents too.

A program holds a block of rows and reads matrices in tiles. The gradient of a matrix is a sum over rows; each program
stores a share of it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.triton_launch import kernel
from ....runtime.triton_products import product
from ....runtime.triton_rows import load_tile, rows_at, rows_from
from .launch import FILLING, aligned, of_matrix, of_rows, projecting, shares_of_rows
from .row_pieces import kept_rows, normed_piece, project_rows, row_norms, rows_of_heads, unweighted, vector
from .shares import shares_of


@triton.jit
def _store_projection(
    given,
    at,
    matrix,
    rows,
    part,
    parts,
    C: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store the normed rows times a matrix (M, C), TILE columns at a time: every `parts`-th tile from `part` on.

    `matrix` are (weight, bias, the result). Return the first tile of this program in the next matrix, as if its tiles
    came after these.
    """
    weight, bias, result = matrix
    row, _, _, _ = at
    for start in range(part * TILE, M, parts * TILE):
        made = project_rows(given, at, weight, bias, 0, start, C, M, TILE, PIECE, OPERAND, PRECISION)
        there = (row < rows)[:, None] & (start + tl.arange(0, TILE) < M)[None, :]
        tl.store(rows_at(result, row, M, TILE, start), made.to(result.dtype.element_ty), mask=there)
    return (part + parts - tl.cdiv(M, TILE) % parts) % parts


@kernel()
def _project(
    x,
    mask,
    norm_weight,
    norm_bias,
    first_weight,
    first_bias,
    first,
    second_weight,
    second_bias,
    second,
    third_weight,
    third_bias,
    third,
    rows: tl.int32,
    parts: tl.int32,
    eps: tl.float64,
    C: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    FIRST_OPERAND: tl.constexpr,
    FIRST_PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The projections of a block of rows, after their norm, by up to three matrices; ignored rows count as 0.

    The tiles of all matrices are divided among `parts` programs.
    """
    row = tl.program_id(0) // parts * BLOCK_R + tl.arange(0, BLOCK_R)
    part = tl.program_id(0) % parts
    inside = kept_rows(mask, row, rows)
    mean, factor = row_norms(x, row, inside, eps, C, PIECE, NORMED, DTYPE)
    given = (x, norm_weight, norm_bias)
    at = (row, inside, mean, factor)
    matrix = (first_weight, first_bias, first)
    part = _store_projection(
        given, at, matrix, rows, part, parts, C, FIRST, TILE, PIECE, FIRST_OPERAND, FIRST_PRECISION
    )
    if second is not None:
        matrix = (second_weight, second_bias, second)
        part = _store_projection(given, at, matrix, rows, part, parts, C, SECOND, TILE, PIECE, OPERAND, PRECISION)
    if third is not None:
        matrix = (third_weight, third_bias, third)
        _store_projection(given, at, matrix, rows, part, parts, C, THIRD, TILE, PIECE, OPERAND, PRECISION)


@triton.jit
def _add_back(
    sums,
    given,
    row,
    inside,
    length,
    piece,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    NORMED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a projection added to the `sums` of `_project_rows_back`, whose arguments `given` are."""
    slopes, weight, weight_sums, made, bias = given
    dnormed, total, along = sums
    M: tl.constexpr = HEADS * WIDTH
    for start in range(0, M, TILE):
        dmade = load_tile(rows_of_heads(slopes, row, length, HEADS, WIDTH, TILE, start), inside, M, start)
        pointers = rows_from(weight, start, TILE, C, dnormed.shape[1], piece)
        tile = load_tile(pointers, start + tl.arange(0, TILE) < M, C, piece)
        dnormed += product(dmade, tile, OPERAND, PRECISION)
        if NORMED:
            dmade = dmade.to(dnormed.dtype)
            total += tl.sum(dmade * vector(weight_sums, M, TILE, dnormed.dtype, start)[None, :], 1)
            unbiased = load_tile(rows_at(made, row, M, TILE, start), inside, M, start).to(dnormed.dtype)
            along += tl.sum(dmade * (unbiased - vector(bias, M, TILE, dnormed.dtype, start)[None, :]), 1)
    return dnormed, total, along


@kernel("dx")
def _project_rows_back(
    x,
    mask,
    first_slopes,
    first_weight,
    first_sums,
    first,
    first_bias,
    second_slopes,
    second_weight,
    second_sums,
    second,
    second_bias,
    dx,
    rows: tl.int32,
    length: tl.int32,
    eps: tl.float64,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """PIECE columns of dx of a block of rows of any width, from the gradients of two projections as heads.

    With dy, the gradients [dK, dV] of a row, dx^ = dy W and dx = (dx^ - mean(dx^) - x^ mean(dx^ x^)) factor. The means
    are those of dy (W 1) and of dy (x^ W')', so that a column of dx^ does not need the others. W 1 are the sums of
    `weight`, and x^ W' is the projection without its bias.
    """
    PIECES: tl.constexpr = triton.cdiv(C, PIECE)
    piece = tl.program_id(0) % PIECES * PIECE
    row = tl.program_id(0) // PIECES * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = kept_rows(mask, row, rows)
    sums = (tl.zeros([BLOCK_R, PIECE], DTYPE), tl.zeros([BLOCK_R], DTYPE), tl.zeros([BLOCK_R], DTYPE))
    given = (first_slopes, first_weight, first_sums, first, first_bias)
    sums = _add_back(sums, given, row, inside, length, piece, C, HEADS, FIRST, TILE, NORMED, OPERAND, PRECISION)
    given = (second_slopes, second_weight, second_sums, second, second_bias)
    sums = _add_back(sums, given, row, inside, length, piece, C, HEADS, SECOND, TILE, NORMED, OPERAND, PRECISION)
    dnormed, total, along = sums
    if NORMED:
        mean, factor = row_norms(x, row, inside, eps, C, PIECE, NORMED, DTYPE)
        normed = unweighted(x, (row, inside, mean, factor), piece, C, PIECE)
        dnormed = (dnormed - (total / C)[:, None] - normed * (along / C)[:, None]) * factor[:, None]
    dnormed = tl.where(inside[:, None], dnormed, 0.0)
    there = (row < rows)[:, None] & (piece + tl.arange(0, PIECE) < C)[None, :]
    tl.store(rows_at(dx, row, C, PIECE, piece), dnormed.to(dx.dtype.element_ty), mask=there)


@kernel()
def _matrix_gradient(
    left,
    right,
    mask,
    norm_weight,
    norm_bias,
    dweight,
    dbias,
    rows: tl.int32,
    lengths: tl.int32,
    shares: tl.int32,
    more: tl.int32,
    eps: tl.float64,
    M: tl.constexpr,
    LEFT: tl.constexpr,
    C: tl.constexpr,
    RIGHT: tl.constexpr,
    NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """A share of dW = left' right, and of the sum of `left`: TILE rows and PIECE columns, over every `shares`-th block.

    `left` are rows (R, M) of LEFT heads. `right` are rows (R, C) of RIGHT heads; with one head, they are rows after
    their norm. With `more`, the share is added to what is stored.
    """
    PIECES: tl.constexpr = triton.cdiv(C, PIECE)
    TILES: tl.constexpr = triton.cdiv(M, TILE)
    left_length, right_length = lengths
    piece = tl.program_id(0) % PIECES * PIECE
    start = tl.program_id(0) // PIECES % TILES * TILE
    share = tl.program_id(0) // PIECES // TILES
    total = tl.zeros([TILE, PIECE], DTYPE)
    sums = tl.zeros([TILE], DTYPE)
    for block in tl.range(share, tl.cdiv(rows, BLOCK_R), shares, num_stages=1):
        row = block * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = kept_rows(mask, row, rows)
        slopes = load_tile(rows_of_heads(left, row, left_length, LEFT, M // LEFT, TILE, start), inside, M, start)
        if RIGHT == 1:
            mean, factor = row_norms(right, row, inside, eps, C, PIECE, NORMED, DTYPE)
            at = (row, inside, mean, factor)
            read = normed_piece((right, norm_weight, norm_bias), at, piece, C, PIECE)
        else:
            read = load_tile(rows_of_heads(right, row, right_length, RIGHT, C // RIGHT, PIECE, piece), inside, C, piece)
        total += product(tl.trans(slopes), read, OPERAND, PRECISION)
        sums += tl.sum(slopes.to(DTYPE), 0)
    made = start + tl.arange(0, TILE)
    if dweight is not None:
        there = (made < M)[:, None] & (piece + tl.arange(0, PIECE) < C)[None, :]
        pointers = rows_at(dweight, share.to(tl.int64) * M + made, C, PIECE, piece)
        tl.store(pointers, total + tl.load(pointers, mask=there & (more != 0), other=0.0), mask=there)
    if dbias is not None:
        pointers = dbias + (share.to(tl.int64) * M + made)
        there = (made < M) & (piece == 0)
        sums += tl.load(pointers, mask=there & (more != 0), other=0.0)
        tl.debug_barrier()  # several threads read an element, and one of them writes it
        tl.store(pointers, sums, mask=there)


class Rows(NamedTuple):
    """Rows (B, N, C) that are normed and projected; rows that the mask (B N,) ignores count as 0. `eps` None: no
    norm."""

    x: Tensor
    mask: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float | None

    @property
    def number(self) -> int:
        return self.x.shape[0] * self.x.shape[1]


def rows_of(x: Tensor, mask: Tensor | None, norm: Sequence[Tensor | None], eps: float | None) -> Rows:
    """The rows in the form that kernels take: contiguous, with the bytes of the mask, and with the (weight, bias) of
    the norm."""
    given, ignored, weight, bias = aligned(x, None if mask is None else mask.contiguous().view(torch.uint8), *norm)
    return Rows(given, ignored, weight, bias, eps)


def plain_rows(x: Any) -> Rows:
    """Rows (B, N, C), or heads, without a norm and without ignored rows."""
    return Rows(x, None, None, None, None)


Projection = tuple[Tensor, Tensor | None]
"""Weight (M, C) and bias (M,) or None."""


def project(
    rows: Rows, projections: Sequence[Projection], dtypes: tuple[torch.dtype, torch.dtype] | None = None
) -> list[Tensor]:
    """The projections (B, N, M) of the normed rows, at most three.

    `dtypes` are those of the first and of the others: they are multiplied as their results are stored. None stands for
    the dtype of the rows.
    """
    x, mask, norm_weight, norm_bias, eps = rows
    of_first, of_others = dtypes or (x.dtype, x.dtype)
    sizes = [weight.shape[0] for weight, _ in projections]
    made = [x.new_empty(*x.shape[:2], size, dtype=of_others if i else of_first) for i, size in enumerate(sizes)]
    absent = [None] * (3 - len(made))
    given = [
        t for (weight, bias), result in zip(projections, made, strict=True) for t in (*aligned(weight, bias), result)
    ]
    FIRST, SECOND, THIRD = *sizes, *[0] * len(absent)
    run, tiles = projecting(
        _project,
        of_first,
        of_others,
        x.shape[2],
        max(sizes),
        FIRST=FIRST,
        SECOND=SECOND,
        THIRD=THIRD,
        NORMED=eps is not None,
    )
    blocks = -(-rows.number // tiles.BLOCK_R)
    parts = min(sum(-(-size // tiles.TILE) for size in sizes), max(FILLING // max(blocks, 1), 1))
    run(blocks * parts, x, mask, norm_weight, norm_bias, *given, *absent * 3, rows.number, parts, eps or 0.0)
    return made


Shares = tuple[Tensor | None, Tensor | None]
"""Shares of the gradients of a weight and of a bias, or None."""


def matrix_gradient(left: Any, right: Rows, needs: Sequence[bool], before: Shares = (None, None)) -> Shares:
    """Shares of the gradients of weight (M, C) and bias (M,) of a projection, from the gradients of its results.

    `left` and the x of `right` are rows (B, N, M) and (B, N, C), or heads (B, H, N, D) with M = H D. `before` are the
    shares of other rows, to which these are added.
    """
    if not any(needs):
        return None, None
    (LEFT, M), (RIGHT, C) = _heads(left), _heads(right.x)
    run, tiles = of_matrix(_matrix_gradient, left, M, C, LEFT=LEFT, RIGHT=RIGHT, NORMED=right.eps is not None)
    count, parts = left.numel() // M, -(-M // tiles.TILE) * -(-C // tiles.PIECE)
    more = next((t for t in before if t is not None), None)
    shares = shares_of_rows(-(-count // tiles.BLOCK_R), parts) if more is None else more.shape[0]
    dweight, dbias = before
    if more is None:
        dweight, dbias = (
            shares_of(left, shares, M, C) if needs[0] else None,
            shares_of(left, shares, M) if needs[1] else None,
        )
    lengths = max(left.shape[-2], 1), max(right.x.shape[-2], 1)
    given = left, right.x, right.mask, right.norm_weight, right.norm_bias
    run(shares * parts, *given, dweight, dbias, count, lengths, shares, int(more is not None), right.eps or 0.0)
    return dweight, dbias


def _heads(rows: Tensor) -> tuple[int, int]:
    """The number of heads, and the columns of all heads, of rows (B, N, M) or heads (B, H, N, D)."""
    heads = rows.shape[1] if rows.dim() == 4 else 1
    return heads, heads * rows.shape[-1]


def project_rows_back(
    rows: Rows, back_through: Sequence[tuple[Tensor, Any, Tensor | None, Tensor, Any]], dx: Tensor
) -> None:
    """Fill dx (B, N, C) from two projections, each given by its gradients as heads (B, H, N, D), its weight, the sums
    of the rows of its weight, the projections (B, N, H D) themselves, and its bias."""
    C, slopes = rows.x.shape[2], [each[0] for each in back_through]
    (_, HEADS, N, FIRST), SECOND = slopes[0].shape, slopes[1].shape[3]
    options = {"HEADS": HEADS, "FIRST": FIRST, "SECOND": SECOND, "NORMED": rows.eps is not None}
    run, tiles = of_rows(_project_rows_back, slopes[0], C, HEADS * max(FIRST, SECOND), **options)
    programs = -(-rows.number // tiles.BLOCK_R) * -(-C // tiles.PIECE)
    given = [t for each in back_through for t in each]
    run(programs, rows.x, rows.mask, *given, dx, rows.number, max(N, 1), rows.eps or 0.0)
