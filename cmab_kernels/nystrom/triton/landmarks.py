# mypy: disable-error-code="no-untyped-def"
"""W = pinv(softmax(scale q k')) v over the landmarks that are present, and its gradients."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.triton_launch import alignment, kernel, mask_bytes, on_device, strides_of
from ...runtime.triton_products import product
from ...runtime.triton_rows import load_tile, tile_at
from ..contract import LandmarkValues, LandmarkValuesBackward
from . import large
from .launch import in_one_program, options, scratch_squares, strides
from .pinv import store_rows
from .squares import A, Z, differentiate, get, iterate, iterate_in_scratch

LOG2_E = tl.constexpr(1.4426950408889634)
WIDEST_TILE = 32


@triton.jit
def _present(absent, strides, number, m, SIZE: tl.constexpr):
    """Whether each of SIZE rows is one of the m landmarks and not absent.

    If operands depend on a load of bytes, Triton 3.6 treats them as bytes on sm_100: float32 would be multiplied in
    tf32, and with 64 landmarks the kernel fails to compile. A sum over an axis of length 1 hides the load.
    """
    row = tl.arange(0, SIZE)
    present = row < m
    if absent is not None:
        at = absent + (number.to(tl.int64) * strides[0] + row.to(tl.int64) * strides[1])
        present = tl.sum(tl.load(at, mask=present, other=1)[:, None], 1) == 0
    return present


@triton.jit
def _rows(base, strides, number, present, column, WIDTH: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """Load TILE columns, from `column` on, of all rows of one matrix; rows that are not present are 0."""
    return load_tile(
        tile_at(base, strides, number, 0, 0, present.shape[0], TILE, ALIGN, column), present, WIDTH, column
    )


@triton.jit
def _softmax(
    query,
    key,
    strides,
    number,
    present,
    scale,
    D: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax of the logits by rows, 0 in rows and columns of absent landmarks.

    Infinite logits become the largest finite number.
    """
    logits = tl.zeros([present.shape[0], present.shape[0]], OPERAND)
    factor = tl.full([1, 1], scale, tl.float64).to(OPERAND)
    for column in range(0, D, TILE):
        q = _rows(query, strides[0], number, present, column, D, TILE, ALIGN[0])
        k = _rows(key, strides[1], number, present, column, D, TILE, ALIGN[1])
        logits += product(q * factor, tl.trans(k), OPERAND, PRECISION)
    largest = tl.full([1, 1], LARGEST, OPERAND)
    logits = tl.where(logits > largest, largest, tl.where(logits < -largest, -largest, logits))
    both = present[:, None] & present[None, :]
    peak = tl.max(tl.where(both, logits, -largest), 1)
    weights = tl.where(both, tl.exp2((logits - peak[:, None]) * LOG2_E), 0.0)
    return weights / tl.where(present, tl.sum(weights, 1), 1.0)[:, None]


@kernel("query", "key", "values", "absent")
def _landmark_values(
    query,
    key,
    values,
    absent,
    out,
    scale: tl.float64,
    strides: tl.int64,
    m: tl.int32,
    D: tl.constexpr,
    E: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_E: tl.constexpr,
    LARGEST: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    SIZE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    number = tl.program_id(0)
    present = _present(absent, strides[3], number, m, SIZE)
    a = _softmax(query, key, strides, number, present, scale, D, TILE_D, ALIGN, LARGEST, OPERAND, PRECISION)
    inverse = iterate(a, ITERATIONS, OPERAND, PRECISION)
    for column in range(0, E, TILE_E):
        v = _rows(values, strides[2], number, present, column, E, TILE_E, ALIGN[2])
        store_rows(out, number, product(inverse, v, OPERAND, PRECISION), column, m, E)


@kernel("dout", "query", "key", "values", "absent")
def _landmark_values_backward(
    dout,
    query,
    key,
    values,
    absent,
    dquery,
    dkey,
    dvalues,
    scratch,
    scale: tl.float64,
    strides: tl.int64,
    m: tl.int32,
    SCRATCH: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_E: tl.constexpr,
    LARGEST: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    SIZE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    number = tl.program_id(0)
    scratch += number.to(tl.int64) * SCRATCH
    present = _present(absent, strides[3], number, m, SIZE)
    a = _softmax(query, key, strides, number, present, scale, D, TILE_D, ALIGN, LARGEST, OPERAND, PRECISION)
    iterate_in_scratch(a, scratch, ITERATIONS, OPERAND, PRECISION)
    inverse = get(scratch, Z + ITERATIONS, SIZE)
    dinverse = tl.zeros_like(inverse)
    for column in range(0, E, TILE_E):
        v = _rows(values, strides[2], number, present, column, E, TILE_E, ALIGN[2])
        slope = _rows(dout, strides[4], number, present, column, E, TILE_E, ALIGN[3])
        store_rows(dvalues, number, product(tl.trans(inverse), slope, OPERAND, PRECISION), column, m, E)
        dinverse += product(slope, tl.trans(v), OPERAND, PRECISION)
    da = differentiate(dinverse, scratch, ITERATIONS, OPERAND, PRECISION)
    a = get(scratch, A, SIZE)
    dlogits = a * (da - tl.sum(a * da, 1)[:, None]) * tl.full([1, 1], scale, tl.float64).to(OPERAND)
    for column in range(0, D, TILE_D):
        k = _rows(key, strides[1], number, present, column, D, TILE_D, ALIGN[1])
        store_rows(dquery, number, product(dlogits, k, OPERAND, PRECISION), column, m, D)
        q = _rows(query, strides[0], number, present, column, D, TILE_D, ALIGN[0])
        store_rows(dkey, number, product(tl.trans(dlogits), q, OPERAND, PRECISION), column, m, D)


def _tile(width: int) -> int:
    return min(max(triton.next_power_of_2(width), 16), WIDEST_TILE)


def _common(query: Tensor, values: Tensor, iterations: int, kernel: str) -> dict[str, Any]:
    width, value_width = query.shape[-1], values.shape[-1]
    tiles = {"D": width, "E": value_width, "TILE_D": _tile(width), "TILE_E": _tile(value_width)}
    return {**tiles, "LARGEST": torch.finfo(query.dtype).max, "ITERATIONS": iterations, **options(query, kernel)}


def landmark_values(inputs: LandmarkValues) -> Tensor:
    """Return pinv(softmax(scale q k')) v over the landmarks that are present, contiguous; rows of absent landmarks are
    0."""
    landmark_query, landmark_key, values, absent, scale, iterations, _ = inputs
    if not in_one_program(landmark_query):
        return large.landmark_values(inputs)
    given = landmark_query, landmark_key, values
    out = values.new_empty(values.shape)
    with on_device(values):
        _landmark_values(
            values.shape[0],
            *given,
            mask_bytes(absent),
            out,
            scale,
            (*map(strides, given), strides_of(absent, 2)),
            values.shape[1],
            ALIGN=alignment(*given),
            **_common(landmark_query, values, iterations, "nystrom.forward"),
        )
    return out


def landmark_values_backward(inputs: LandmarkValuesBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dlandmark_query, dlandmark_key, dvalues), contiguous; rows of absent landmarks are 0."""
    dout, landmark_query, landmark_key, values, absent, scale, iterations, _ = inputs
    if not in_one_program(landmark_query):
        return large.landmark_values_backward(inputs)
    given = landmark_query, landmark_key, values
    dquery, dkey, dvalues = (t.new_empty(t.shape) for t in given)
    chosen = _common(landmark_query, values, iterations, "nystrom.backward")
    scratch = scratch_squares(values, iterations, chosen["SIZE"])
    with on_device(values):
        _landmark_values_backward(
            values.shape[0],
            dout,
            *given,
            mask_bytes(absent),
            dquery,
            dkey,
            dvalues,
            scratch,
            scale,
            (*map(strides, given), strides_of(absent, 2), strides(dout)),
            values.shape[1],
            SCRATCH=scratch.stride(0),
            ALIGN=alignment(*given, dout),
            **chosen,
        )
    return dquery, dkey, dvalues
