"""Batches of regularised solves by LAPACK's own measure, whose limit is 30; bad matrices among good ones; gradients against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import lapack_ratio

from .problems import DTYPES, Shares, if_not, parity_tasks, why_not, worst
from .sections import Task

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
    return parity_tasks(problems(), shares, device, "solve, ")


def make(problem: Problem, device: str) -> tuple[Tensor, Tensor]:
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


def shares(problem: Problem, device: str) -> Shares:
    gram, rhs = make(problem, device)
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
        found["gradients"] = _gradients(problem, gram, rhs, alpha)
    return found


def _gradients(problem: Problem, gram: Tensor, rhs: Tensor, alpha: float) -> float:
    """The errors for the first matrices, as a share of 1,000 eps: each is a solve of a well conditioned system."""
    found = []
    for dtype, impl in ((gram.dtype, problem.impl), (torch.float64, "reference")):
        leaves = [t[:8].detach().to(dtype).requires_grad_() for t in (gram, rhs)]
        weight = ck.regularised_solve(*leaves, alpha, impl=impl).weight
        found.append(torch.autograd.grad(weight.square().sum(), leaves))
    allowed = 1000 * torch.finfo(gram.dtype).eps
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(*found, strict=True)) / allowed
