"""The operators of this folder for more than 64 landmarks: the formulas are those of `squares`, with one launch per
product."""

import math

import torch
from torch import Tensor

from ..contract import LandmarkValues, LandmarkValuesBackward, Pinv, PinvBackward
from .blocks import multiply


def _largest_sum(square: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The sums of |A| along a dimension, (M, m), and the largest of these sums, (M, 1), which is NaN if any sum is
    NaN."""
    sums = square.abs().sum(dim)
    return sums, sums.amax(-1, keepdim=True)


def _divisor(norm: Tensor) -> Tensor:
    """The norm, or 1 instead of 0, as a factor of matrices."""
    return norm.masked_fill(norm == 0.0, 1.0).unsqueeze(-1)


def _iterates(a: Tensor, iterations: int) -> list[Tensor]:
    """Return Z_0 to Z_iterations."""
    (_, column), (_, row) = _largest_sum(a, -2), _largest_sum(a, -1)
    z = [a.mT / _divisor(column) / _divisor(row)]
    for _ in range(iterations):
        _, _, r = _factors(a, z[-1])
        z.append(multiply(z[-1], r, 0.25))
    return z


def _factors(a: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = multiply(a, z)
    q = multiply(x, x, -1.0, diagonal=15.0, shift=7.0)
    return x, q, multiply(x, q, -1.0, diagonal=13.0)


def _differentiate(g: Tensor, a: Tensor, iterates: list[Tensor]) -> Tensor:
    """The gradient of A, given the gradient `g` of the last iterate; 0 for a matrix of zeros."""
    da = torch.zeros_like(a)
    for z in reversed(iterates[:-1]):
        x, q, r = _factors(a, z)
        dr = multiply(z.mT, g, 0.25)
        dq = multiply(x.mT, dr, -1.0)
        dx = multiply(dr, q.mT, -1.0, added=-7.0 * dq)
        dx = multiply(dq, x.mT, added=dx)
        dx = multiply(x.mT, dq, added=dx)
        da = multiply(dx, z.mT, added=da)
        g = multiply(a.mT, dx, added=multiply(g, r.mT, 0.25))
    return _through_norms(a, g.mT, da)


def _through_norms(a: Tensor, dz: Tensor, da: Tensor) -> Tensor:
    """Return `da` plus the gradient of A through Z_0 = A' / (c r); `dz` is the transpose of the gradient of Z_0."""
    (columns, column), (rows, row) = _largest_sum(a, -2), _largest_sum(a, -1)
    slope = dz / _divisor(column) / _divisor(row)
    change = (slope * a).sum((-2, -1)).unsqueeze(-1)
    shares = _share(change, columns, column).unsqueeze(-2) + _share(change, rows, row).unsqueeze(-1)
    return (da + slope - a.sign() * shares).masked_fill((column == 0.0).unsqueeze(-1), 0.0)


def _share(change: Tensor, sums: Tensor, largest: Tensor) -> Tensor:
    """The gradient of each sum through the largest sum. Sums that are equally large share it equally; for the other
    sums it is 0."""
    reached = sums == largest
    return (change / _divisor(largest).squeeze(-1) / reached.sum(-1, keepdim=True)).masked_fill(~reached, 0.0)


def _softmax(query: Tensor, key: Tensor, absent: Tensor | None, scale: float) -> Tensor:
    """Softmax of the logits by rows, 0 in rows and columns of absent landmarks.

    Infinite logits become the largest finite number.
    """
    most = torch.finfo(query.dtype).max
    logits = multiply(query * scale, key.mT).clamp(-most, most)
    if absent is None:
        return logits.softmax(-1)
    return logits.masked_fill(absent[:, None, :], -math.inf).softmax(-1).masked_fill(absent[:, :, None], 0.0)


def _present(absent: Tensor | None, *rows: Tensor) -> tuple[Tensor, ...]:
    """The rows, with zeros for rows of absent landmarks, which may hold any number."""
    return rows if absent is None else tuple(t.masked_fill(absent[:, :, None], 0.0) for t in rows)


def iterative_pinv(inputs: Pinv) -> Tensor:
    return _iterates(inputs.matrix, inputs.iterations)[-1].contiguous()


def iterative_pinv_backward(inputs: PinvBackward) -> Tensor:
    dinverse, matrix, iterations, _ = inputs
    return _differentiate(dinverse, matrix, _iterates(matrix, iterations)).contiguous()


def landmark_values(inputs: LandmarkValues) -> Tensor:
    query, key, values, absent, scale, iterations, _ = inputs
    query, key, values = _present(absent, query, key, values)
    return multiply(_iterates(_softmax(query, key, absent, scale), iterations)[-1], values)


def landmark_values_backward(inputs: LandmarkValuesBackward) -> tuple[Tensor, Tensor, Tensor]:
    dout, query, key, values, absent, scale, iterations, _ = inputs
    dout, query, key, values = _present(absent, dout, query, key, values)
    a = _softmax(query, key, absent, scale)
    iterates = _iterates(a, iterations)
    da = _differentiate(multiply(dout, values.mT), a, iterates)
    dlogits = a * (da - (a * da).sum(-1, keepdim=True)) * scale
    return multiply(dlogits, key), multiply(dlogits.mT, query), multiply(iterates[-1].mT, dout)
