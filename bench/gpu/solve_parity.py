"""Batches of regularised solves by LAPACK's own measure, whose limit is 30; bad matrices among good ones; gradients against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck

from .parity import key_of
from .sections import Task
from .usable import why_not

LIMIT = 30


@dataclass(frozen=True)
class Problem:
    dtype: str
    order: int
    columns: int = 16
    condition: float = 10.0
    count: int = 300
    variant: str = "plain"
    """ "strided", or a "bad" matrix among good ones."""
    impl: str = "cuda"


def problems() -> Iterator[Problem]:
    for dtype, order in itertools.product(("float64", "float32"), (1, 16, 33, 64, 128)):
        yield Problem(dtype, order)
        yield Problem(dtype, order, 5, 1e12 if dtype == "float64" else 1e4)
    for dtype, variant in itertools.product(("float64", "float32"), ("strided", "bad")):
        yield Problem(dtype, 33, variant=variant)
    yield Problem("float32", 16, count=70_000)


def tasks(device: str) -> list[Task]:
    if reason := why_not("regularised_solve", "cuda", device):
        return [Task("solve", lambda: {"ok": True, "passed over": reason})]
    return [Task(f"solve, {key_of(problem)}", lambda problem=problem: check(problem, device)) for problem in problems()]


def make(problem: Problem, device: str) -> tuple[Tensor, Tensor]:
    """Matrices of a given condition number, and right-hand sides."""
    torch.manual_seed(0)
    few = min(problem.count, 300)  # of many, each comes again and again
    axes = torch.linalg.qr(torch.randn(few, problem.order, problem.order, device=device).double())[0]
    values = torch.logspace(0, -math.log10(problem.condition), problem.order, dtype=torch.float64, device=device)
    gram = ((axes * values) @ axes.mT)[torch.arange(problem.count, device=device) % few]
    rhs = torch.randn(problem.count, problem.order, problem.columns, device=device).double()
    gram, rhs = (t.to(getattr(torch, problem.dtype)) for t in ((gram + gram.mT) / 2, rhs))
    if problem.variant == "strided":
        return gram.movedim(0, -1).contiguous().movedim(-1, 0), rhs.mT.contiguous().mT
    return gram, rhs


def _ratio(gram: Tensor, rhs: Tensor, weight: Tensor, alpha: float) -> float:
    """||B - A X|| / (||A|| ||X|| n eps), the worst of all."""
    eps = torch.finfo(weight.dtype).eps
    a = gram.double() + alpha * torch.eye(gram.shape[-1], dtype=torch.float64, device=gram.device)
    x = weight.double()
    residual, size, solution = (torch.linalg.matrix_norm(t, ord=1) for t in (rhs.double() - a @ x, a, x))
    return float((residual / (size * solution * gram.shape[-1] * eps)).nan_to_num(nan=math.inf).max())


def check(problem: Problem, device: str) -> dict[str, Any]:
    """Each measure as a share of what it may be; above 1 the solution is wrong."""
    gram, rhs = make(problem, device)
    alpha = 1e-3 if problem.condition < 100 else 0.0
    weight, info = ck.regularised_solve(gram, rhs, alpha, impl=problem.impl)
    shares = {"LAPACK's ratio": _ratio(gram, rhs, weight, alpha) / LIMIT, "info": math.inf if (info == 1).any() else 0.0}
    if problem.variant == "bad":
        worse = gram.clone()
        worse[7] = -worse[7]
        others = torch.arange(problem.count, device=device) != 7
        again, info = ck.regularised_solve(worse, rhs, alpha, impl=problem.impl)
        shares["neighbours' bits"] = 0.0 if torch.equal(again[others], weight[others]) else math.inf
        shares["the bad one"] = 0.0 if info[7] == 1 and again[7].isnan().all() else math.inf
    if problem.condition < 100 and problem.count < 1000:
        shares["gradients"] = _gradients(problem, gram, rhs, alpha)
    return {**asdict(problem), "shares": shares, "ok": all(share <= 1 for share in shares.values())}


def _gradients(problem: Problem, gram: Tensor, rhs: Tensor, alpha: float) -> float:
    """Of the first matrices, as a share of 1,000 eps: a solve of a well conditioned system each."""
    found = []
    for dtype, impl in ((gram.dtype, problem.impl), (torch.float64, "reference")):
        leaves = [t[:8].detach().to(dtype).requires_grad_() for t in (gram, rhs)]
        weight = ck.regularised_solve(*leaves, alpha, impl=impl).weight
        found.append(torch.autograd.grad(weight.square().sum(), leaves))
    allowed = 1000 * torch.finfo(gram.dtype).eps
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(*found, strict=True)) / allowed
