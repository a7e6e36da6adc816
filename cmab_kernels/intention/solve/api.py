"""Batched regularised solves: the public functions."""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.backends import choose
from ...runtime.checks import check_broadcast, check_floats, check_number, check_operands, is_read, mismatch
from ...runtime.dtypes import state_dtype
from .contract import RegularisedSolve
from .schema import regularised_solve_op

_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float64, torch.float32)}
"""The largest penalty in each dtype of sums."""


class RidgeSolution(NamedTuple):
    """The solution of a regularised system, and an indicator of its accuracy."""

    weight: Tensor
    """(B, H, D, E), in the dtype of the system: float64 from a `RidgeState`."""
    info: Tensor
    """(B, H) int32: 0 sound; 1 not positive definite, or alpha is negative: the weight is NaN; 2 so ill-conditioned
    that at most two digits are correct."""


def regularised_solve(gram: Tensor, rhs: Tensor, alpha: float | Tensor, *, impl: str = "auto") -> RidgeSolution:
    """(A + alpha I)^-1 B for many symmetric positive (semi-)definite matrices at once, by Cholesky.

    Args:
        gram: (..., D, D), symmetric: only the lower triangle is read. float64, float32, bfloat16 or float16 (solved in
            float32).
        rhs: (..., D, E), the same leading dimensions and dtype.
        alpha: >= 0, a number or a tensor that broadcasts to the leading dimensions. A negative number, or a negative
            element of a tensor on a CPU, is a `ValueError`. Elements of a tensor on a GPU are not read, so that the
            host need not wait: there `info` is 1 for a negative element.
        impl: "auto", "reference", "native", "cuda" (D up to 128) or "triton" (D up to 256).

    Returns:
        weight (..., D, E) in the dtype of gram, and info (...). info is 0 for a sound solution. It is
        1 if A + alpha I is not positive definite, or if alpha is negative. The weight of this system
        is then NaN, and the other systems are not affected. It is 2 if the condition number times eps
        is above 1e-2, so that at most two digits are correct. Differentiable to any order in gram
        (symmetrised), rhs and alpha.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.
        RuntimeError: `impl` cannot run here.

    >>> a = torch.randn(3, 4, 4, dtype=torch.float64)
    >>> targets = torch.eye(4, dtype=torch.float64).expand(3, -1, -1)
    >>> weight, info = cmab_kernels.regularised_solve(a @ a.mT, targets, 0.5)
    >>> torch.allclose((a @ a.mT + 0.5 * torch.eye(4)) @ weight, torch.eye(4, dtype=torch.float64)), info.tolist()
    (True, [0, 0, 0])
    """
    check_operands(gram=gram, rhs=rhs)
    _check_square(gram)
    if rhs.dim() != gram.dim() or rhs.shape[:-1] != gram.shape[:-1]:
        allowed = f"({', '.join(map(str, gram.shape[:-1]))}, E), as gram has shape {tuple(gram.shape)}"
        raise ValueError(mismatch("rhs", f"shape {tuple(rhs.shape)}", allowed))
    dtype = state_dtype(gram.dtype)
    penalty = penalty_of(alpha, gram.shape[:-2], gram.device, dtype)
    if gram.dtype == dtype:
        return solve_heads(gram, rhs, penalty, impl)
    weight, info = solve_heads(gram.to(dtype), rhs.to(dtype), penalty, impl)
    return RidgeSolution(weight.to(gram.dtype), info)


def regularised_inverse(gram: Tensor, alpha: float | Tensor, *, impl: str = "auto") -> Tensor:
    """(A + alpha I)^-1, (..., D, D), arguments as in `regularised_solve`; NaN where A + alpha I is not positive
    definite.

    To solve a system, use `regularised_solve`: it is as fast and more accurate. This function is for uses of the
    elements of the inverse, such as variances.

    >>> cmab_kernels.regularised_inverse(torch.zeros(2, 2), 4.0)
    tensor([[0.2500, 0.0000],
            [0.0000, 0.2500]])
    """
    check_operands(gram=gram)
    _check_square(gram)
    one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return regularised_solve(gram, one.expand(gram.shape), alpha, impl=impl).weight


def _check_square(gram: Tensor) -> None:
    if gram.dim() < 2 or gram.shape[-1] != gram.shape[-2] or gram.shape[-1] == 0:
        raise ValueError(mismatch("gram", f"shape {tuple(gram.shape)}", "(..., D, D) with D >= 1"))


def penalty_of(
    alpha: float | Tensor, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    """alpha as a tensor of `shape` and `dtype`. Raise if type, shape or device is wrong, or alpha is a negative number.

    The operators check the elements of a tensor for negative numbers.
    """
    if not isinstance(alpha, Tensor):
        check_number("alpha", alpha)
        number = alpha if isinstance(alpha, float) else _float(alpha)
        if not 0 <= number <= _LARGEST[dtype]:
            raise ValueError(mismatch("alpha", alpha, f"a number >= 0, finite in {dtype}"))
        return torch.full(shape, number, dtype=dtype, device=device)
    check_floats("alpha", alpha)
    check_broadcast("alpha", alpha, shape, device)
    if alpha.dtype != dtype and is_read(alpha) and (alpha > _LARGEST[dtype]).any():
        raise ValueError(mismatch("alpha", "a number that is too large", f"numbers >= 0, finite in {dtype}"))
    return alpha.to(device, dtype).expand(shape)


def _float(number: Real) -> float:
    """The number as a float, or infinity for an int that is too large for a float."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def solve_heads(gram: Tensor, rhs: Tensor, penalty: Tensor, impl: str) -> RidgeSolution:
    """(A + alpha I)^-1 B and its info, for gram (..., D, D), rhs (..., D, E) and penalty (...), all float64 or all
    float32."""
    if gram.dim() == 3:
        return RidgeSolution(
            *regularised_solve_op(RegularisedSolve(gram, rhs, penalty, choose("intention.solve", impl, gram, rhs)))
        )
    systems, (width, columns) = penalty.numel(), rhs.shape[-2:]
    gram, flat_rhs = gram.reshape(systems, width, width), rhs.reshape(systems, width, columns)
    chosen = choose("intention.solve", impl, gram, flat_rhs)
    weight, info = regularised_solve_op(RegularisedSolve(gram, flat_rhs, penalty.reshape(systems), chosen))
    return RidgeSolution(weight.view(*rhs.shape), info.view(penalty.shape))  # torch parses ints in half the time
