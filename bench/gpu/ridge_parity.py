"""The sums of Intention, their gradients, rows times a solution and the solution itself, against float64, element by element; batches of
regularised solves by LAPACK's own measure.

An error of a sum is measured by what the terms of an element add up to when none cancels; that is what rounding errors go by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.backends import choose, kernel
from cmab_kernels.intention.api import solve_rows
from cmab_kernels.intention.solve.api import solve_heads
from cmab_kernels.testing import lapack_ratio

from .problems import DTYPES, NotHere, Shares, if_not, parity_tasks, why_not, worst
from .sections import Row, Task

WIDTHS = ((16, 16), (64, 64), (128, 128), (33, 7), (64, 1))


@dataclass(frozen=True)
class Problem:
    impl: str
    dtype: str
    width: int
    value_width: int
    keys: int = 1500
    variant: str = "plain"
    """What else there is: "masked" (with weights, and NaN behind the mask), "strided", or "huge" (keys whose squares overflow)."""
    exact: bool = False


def problems() -> Iterator[Problem]:
    """Every dtype and class of widths; masks and weights, strides, sums beyond float32, everything in float64."""
    for impl, dtype in itertools.product(("triton", "cuda"), DTYPES):
        for widths in WIDTHS:
            yield Problem(impl, dtype, *widths)
        for variant in ("masked", "strided"):
            yield Problem(impl, dtype, 33, 7, variant=variant)
        yield Problem(impl, dtype, 64, 64, variant="masked", exact=True)
    for impl, dtype in itertools.product(("triton", "cuda"), ("float32", "bfloat16")):
        yield Problem(impl, dtype, 16, 16, variant="huge")
    yield Problem("triton", "float32", 16, 16, keys=300_000)


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    sums = parity_tasks(problems(), shares, device)
    if reason := why_not("regularised_solve", "cuda", device):
        return [*sums, Task("solve", lambda: {"ok": True, "passed over": reason})]
    return [*sums, *parity_tasks(solves(), solve_shares, device, "solve, ")]


@dataclass
class Inputs:
    key: Tensor
    value: Tensor
    weights: Tensor | None
    mask: Tensor | None
    dgram: Tensor
    dmoment: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.key, self.value, self.weights, self.mask

    def wide(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and weights (as a column) in float64, zero where they are masked."""
        k, v = self.key.double(), self.value.double()
        w = torch.ones_like(k[..., :1]) if self.weights is None else self.weights.double()[..., None]
        if self.mask is None:
            return k, v, w
        hide = self.mask[:, None, :, None]
        return k.masked_fill(hide, 0.0), v.masked_fill(hide, 0.0), w.masked_fill(hide, 0.0)


def make(problem: Problem, device: str, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    dtype, state = DTYPES[problem.dtype], torch.promote_types(DTYPES[problem.dtype], torch.float32)
    k, v = (torch.randn(3, 2, problem.keys, n, device=device).to(dtype) for n in (problem.width, problem.value_width))
    dgram, dmoment = (torch.randn(3, 2, problem.width, n, device=device).double() for n in (problem.width, problem.value_width))
    weights = mask = None
    if problem.variant == "masked":
        mask = torch.rand(3, problem.keys, device=device) < 0.3
        mask[1, : problem.keys // 2] = True
        weights = torch.rand(3, 2, problem.keys, device=device, dtype=state)
        k, v = (t.masked_fill(mask[:, None, :, None], math.nan) for t in (k, v))
    if problem.variant == "strided":
        k, v = k.transpose(1, 2).contiguous().transpose(1, 2), v.repeat_interleave(2, -1)[..., ::2]
        dgram, dmoment = dgram.mT.contiguous().mT, dmoment[:1, :1].expand(dmoment.shape)
    if problem.variant == "huge":
        k[1, 1, problem.keys // 3] = 3e19
    return Inputs(k, v, weights, mask, dgram, dmoment)


def _gradients(k: Tensor, v: Tensor, w: Tensor, slope: Tensor, dmoment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = k @ slope, v @ dmoment.mT
    return w * (a + b), w * (k @ dmoment), (k * (a / 2 + b)).sum(-1)


def _share(ours: Tensor, right: Tensor, terms: Tensor, allowed: float) -> float:
    """How far the worst element is from `right`, as a share of what it may be."""
    error = (ours.double() - right).abs()
    return worst(torch.where(error == 0, 0.0, error / (allowed * terms)))


def _allowed(dtype: torch.dtype, exact: bool) -> tuple[float, float]:
    """What sums may be off by, and what rows may: float64 1e-13; sums of narrower types 32 eps of float32; rows of half precision 4 eps."""
    rows = 4 * torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 32 * torch.finfo(dtype).eps
    if dtype == torch.float64 or exact:
        return 1e-13, max(1e-13, rows if dtype != torch.float64 else 0.0)
    return 32 * torch.finfo(torch.float32).eps, rows


def by_kernels(given: Inputs, chosen: str, exact: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """The two sums, their gradients, and the rows of keys times the gradient of a sum."""
    gram, gram_backward, apply_rows = (kernel("intention", chosen, name) for name in ("gram", "gram_backward", "apply_rows"))
    sums = gram(*given.rows, (True, True), exact)
    grads = gram_backward(given.dgram, given.dmoment, *given.rows, (True, True, True), exact)
    return sums, grads, apply_rows(given.wide()[0].to(given.key.dtype), given.dmoment)


def shares(problem: Problem, device: str) -> Shares:
    """The worst element of each result."""
    given = make(problem, device)
    try:
        chosen = choose("intention", problem.impl, given.key, given.key, given.value)
    except RuntimeError as error:
        raise NotHere(str(error)) from None
    k, v, w = given.wide()
    sums_may, rows_may = _allowed(given.key.dtype, problem.exact)
    found = {}
    sums, grads, rows_by = by_kernels(given, chosen, problem.exact)
    right = ((w * k).mT @ k, (w * k).mT @ v)
    terms = ((w * k).abs().mT @ k.abs(), (w * k).abs().mT @ v.abs())
    for name, ours, wanted, size in zip(("gram", "moment"), sums, right, terms, strict=True):
        found[name] = _share(ours, wanted, size, sums_may)
    found["asymmetry"] = if_not(torch.equal(sums[0], sums[0].mT))

    slope = given.dgram + given.dgram.mT
    if problem.variant != "huge":
        right = _gradients(k, v, w, slope, given.dmoment)
        terms = _gradients(*(t.abs() for t in (k, v, w, slope, given.dmoment)))
        for name, ours, wanted, size in zip(("dkey", "dvalue", "dweights"), grads, right, terms, strict=True):
            found[name] = _share(ours, wanted, size, rows_may)
        size = k.abs() @ given.dmoment.abs()
        found["rows"] = _share(rows_by, k @ given.dmoment, size, _allowed(given.key.dtype, False)[1])
        found |= _solutions(given, chosen, _allowed(given.key.dtype, False)[0])
    return found


def _solutions(given: Inputs, chosen: str, allowed: float) -> Shares:
    """ridge_solve against a float64 solve of the float64 sums, and LAPACK's ratio of regularised_solve, whose limit is 30."""
    k, v, w = given.wide()
    alpha = torch.full(given.key.shape[:2], 0.1 * given.key.shape[2], dtype=torch.float64, device=given.key.device)
    system = (w * k).mT @ k + alpha[..., None, None] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    moment = (w * k).mT @ v
    right = torch.cholesky_solve(moment, torch.linalg.cholesky(system))
    weight, gram, info = solve_rows(*given.rows, alpha, chosen, "auto")
    condition = float(torch.linalg.cond(system).max())
    error = (weight - right).flatten(-2).norm(dim=-1) / right.flatten(-2).norm(dim=-1)
    flat = gram.flatten(0, 1)
    solution, sound = solve_heads(flat, moment.flatten(0, 1), alpha.flatten(), "auto")
    matrix = flat + alpha.flatten()[:, None, None] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return {
        "solution": float(error.max()) / (4 * condition * allowed),
        "LAPACK's ratio": worst(lapack_ratio(matrix, solution, moment.flatten(0, 1))) / LIMIT,
        "info": if_not(not info.any() and not sound.any()),
    }


# ---- solves

LIMIT = 30
"""The most that LAPACK's ratio may be."""


@dataclass(frozen=True)
class Solve:
    """A batch of regularised solves."""

    dtype: str
    order: int
    columns: int = 16
    condition: float = 10.0
    count: int = 300
    variant: str = "plain"
    """ "strided", or a "bad" matrix among good ones."""
    impl: str = "cuda"


def solves() -> Iterator[Solve]:
    for dtype, order in itertools.product(("float64", "float32"), (1, 16, 33, 64, 128)):
        yield Solve(dtype, order)
        yield Solve(dtype, order, 5, 1e12 if dtype == "float64" else 1e4)
    for dtype, variant in itertools.product(("float64", "float32"), ("strided", "bad")):
        yield Solve(dtype, 33, variant=variant)
    yield Solve("float32", 16, count=70_000)


def systems(problem: Solve, device: str) -> tuple[Tensor, Tensor]:
    """Matrices of a given condition number, and right-hand sides."""
    torch.manual_seed(0)
    few = min(problem.count, 300)  # of many, each comes again and again
    axes = torch.linalg.qr(torch.randn(few, problem.order, problem.order, device=device).double())[0]
    values = torch.logspace(0, -math.log10(problem.condition), problem.order, dtype=torch.float64, device=device)
    gram = ((axes * values) @ axes.mT)[torch.arange(problem.count, device=device) % few]
    rhs = torch.randn(problem.count, problem.order, problem.columns, device=device).double()
    gram, rhs = (t.to(DTYPES[problem.dtype]) for t in ((gram + gram.mT) / 2, rhs))
    if problem.variant == "strided":
        return gram.movedim(0, -1).contiguous().movedim(-1, 0), rhs.mT.contiguous().mT
    return gram, rhs


def solve_shares(problem: Solve, device: str) -> Shares:
    gram, rhs = systems(problem, device)
    alpha = 1e-3 if problem.condition < 100 else 0.0
    weight, info = ck.regularised_solve(gram, rhs, alpha, impl=problem.impl)
    system = gram.double() + alpha * torch.eye(problem.order, dtype=torch.float64, device=device)
    found = {"LAPACK's ratio": worst(lapack_ratio(system, weight, rhs)) / LIMIT, "info": if_not(not (info == 1).any())}
    if problem.variant == "bad":
        worse = gram.clone()
        worse[7] = -worse[7]
        others = torch.arange(problem.count, device=device) != 7
        again, info = ck.regularised_solve(worse, rhs, alpha, impl=problem.impl)
        found["neighbours' bits"] = if_not(torch.equal(again[others], weight[others]))
        found["the bad one"] = if_not(info[7] == 1 and again[7].isnan().all())
    if problem.condition < 100 and problem.count < 1000:
        found["gradients"] = _solve_gradients(problem, gram, rhs, alpha)
    return found


def _solve_gradients(problem: Solve, gram: Tensor, rhs: Tensor, alpha: float) -> float:
    """The errors for the first matrices, as a share of 1,000 eps: each is a solve of a well conditioned system."""
    found = []
    for dtype, impl in ((gram.dtype, problem.impl), (torch.float64, "reference")):
        leaves = [t[:8].detach().to(dtype).requires_grad_() for t in (gram, rhs)]
        weight = ck.regularised_solve(*leaves, alpha, impl=impl).weight
        found.append(torch.autograd.grad(weight.square().sum(), leaves))
    allowed = 1000 * torch.finfo(gram.dtype).eps
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(*found, strict=True)) / allowed
