"""The m x m part of Nyström attention on the CPU: calls into csrc/pinv, which fills tensors allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.dtypes import FLOATING
from ..runtime.extension import load

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


def iterative_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """Return the pseudo-inverse of each matrix of a batch (M, m, m) after this number of iterations, contiguous."""
    inverse = _empty(matrix)
    _C.iterative_pinv(matrix=matrix, iterations=iterations, inverse=inverse)
    return inverse


def iterative_pinv_backward(dinverse: Tensor, matrix: Tensor, iterations: int) -> Tensor:
    """Return the gradient of the matrices (M, m, m), contiguous."""
    dmatrix = _empty(matrix)
    _C.iterative_pinv_backward(matrix=matrix, iterations=iterations, dinverse=dinverse, dmatrix=dmatrix)
    return dmatrix


def landmark_values(
    landmark_query: Tensor, landmark_key: Tensor, values: Tensor, absent: Tensor | None, scale: float, iterations: int
) -> Tensor:
    """Return pinv(softmax(scale q k')) v over the landmarks that are present, (M, m, E), contiguous; rows of absent landmarks are 0."""
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


def landmark_values_backward(
    dout: Tensor, landmark_query: Tensor, landmark_key: Tensor, values: Tensor, absent: Tensor | None, scale: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dlandmark_query, dlandmark_key, dvalues), contiguous; rows of absent landmarks are 0."""
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
