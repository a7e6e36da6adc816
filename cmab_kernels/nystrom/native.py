"""The m x m part of Nyström attention on the CPU: calls into csrc, which gets addresses and fills what is allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import NATIVE_DTYPES
from ..extension import load

_C = load()

NO_STRIDES = ()


def unsupported(matrix: Tensor, *others: Tensor) -> str | None:
    """Why this implementation cannot run on the device and in the dtype of these tensors, or None: matrices, or what they come from."""
    if matrix.device.type != "cpu":
        return f"native code runs on the CPU, the inputs are on {matrix.device}"
    if matrix.dtype not in NATIVE_DTYPES:  # of which half types reach the kernels as float32
        return f"no native pseudo-inverse for {matrix.dtype}"
    return None


def _operand(tensor: Tensor | None) -> tuple[int, tuple[int, ...]]:
    return (0, NO_STRIDES) if tensor is None else (tensor.data_ptr(), tensor.stride())


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def iterative_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """The pseudo-inverse of each (m, m) of a batch by so many iterations, contiguous."""
    count, order, _ = matrix.shape
    inverse = _empty(matrix)
    sizes = (NATIVE_DTYPES[matrix.dtype], count, order, iterations, torch.get_num_threads())
    _C.iterative_pinv(sizes, matrix.data_ptr(), matrix.stride(), inverse.data_ptr())
    return inverse


def iterative_pinv_backward(dinverse: Tensor, matrix: Tensor, iterations: int) -> Tensor:
    """The gradient of the matrices, contiguous."""
    count, order, _ = matrix.shape
    dmatrix = _empty(matrix)
    sizes = (NATIVE_DTYPES[matrix.dtype], count, order, iterations, torch.get_num_threads())
    _C.iterative_pinv_backward(sizes, *_operand(dinverse), *_operand(matrix), dmatrix.data_ptr())
    return dmatrix


def _landmarks(query: Tensor, key: Tensor, values: Tensor, absent: Tensor | None, scale: float, iterations: int) -> tuple:
    sizes = (NATIVE_DTYPES[query.dtype], *query.shape, values.shape[-1], iterations, scale, torch.get_num_threads())
    return sizes, *_operand(query), *_operand(key), *_operand(values), *_operand(absent)


def landmark_values(
    landmark_query: Tensor, landmark_key: Tensor, values: Tensor, absent: Tensor | None, scale: float, iterations: int
) -> Tensor:
    """pinv(softmax(scale q k')) v over the landmarks that are present, (M, m, E) contiguous; 0 in the rows of the absent ones."""
    out = _empty(values)
    _C.landmark_values(*_landmarks(landmark_query, landmark_key, values, absent, scale, iterations), out.data_ptr())
    return out


def landmark_values_backward(
    dout: Tensor, landmark_query: Tensor, landmark_key: Tensor, values: Tensor, absent: Tensor | None, scale: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(dlandmark_query, dlandmark_key, dvalues), contiguous; 0 in the rows of absent landmarks."""
    sizes, *operands = _landmarks(landmark_query, landmark_key, values, absent, scale, iterations)
    dquery, dkey, dvalues = _empty(landmark_query), _empty(landmark_key), _empty(values)
    addresses = (t.data_ptr() for t in (dquery, dkey, dvalues))
    _C.landmark_values_backward(sizes, *_operand(dout), *operands, *addresses)
    return dquery, dkey, dvalues
