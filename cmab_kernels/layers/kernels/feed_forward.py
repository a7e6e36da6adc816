# mypy: disable-error-code="no-untyped-def"
"""Feed-forward layers: a program holds the results of a block of rows, and computes hidden features tile by tile.

The backward pass computes them again. With hidden = xn W1' + b1, act its activation, and y = x + act(hidden) W2' + b2:

    dact = dy W2     dhidden = act'(hidden) dact     dxn = dhidden W1     dW1 = dhidden' xn     dW2 = dy' act(hidden)

One kernel computes dx. It stores hidden features and their gradients for a second kernel, which computes the gradients
of the matrices with its own programs for every tile. To compute them once more there would take 3 of 11 products, and
registers for the tiles of three matrices.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.triton_launch import kernel, on_device
from ...runtime.triton_products import product
from ...runtime.triton_rows import load_tile, rows_at, rows_from
from .activation import activated, slopes
from .launch import aligned, back, forward
from .projections import is_normed, matrix_gradient, plain_rows, rows_of
from .rows import back_to_columns, project_rows, residual_rows, row_norms, store_row_gradients, vector
from .shares import gradients, shares_of


@kernel()
def _feed_forward(
    x,
    norm_weight,
    norm_bias,
    expand_weight,
    expand_bias,
    contract_weight,
    contract_bias,
    y,
    rows: tl.int32,
    eps: tl.float64,
    C: tl.constexpr,
    F: tl.constexpr,
    GATED: tl.constexpr,
    RELU: tl.constexpr,
    NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    C_PAD: tl.constexpr = max(triton.next_power_of_2(C), 16)
    GATES: tl.constexpr = F if GATED else 0
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    column = tl.arange(0, C_PAD)
    mean, factor = row_norms(x, row, inside, eps, C, PIECE, norm_weight is not None, DTYPE)
    given = (x, norm_weight, norm_bias, expand_weight, expand_bias, row, inside, mean, factor)
    result = tl.zeros([BLOCK_R, C_PAD], DTYPE)
    for start in range(0, F, TILE):
        gates = project_rows(*given, GATES, start, C, F, TILE, PIECE, OPERAND, PRECISION)
        features = project_rows(*given, 0, start, C, F, TILE, PIECE, OPERAND, PRECISION) if GATED else gates
        tile = load_tile(rows_from(contract_weight, 0, C_PAD, F, TILE, start), column < C, F, start)
        result += product(activated(features, gates, GATED, RELU), tl.trans(tile), OPERAND, PRECISION)
    result += vector(contract_bias, C, C_PAD, DTYPE)[None, :]
    result += residual_rows(x, norm_weight, norm_bias, row, inside, mean, factor, C, C_PAD, NORMED)
    tl.store(rows_at(y, row, C, C_PAD), result.to(y.dtype.element_ty), mask=inside[:, None] & (column < C)[None, :])


@kernel()
def _feed_forward_back(
    dy,
    x,
    norm_weight,
    norm_bias,
    expand_weight,
    expand_bias,
    contract_weight,
    dx,
    dnorm_weight,
    dnorm_bias,
    acts,
    dhidden,
    rows: tl.int32,
    eps: tl.float64,
    C: tl.constexpr,
    F: tl.constexpr,
    GATED: tl.constexpr,
    RELU: tl.constexpr,
    NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Compute dx of a block of rows, its share of the gradients of the norm, act(hidden) and dhidden.

    The last two are for the gradients of the matrices.
    """
    C_PAD: tl.constexpr = max(triton.next_power_of_2(C), 16)
    GATES: tl.constexpr = F if GATED else 0
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    mean, factor = row_norms(x, row, inside, eps, C, PIECE, norm_weight is not None, DTYPE)
    given = (x, norm_weight, norm_bias, expand_weight, expand_bias, row, inside, mean, factor)
    dnormed = tl.zeros([BLOCK_R, C_PAD], DTYPE)
    for start in range(0, F, TILE):
        keep = start + tl.arange(0, TILE) < F
        gates = project_rows(*given, GATES, start, C, F, TILE, PIECE, OPERAND, PRECISION)
        features = project_rows(*given, 0, start, C, F, TILE, PIECE, OPERAND, PRECISION) if GATED else gates
        dact = back_to_columns(dy, contract_weight, row, inside, start, C, F, TILE, PIECE, DTYPE, OPERAND, PRECISION)
        dfeatures, dgates = slopes(dact, features, gates, GATED, RELU)
        dnormed += product(dgates, load_tile(rows_from(expand_weight, GATES + start, TILE, C, C_PAD), keep, C), OPERAND, PRECISION)
        if GATED:
            dnormed += product(dfeatures, load_tile(rows_from(expand_weight, start, TILE, C, C_PAD), keep, C), OPERAND, PRECISION)
        there = inside[:, None] & keep[None, :]
        if acts is not None:
            act = activated(features, gates, GATED, RELU)
            tl.store(rows_at(acts, row, F, TILE, start), act.to(acts.dtype.element_ty), mask=there)
        if dhidden is not None:
            tl.store(rows_at(dhidden, row, F + GATES, TILE, GATES + start), dgates.to(dhidden.dtype.element_ty), mask=there)
            if GATED:
                tl.store(rows_at(dhidden, row, F + GATES, TILE, start), dfeatures.to(dhidden.dtype.element_ty), mask=there)
    store_row_gradients(
        dnormed,
        x,
        norm_weight,
        mean,
        factor,
        dy,
        dx,
        dnorm_weight,
        dnorm_bias,
        row,
        inside,
        rows,
        tl.program_id(0),
        C,
        NORMED,
        DTYPE,
    )


def _kind(activation: str, residual: str, norm_weight: Tensor | None) -> dict[str, bool]:
    return {"GATED": activation == "geglu", "RELU": activation == "relu", "NORMED": is_normed(residual, norm_weight)}


def feed_forward_layer(x: Tensor, *rest: Any) -> Tensor:
    """Return y for rows x (R, C)."""
    *parameters, eps, activation, residual = rest
    (R, C), F = x.shape, parameters[4].shape[1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    run, tiles = forward(_feed_forward, x, C, F, F=F, **_kind(activation, residual, parameters[0]))
    with on_device(x):
        run(-(-R // tiles.BLOCK_R), *aligned(x, *parameters), y, R, eps)
    return y


def feed_forward_layer_backward(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the contiguous gradients of x and of the parameters in order; empty tensors if not needed."""
    *parameters, eps, activation, residual, needs = rest
    needs = [need and t is not None for need, t in zip(needs, (x, *parameters), strict=True)]
    with on_device(x):
        dy, x, *parameters = aligned(dy, x, *parameters[:5])
        dx, *norms, acts, dhidden = _back(dy, x, parameters, eps, _kind(activation, residual, parameters[0]), needs)
        rows = rows_of(x, None, parameters[:2], eps)
        of_matrices = matrix_gradient(dhidden, rows, needs[3:5]), matrix_gradient(dy, plain_rows(acts), needs[5:])
        return gradients([dx], [*norms, *of_matrices[0], *of_matrices[1]], x)


def _back(
    dy: Tensor, x: Tensor, parameters: Sequence[Any], eps: float, kind: dict[str, bool], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return (dx, shares of dnorm_weight and dnorm_bias, acts, dhidden); None for each that is not needed."""
    _, _, expand_weight, _, contract_weight = parameters
    (R, C), F = x.shape, contract_weight.shape[1]
    run, tiles = back(_feed_forward_back, x, C, F, F=F, **kind)
    programs = -(-R // tiles.BLOCK_R)
    dx = torch.empty_like(x) if needs[0] else None
    norms = [shares_of(x, programs, C) if need else None for need in needs[1:3]]
    acts = x.new_empty(R, F) if needs[5] or needs[6] else None
    dhidden = x.new_empty(R, expand_weight.shape[0]) if needs[3] or needs[4] else None
    run(programs, dy, x, *parameters, dx, *norms, acts, dhidden, R, eps)
    return dx, *norms, acts, dhidden
