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

from ...attention.projected.triton.launch import aligned, back, forward
from ...attention.projected.triton.projections import matrix_gradient, plain_rows
from ...attention.projected.triton.row_pieces import project_rows, row_norms, vector
from ...attention.projected.triton.shares import gradients, shares_of
from ...runtime.triton_launch import kernel, on_device
from ...runtime.triton_products import product
from ...runtime.triton_rows import load_tile, rows_at, rows_from
from ..contract import FeedForwardLayer, FeedForwardLayerBackward, needed, needs_part
from .activation import activated, slopes
from .projections import is_normed, normed_rows
from .residuals import back_to_columns, residual_rows, store_row_gradients


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
    given, at = (x, norm_weight, norm_bias), (row, inside, mean, factor)
    read = (given, at, expand_weight, expand_bias)
    result = tl.zeros([BLOCK_R, C_PAD], DTYPE)
    for start in range(0, F, TILE):
        gates = project_rows(*read, GATES, start, C, F, TILE, PIECE, OPERAND, PRECISION)
        features = project_rows(*read, 0, start, C, F, TILE, PIECE, OPERAND, PRECISION) if GATED else gates
        tile = load_tile(rows_from(contract_weight, 0, C_PAD, F, TILE, start), column < C, F, start)
        result += product(activated(features, gates, GATED, RELU), tl.trans(tile), OPERAND, PRECISION)
    result += vector(contract_bias, C, C_PAD, DTYPE)[None, :]
    result += residual_rows(given, at, C, C_PAD, NORMED)
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
    given, at = (x, norm_weight, norm_bias), (row, inside, mean, factor)
    read = (given, at, expand_weight, expand_bias)
    dnormed = tl.zeros([BLOCK_R, C_PAD], DTYPE)
    for start in range(0, F, TILE):
        keep = start + tl.arange(0, TILE) < F
        gates = project_rows(*read, GATES, start, C, F, TILE, PIECE, OPERAND, PRECISION)
        features = project_rows(*read, 0, start, C, F, TILE, PIECE, OPERAND, PRECISION) if GATED else gates
        dact = back_to_columns(dy, contract_weight, row, inside, start, C, F, TILE, PIECE, DTYPE, OPERAND, PRECISION)
        dfeatures, dgates = slopes(dact, features, gates, GATED, RELU)
        gate_weight = load_tile(rows_from(expand_weight, GATES + start, TILE, C, C_PAD), keep, C)
        dnormed += product(dgates, gate_weight, OPERAND, PRECISION)
        if GATED:
            feature_weight = load_tile(rows_from(expand_weight, start, TILE, C, C_PAD), keep, C)
            dnormed += product(dfeatures, feature_weight, OPERAND, PRECISION)
        there = inside[:, None] & keep[None, :]
        if acts is not None:
            act = activated(features, gates, GATED, RELU)
            tl.store(rows_at(acts, row, F, TILE, start), act.to(acts.dtype.element_ty), mask=there)
        if dhidden is not None:
            tl.store(
                rows_at(dhidden, row, F + GATES, TILE, GATES + start), dgates.to(dhidden.dtype.element_ty), mask=there
            )
            if GATED:
                tl.store(
                    rows_at(dhidden, row, F + GATES, TILE, start), dfeatures.to(dhidden.dtype.element_ty), mask=there
                )
    to = (dx, dnorm_weight, dnorm_bias)
    store_row_gradients(dnormed, given, at, dy, to, rows, tl.program_id(0), C, NORMED, DTYPE)


def _kind(inputs: FeedForwardLayer | FeedForwardLayerBackward) -> dict[str, bool]:
    gated, normed = inputs.activation == "geglu", is_normed(inputs.residual, inputs.norm_weight)
    return {"GATED": gated, "RELU": inputs.activation == "relu", "NORMED": normed}


def feed_forward_layer(inputs: FeedForwardLayer) -> Tensor:
    """Return y for rows x (R, C)."""
    *tensors, eps, _, _, _ = inputs
    x, (R, C), F = inputs.x, inputs.x.shape, inputs.contract_weight.shape[1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    run, tiles = forward(_feed_forward, x, C, F, F=F, **_kind(inputs))
    with on_device(x):
        run(-(-R // tiles.BLOCK_R), *aligned(*tensors), y, R, eps)
    return y


def feed_forward_layer_backward(inputs: FeedForwardLayerBackward) -> tuple[Tensor, ...]:
    """Return the contiguous gradients of x and of the parameters in order; empty tensors if not needed."""
    need, kind = needed(inputs), _kind(inputs)
    with on_device(inputs.x):
        *tensors, _, eps, _, _, _, _ = inputs  # the bias of `contract` has no effect on the gradients
        dy, x, *parameters = aligned(*tensors)
        dx, *norms, acts, dhidden = _back(dy, x, parameters, eps, kind, need)
        rows = normed_rows(x, None, parameters[:2], eps)
        of_matrices = (
            matrix_gradient(dhidden, rows, needs_part(need, "expand")),
            matrix_gradient(dy, plain_rows(acts), needs_part(need, "contract")),
        )
        return gradients([dx], [*norms, *of_matrices[0], *of_matrices[1]], x)


def _back(
    dy: Tensor, x: Tensor, parameters: Sequence[Any], eps: float, kind: dict[str, bool], need: set[str]
) -> tuple[Tensor | None, ...]:
    """Return (dx, shares of dnorm_weight and dnorm_bias, acts, dhidden); None for each that is not needed."""
    _, _, expand_weight, _, contract_weight = parameters
    (R, C), F = x.shape, contract_weight.shape[1]
    run, tiles = back(_feed_forward_back, x, C, F, F=F, **kind)
    programs = -(-R // tiles.BLOCK_R)
    dx = torch.empty_like(x) if "x" in need else None
    norms = [shares_of(x, programs, C) if needs else None for needs in needs_part(need, "norm")]
    acts = x.new_empty(R, F) if any(needs_part(need, "contract")) else None
    dhidden = x.new_empty(R, expand_weight.shape[0]) if any(needs_part(need, "expand")) else None
    run(programs, dy, x, *parameters, dx, *norms, acts, dhidden, R, eps)
    return dx, *norms, acts, dhidden
