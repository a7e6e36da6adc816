"""The m x m part of Nyström attention on the CPU: calls into csrc/nystrom, which fills tensors allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.dtypes import FLOATING
from ..runtime.extension import load
from .contract import LandmarkValues, LandmarkValuesBackward, Pinv, PinvBackward

_C = load()


def unsupported(matrix: Tensor, *others: Tensor) -> str | None:
    """Return why this implementation cannot run on the device or in the dtype of these tensors, as a phrase; None if it
    can."""
    if matrix.device.type != "cpu":
        return f"native code runs on the CPU, the inputs are on {matrix.device}"
    if matrix.dtype not in FLOATING:  # float16 and bfloat16 reach the kernels as float32
        return f"no native pseudo-inverse for {matrix.dtype}"
    return None


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def iterative_pinv(inputs: Pinv) -> Tensor:
    """Return the pseudo-inverse of each matrix, contiguous."""
    matrix, iterations, _ = inputs
    inverse = _empty(matrix)
    _C.iterative_pinv(matrix=matrix, iterations=iterations, inverse=inverse)
    return inverse


def iterative_pinv_backward(inputs: PinvBackward) -> Tensor:
    """Return the gradient of the matrices, contiguous."""
    dinverse, matrix, iterations, _ = inputs
    dmatrix = _empty(matrix)
    _C.iterative_pinv_backward(matrix=matrix, iterations=iterations, dinverse=dinverse, dmatrix=dmatrix)
    return dmatrix


def landmark_values(inputs: LandmarkValues) -> Tensor:
    """Return pinv(softmax(scale q k')) v over the landmarks that are present, contiguous; rows of absent landmarks are
    0."""
    landmark_query, landmark_key, values, absent, scale, iterations, _ = inputs
    out = _empty(values)
    _C.landmark_values(
        landmark_query=landmark_query,
        landmark_key=landmark_key,
        values=values,
        absent=absent,
        scale=scale,
        iterations=iterations,
        out=out,
    )
    return out


def landmark_values_backward(inputs: LandmarkValuesBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dlandmark_query, dlandmark_key, dvalues), contiguous; rows of absent landmarks are 0."""
    dout, landmark_query, landmark_key, values, absent, scale, iterations, _ = inputs
    dquery, dkey, dvalues = _empty(landmark_query), _empty(landmark_key), _empty(values)
    _C.landmark_values_backward(
        landmark_query=landmark_query,
        landmark_key=landmark_key,
        values=values,
        absent=absent,
        scale=scale,
        iterations=iterations,
        dout=dout,
        dquery=dquery,
        dkey=dkey,
        dvalues=dvalues,
    )
    return dquery, dkey, dvalues
