"""The iterative pseudo-inverse and the landmarks' values with their gradients, against float64, matrix by matrix; whole windows row by row.

Six iterations make rounding errors up to a thousand times as large, ours and torch's own alike: what float32 may be off by is three times
the worst that torch's own float32 is on the same matrices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.backends import choose, implementation
from cmab_kernels.nystrom.reference import iterative_pinv_reference, landmark_values_reference
from cmab_kernels.testing.oracles import largest_score

from .problems import DTYPES, Shares, if_not, parity_tasks, row_shares, worst
from .sections import Row, Task

SIZES = (1, 3, 16, 17, 32, 33, 64)
WIDTHS = ((16, 16), (64, 64), (33, 7), (100, 1))


@dataclass(frozen=True)
class Problem:
    dtype: str
    landmarks: int
    width: int = 64
    value_width: int = 64
    variant: str = "plain"
    """What else there is: "absent" landmarks of NaN, "strided", "sharp" (logits of 10 N(0, 1), else 3), or "huge" (logits of 1e38)."""
    iterations: int = 6
    count: int = 300
    impl: str = "triton"


def problems() -> Iterator[Problem]:
    """Every size and class of widths, masks, strides, sharp and huge logits."""
    for dtype in ("float64", "float32"):
        for size in SIZES:
            yield Problem(dtype, size)
        for widths, size in itertools.product(WIDTHS, (16, 64)):
            yield Problem(dtype, size, *widths, variant="sharp")
        for variant, size in itertools.product(("absent", "strided", "huge"), (17, 64)):
            yield Problem(dtype, size, 33, 7, variant)
        yield Problem(dtype, 16, iterations=1)
    yield Problem("float32", 16, count=70_000)


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return [*parity_tasks(problems(), shares, device), *parity_tasks(windows(), window_shares, device, "window, ")]


@dataclass
class Inputs:
    query: Tensor
    key: Tensor
    values: Tensor
    absent: Tensor | None
    dout: Tensor
    scale: float
    iterations: int
    matrix: Tensor
    """Matrices to be inverted; the first is zero."""
    dinverse: Tensor

    @property
    def call(self) -> tuple[Any, ...]:
        return self.query, self.key, self.values, self.absent, self.scale, self.iterations


def make(problem: Problem, device: str, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    dtype, count, m = DTYPES[problem.dtype], problem.count, problem.landmarks
    q, k, v, dout = (torch.randn(count, m, w, device=device).to(dtype) for w in (*(problem.width,) * 2, *(problem.value_width,) * 2))
    absent = None
    q *= 10 if problem.variant == "sharp" else 3
    if problem.variant == "absent":
        absent = torch.rand(count, m, device=device) < 0.3
        absent[0] = True
        q, k, v, dout = (t.masked_fill(absent[..., None], math.nan) for t in (q, k, v, dout))
    if problem.variant == "strided":
        q, v = q.mT.contiguous().mT, v.repeat_interleave(2, -1)[..., ::2]
        k, dout = k.movedim(0, -1).contiguous().movedim(-1, 0), dout[:1].expand(dout.shape)
    if problem.variant == "huge":
        q = torch.zeros_like(q).index_fill_(-1, torch.tensor([0], device=device), 1e38)
        k = torch.linspace(-1, 1, m, device=device, dtype=dtype)[:, None] * torch.ones_like(k)
    matrix = torch.randn(count, m, m, device=device).to(dtype)
    matrix[0] = 0.0
    return Inputs(q, k, v, absent, dout, problem.width**-0.5, problem.iterations, matrix, torch.randn_like(matrix).mT)


def by_kernels(given: Inputs, impl: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The pseudo-inverses with the gradient of their matrices, and the landmarks' values with their gradients."""
    module = implementation("nystrom", choose("nystrom", impl, given.query))
    inverse = module.iterative_pinv(given.matrix, given.iterations)
    dmatrix = module.iterative_pinv_backward(given.dinverse, given.matrix, given.iterations)
    values = module.landmark_values(*given.call)
    return (inverse, dmatrix), (values, *module.landmark_values_backward(given.dout, *given.call))


def _error(ours: Tensor, right: Tensor) -> float:
    """The error of the worst matrix, as a share of its norm; what underflows beside the others is no error."""
    size = right.flatten(1).norm(dim=1)
    error = (ours.double() - right).flatten(1).norm(dim=1) / size.clamp(min=max(1e-30 * float(right.norm()), 1e-300))
    return worst(error)


def _pinv(matrix: Tensor, dinverse: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    leaf = matrix.detach().requires_grad_()
    inverse = iterative_pinv_reference(leaf, iterations)
    return inverse.detach(), *torch.autograd.grad(inverse, leaf, dinverse)


def _landmarks(given: Inputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    tensors = [t.to(dtype) for t in (given.query, given.key, given.values, given.dout)]
    if given.absent is not None:
        tensors = [t.masked_fill(given.absent[..., None], 0.0) for t in tensors]
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    values = landmark_values_reference(*leaves, given.absent, given.scale, given.iterations)
    return values.detach(), *torch.autograd.grad(values, leaves, tensors[3])


def _shares(
    names: tuple[str, ...], ours: tuple[Tensor, ...], right: tuple[Tensor, ...], theirs: tuple[Tensor, ...], floor: float
) -> Shares:
    """The first is a result, the others are gradients, which may be off by four times as much."""
    found = {}
    for i, name in enumerate(names):
        allowed = max(floor, 0.0 if right[i].dtype == theirs[i].dtype else 3 * _error(theirs[i], right[i]))
        found[name] = _error(ours[i], right[i]) / (allowed if i == 0 else 4 * allowed)
    return found


def shares(problem: Problem, device: str) -> Shares:
    """The worst matrix of each result."""
    given = make(problem, device)
    dtype, iterations = given.query.dtype, given.iterations
    floor = 1e-12 if dtype == torch.float64 else 32 * torch.finfo(dtype).eps
    matrix, dinverse = given.matrix, given.dinverse
    ours, values = by_kernels(given, problem.impl)
    right, theirs = (_pinv(matrix.to(t), dinverse.to(t), iterations) for t in (torch.float64, dtype))
    found = _shares(("inverse", "dmatrix"), ours, right, theirs, floor)

    names = "values", "dquery", "dkey", "dvalues"
    if problem.variant == "huge":
        found |= {name: if_not(result.isfinite().all()) for name, result in zip(names, values, strict=True)}
    else:
        right, theirs = (_landmarks(given, t) for t in (torch.float64, dtype))
        found |= _shares(names, values, right, theirs, floor)
    return found


# ---- whole windows


@dataclass(frozen=True)
class Window:
    """Nyström attention of a whole window, with its gradients."""

    dtype: str
    landmarks: int = 16
    width: int = 64
    value_width: int = 64
    tokens: int = 1000
    variant: str = "means"
    """Landmarks are segment means, "masked" ones, "given", or means with the "exact" pseudo-inverse."""
    impl: str = "triton"


def windows() -> Iterator[Window]:
    for dtype, landmarks in itertools.product(DTYPES, (16, 64)):
        yield Window(dtype, landmarks)
    for dtype, variant in itertools.product(DTYPES, ("masked", "given", "exact")):
        yield Window(dtype, 7, 33, 5, 301, variant)
    yield Window("float32", 32, 16, 16, 20_000)


def _attention(problem: Window, leaves: tuple[Tensor, ...], mask: Tensor | None, impl: str) -> Tensor:
    options: dict[str, Any] = {"num_landmarks": problem.landmarks, "key_padding_mask": mask, "impl": impl}
    if problem.variant == "given":
        options |= {"num_landmarks": None, "landmarks": tuple(t[:, :, : problem.landmarks] for t in leaves[:2])}
    return ck.nystrom_attention(*leaves, pinv="exact" if problem.variant == "exact" else "iterative", **options)


def _results(problem: Window, given: tuple[Tensor, ...], dout: Tensor, mask: Tensor | None, impl: str) -> tuple[Tensor, ...]:
    leaves = tuple(t.detach().requires_grad_() for t in given)
    out = _attention(problem, leaves, mask, impl)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def window_shares(problem: Window, device: str) -> Shares:
    """The worst row of each result."""
    torch.manual_seed(0)
    dtype = DTYPES[problem.dtype]
    widths = (problem.width, problem.width, problem.value_width)
    given = tuple(torch.randn(2, 3, problem.tokens, n, device=device).to(dtype) for n in widths)
    dout = torch.randn(2, 3, problem.tokens, problem.value_width, device=device).to(dtype)
    mask = torch.rand(2, problem.tokens, device=device) < 0.3 if problem.variant == "masked" else None
    ours, theirs = (_results(problem, given, dout, mask, impl) for impl in (problem.impl, "reference"))
    right = _results(problem, tuple(t.double() for t in given), dout, mask, "reference")
    return row_shares(("out", "dq", "dk", "dv"), ours, theirs, right, dtype, largest_score(*given[:2]))
