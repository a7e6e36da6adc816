"""Peers of Intention: the fastest torch forms, with hand-written gradients if they are faster than autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import identity, wide

ALPHA = 1.0
CHUNK = 4096
"""The number of keys that torch gets at a time: the fastest from 512 to all keys, and among eight ways to write the
products."""


def regularised(gram: Tensor) -> Tensor:
    return gram + ALPHA * identity(gram)


def cholesky_solve(gram: Tensor, rhs: Tensor) -> Tensor:
    """Cholesky and two triangular solves in the fastest form of torch: from the upper triangle, without a check."""
    return torch.cholesky_solve(rhs, torch.linalg.cholesky_ex(gram, upper=True)[0], upper=True)


@torch.no_grad()
def cholesky_gradients(gram: Tensor, rhs: Tensor, dweight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The solution and its gradients with the same factor: dB = Z = A^-1 dX and dA = -(Z X' + X Z') / 2."""
    factor = torch.linalg.cholesky_ex(gram, upper=True)[0]
    weight, drhs = (torch.cholesky_solve(part, factor, upper=True) for part in (rhs, dweight))
    half = drhs @ weight.mT
    return weight, (half + half.mT).mul_(-0.5), drhs


def inverse_of(gram: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(gram)[0])


# ---- sums over keys --------------------------------------------------------------------------------------------------


def summed(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """first' second of rows (N, *) in `dtype`; each chunk is in the cache once."""
    total = first.new_zeros(first.shape[1], second.shape[1], dtype=dtype)
    for rows, others in zip(first.split(CHUNK), second.split(CHUNK), strict=True):
        torch.addmm(total, rows.to(dtype).T, others.to(dtype), out=total)
    return total


def summed_heads(key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K'K and K'V of (B, H, N, *)."""
    heads = zip(key.flatten(0, 1), value.flatten(0, 1), strict=True)
    grams, moments = zip(*((summed(k, k, dtype), summed(k, v, dtype)) for k, v in heads), strict=True)
    return tuple(torch.stack(parts).unflatten(0, key.shape[:2]) for parts in (grams, moments))


def sums_gradients(
    key: Tensor, value: Tensor, dgram: Tensor, dmoment: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values: K (dG + dG') + V dM' and K dM, in `dtype`."""
    slope, dmoment = (part.flatten(0, 1).to(dtype) for part in (dgram + dgram.mT, dmoment))
    dkey, dvalue = torch.empty_like(key), torch.empty_like(value)
    for head, rows in enumerate(zip(*(part.flatten(0, 1) for part in (key, value, dkey, dvalue)), strict=True)):
        for k, v, dk, dv in zip(*(part.split(CHUNK) for part in rows), strict=True):
            k, v = k.to(dtype), v.to(dtype)
            dk.copy_(torch.addmm(k @ slope[head], v, dmoment[head].T))
            dv.copy_(k @ dmoment[head])
    return dkey, dvalue


# ---- a layer ---------------------------------------------------------------------------------------------------------


def regression(query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Intention of (B, H, N, *), and its hand-written gradients for a dout that is not empty, in 0.45 of the time of
    autograd."""
    with torch.no_grad():
        return (together if key.shape[2] <= CHUNK or key.is_cuda else chunked)(query, key, value, dout)


def together(query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """All heads at once."""
    given, dtype = query.dtype, wide(query.dtype)
    query, key, value, dout = (part.to(dtype) for part in (query, key, value, dout))
    factor = _factor(key.mT @ key)
    weight = torch.cholesky_solve(key.mT @ value, factor)
    if not dout.numel():
        return ((query @ weight).to(given),)
    dmoment = torch.cholesky_solve(query.mT @ dout, factor)
    results = (query @ weight, dout @ weight.mT, key @ _slope(dmoment, weight) + value @ dmoment.mT, key @ dmoment)
    return tuple(part.to(given) for part in results)


def chunked(query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Head by head, a chunk of rows at a time; not for half precision, where the sums would be wrong."""
    like = (value, query, key, value) if dout.numel() else (value,)
    results = tuple(torch.empty_like(rows) for rows in like)
    for rows in zip(*(part.flatten(0, 1) for part in (query, key, value, dout, *results) if part.numel()), strict=True):
        (_gradients_of_head if dout.numel() else _result_of_head)(*rows)
    return results


def _result_of_head(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    weight = torch.cholesky_solve(summed(key, value, key.dtype), _factor(summed(key, key, key.dtype)))
    torch.mm(query, weight, out=out)


def _gradients_of_head(
    query: Tensor, key: Tensor, value: Tensor, dout: Tensor, out: Tensor, dquery: Tensor, dkey: Tensor, dvalue: Tensor
) -> None:
    factor = _factor(summed(key, key, key.dtype))
    weight, dmoment = (torch.cholesky_solve(summed(*pair, key.dtype), factor) for pair in ((key, value), (query, dout)))
    slope = _slope(dmoment, weight)
    for start in range(0, len(key), CHUNK):
        part = slice(start, start + CHUNK)
        torch.mm(query[part], weight, out=out[part])
        torch.mm(dout[part], weight.T, out=dquery[part])
        torch.mm(key[part], slope, out=dkey[part])
        torch.addmm(dkey[part], value[part], dmoment.T, out=dkey[part])
        torch.mm(key[part], dmoment, out=dvalue[part])


def _factor(gram: Tensor) -> Tensor:
    return torch.linalg.cholesky_ex(regularised(gram))[0]


def _slope(dmoment: Tensor, weight: Tensor) -> Tensor:
    half = dmoment @ weight.mT
    return -(half + half.mT)


def sigma(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Queries multiplied by the inverse, then torch's fused attention."""
    wider = key.to(wide(key.dtype))
    solved = cholesky_solve(regularised(wider.mT @ wider), query.mT.to(wider.dtype)).mT.to(query.dtype)
    return F.scaled_dot_product_attention(solved, key, value, scale=scale)
