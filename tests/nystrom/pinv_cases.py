"""Test matrices and landmarks, and the errors that results and gradients may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cmab_kernels.nystrom.contract import LandmarkValues, LandmarkValuesBackward, Pinv, PinvBackward
from cmab_kernels.nystrom.reference import iterative_pinv_reference, landmark_kernel, landmark_values_reference
from cmab_kernels.testing import bound, oracles

GRADIENTS = 4.0
"""The error that a gradient may have, in units of the error that a result may have."""


def _permutations(count: int, m: int) -> Tensor:
    return torch.eye(m, dtype=torch.float64)[torch.stack([torch.randperm(m) for _ in range(count)])]


MATRICES: dict[str, Callable[[int, int], Tensor]] = {
    "normal": lambda count, m: torch.randn(count, m, m, dtype=torch.float64),
    "softmax": lambda count, m: (
        (3 * torch.randn(count, m, m, dtype=torch.float64)).softmax(-1) * (1 + torch.rand(count, m, 1))
    ),
    "all equal": lambda count, m: torch.full((count, m, m), -0.25, dtype=torch.float64),
    "signs": lambda count, m: 0.5 * torch.randn(count, m, m, dtype=torch.float64).sign(),
    "zero": lambda count, m: torch.zeros(count, m, m, dtype=torch.float64),
    "permutations": _permutations,
    "half zero": lambda count, m: torch.randn(count, m, m, dtype=torch.float64) * torch.arange(m).lt((m + 1) // 2),
    "tiny": lambda count, m: torch.randn(count, m, m, dtype=torch.float64) * 2.0**-25,
    "large": lambda count, m: torch.randn(count, m, m, dtype=torch.float64) * 2.0**25,
}
"""(count, m, m) of float64. In "all equal", "permutations" and "signs", norms are attained by several columns and rows;
only in "signs" do they matter after the first iteration.

The rows of a softmax add up to 1 except for rounding, and the gradient through their norm goes to one of them at
random, until
the gradient of the softmax removes it. So here the rows are weighted.
"""


def _row_sizes(right: Tensor, terms: Tensor) -> Tensor:
    """Return the size relative to which a row's error is measured: its norm, or a twentieth of the norm of its terms.

    A number that underflows because other numbers of its matrix are much larger is not an error.
    """
    size = torch.maximum(right.norm(dim=-1), 0.05 * terms.norm(dim=-1))
    return size.clamp(min=max(1e-30 * float(terms.norm()), 1e-300))


def shares(
    ours: Tensor, right: Tensor, terms: Tensor, same_precision: Tensor, score: float, factor: float = 1.0
) -> Tensor:
    """Return the error of each row as a share of the error that promise P2 allows; infinite for NaN.

    `same_precision` is torch's result. Its error counts as at least that of the matrix's median row, since a row may be
    right by chance.
    """
    assert ours.shape == right.shape and ours.is_contiguous() and ours.dtype == same_precision.dtype
    size = _row_sizes(right, terms)
    theirs = (same_precision.double() - right).norm(dim=-1) / size
    theirs = torch.maximum(theirs, theirs.median(dim=-1, keepdim=True).values) if theirs.numel() else theirs
    error = (ours.double() - right).norm(dim=-1) / size
    return (error / bound(ours.dtype, score, theirs, factor)).nan_to_num(nan=torch.inf)


def check(
    name: str, ours: Tensor, right: Tensor, terms: Tensor, same_precision: Tensor, score: float, factor: float = 1.0
) -> None:
    found = shares(ours, right, terms, same_precision, score, factor)
    assert (found <= 1).all(), f"{name}: {float(found.max()):.2f} of what it may be off by"


def _moved(matrix: Tensor, inverse: Tensor) -> Tensor:
    """Return |Z| |dA| |Z|, which bounds the change of the inverse Z by a change dA of the matrix, for dA = 4 |A|."""
    size = inverse.detach().abs()
    return 4 * size @ matrix.detach().abs() @ size


def _like_its_matrix(gradient: Tensor) -> Tensor:
    """Return an estimate of the terms in a gradient's rows if nothing else is known: twenty times the matrix's median
    row."""
    return (
        20
        * gradient.norm(dim=-1, keepdim=True).median(dim=-2, keepdim=True).values.expand_as(gradient)
        / max(gradient.shape[-1], 1) ** 0.5
    )


def with_gradient(module: Any, inputs: Pinv, dinverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse and the gradient of the matrices from an implementation."""
    return module.iterative_pinv(inputs), module.iterative_pinv_backward(PinvBackward(dinverse, *inputs))


def with_gradients(module: Any, inputs: LandmarkValues, dout: Tensor) -> tuple[Tensor, ...]:
    """Return the values and the three gradients from an implementation."""
    return module.landmark_values(inputs), *module.landmark_values_backward(LandmarkValuesBackward(dout, *inputs))


def check_pinv(module: Any, matrix: Tensor, iterations: int, dinverse: Tensor | None = None) -> None:
    """Check the inverse of a batch (M, m, m), and its gradient, against float64."""
    dinverse = torch.randn(matrix.shape).to(matrix.dtype) if dinverse is None else dinverse
    inverse, dmatrix = with_gradient(module, Pinv(matrix, iterations), dinverse)
    wide, same = (matrix.detach().to(dtype).requires_grad_() for dtype in (torch.float64, matrix.dtype))
    right, theirs = iterative_pinv_reference(wide, iterations), iterative_pinv_reference(same, iterations)
    check("inverse", inverse, right.detach(), _moved(wide, right), theirs.detach(), 0.0)
    (gradient,) = torch.autograd.grad(right, wide, dinverse.double())
    (their_gradient,) = torch.autograd.grad(theirs, same, dinverse)
    check("dmatrix", dmatrix, gradient, _like_its_matrix(gradient), their_gradient, 0.0, GRADIENTS)


ORDERS = 8
"""The number of equivalent evaluations whose largest error counts."""


def check_nearly_singular(
    pinv: Callable[[Tensor], Tensor], count: int, m: int, iterations: int, dtype: torch.dtype
) -> None:
    """Check the inverses of matrices (count, m, m) whose rows are almost equal, against float64.

    The error of one evaluation is random, because its roundings are multiplied by up to (13/4)^iterations. So the
    largest error over several orders of the rows and columns counts; with these orders, the same inverse is computed
    with other sums. The sum of two terms does not depend on their order. But a kernel that rounds the products and the
    sum only once has another result. So in this case elements are also changed by at most half an eps, as such a
    rounding does.
    """
    matrices = (0.03 * torch.randn(count, m, m)).softmax(-1).to(dtype)
    right = oracles.iterative_pinv(matrices.double(), iterations)

    def error(inverse: Tensor) -> Tensor:
        return (inverse.double() - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)

    def in_another_order(rows: Tensor, columns: Tensor) -> Tensor:
        half = 0.5 * torch.finfo(torch.float32).eps if m == 2 else 0.0
        moved = (matrices * (1 + half * (2 * torch.rand(matrices.shape, dtype=torch.float64) - 1))).float()
        inverse = oracles.iterative_pinv(moved[:, rows][:, :, columns], iterations)
        return inverse[:, columns.argsort()][:, :, rows.argsort()]

    own = torch.stack([error(in_another_order(torch.randperm(m), torch.randperm(m))) for _ in range(ORDERS)]).amax(0)
    allowed = bound(dtype, 0.0, torch.finfo(dtype).eps / torch.finfo(torch.float32).eps * own)
    ours = error(pinv(matrices))
    assert (ours <= allowed).all(), float((ours / allowed).max())


class Landmarks(LandmarkValues):
    """The arguments of `landmark_values`."""

    def with_tensors(self, query: Tensor, key: Tensor, values: Tensor) -> Landmarks:
        return self._replace(landmark_query=query, landmark_key=key, values=values)

    def to(self, dtype: torch.dtype) -> Landmarks:
        return self.with_tensors(*(t.to(dtype) for t in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.landmark_query, self.landmark_key, self.values

    def hidden(self) -> Landmarks:
        """Return the landmarks with zeros for absent ones, which may be NaN."""
        if self.absent is None:
            return self
        return self.with_tensors(*(t.masked_fill(self.absent[..., None], 0.0) for t in self.tensors))


def landmarks(
    count: int,
    m: int,
    width: int = 8,
    value_width: int = 5,
    dtype: torch.dtype = torch.float64,
    absent: Tensor | None = None,
    iterations: int = 6,
    law: Callable[..., Tensor] = torch.randn,
) -> Landmarks:
    """Return random landmarks, of which absent ones are NaN."""
    tensors = [law(count, m, w).to(dtype) for w in (width, width, value_width)]
    if absent is not None:
        tensors = [t.masked_fill(absent[..., None], torch.nan) for t in tensors]
    return Landmarks(*tensors, absent, width**-0.5, iterations)


def check_landmarks(module: Any, given: Landmarks, dout: Tensor | None = None) -> None:
    """Check the values and the three gradients against float64."""
    dout = torch.randn(given.values.shape).to(given.values.dtype) if dout is None else dout
    values, *ours = with_gradients(module, given, dout)
    wide, same = (given.hidden().to(dtype) for dtype in (torch.float64, given.values.dtype))
    leaves, their_leaves = ([t.detach().clone().requires_grad_() for t in one.tensors] for one in (wide, same))
    kernel = landmark_kernel(*leaves[:2], *given[3:5])
    inverse = iterative_pinv_reference(kernel, given.iterations)
    right = inverse @ leaves[2]
    theirs = landmark_values_reference(*their_leaves, *given[3:6])
    logits = given.scale * wide.landmark_query @ wide.landmark_key.mT
    score = float(logits.abs().max()) if logits.numel() else 0.0
    check("values", values, right.detach(), _moved(kernel, inverse) @ wide.values.abs(), theirs.detach(), score)

    seen = dout if given.absent is None else dout.masked_fill(given.absent[..., None], 0.0)
    *gradients, dkernel = torch.autograd.grad(right, (*leaves, kernel), seen.double())
    their_gradients = torch.autograd.grad(theirs, their_leaves, seen)
    kernel = kernel.detach()
    slope = given.scale * kernel * (dkernel.abs() + (kernel * dkernel.abs()).sum(-1, keepdim=True))
    terms = (
        slope @ wide.landmark_key.abs(),
        slope.mT @ wide.landmark_query.abs(),
        inverse.detach().abs().mT @ seen.double().abs(),
    )
    for name, mine, wanted, term, other in zip(
        ("dquery", "dkey", "dvalues"), ours, gradients, terms, their_gradients, strict=True
    ):
        check(name, mine, wanted, term, other, score, GRADIENTS)
        assert given.absent is None or not mine[given.absent].any(), name
