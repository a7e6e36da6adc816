"""Nyström attention of whole windows, and its gradients, against the definition in float64, row by row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import bound
from cmab_kernels.testing.oracles import largest_score

from .problems import DTYPES, Shares, parity_tasks, sizes_of, worst
from .sections import Task


@dataclass(frozen=True)
class Problem:
    dtype: str
    landmarks: int = 16
    width: int = 64
    value_width: int = 64
    tokens: int = 1000
    variant: str = "means"
    """Landmarks are segment means, "masked" ones, "given", or means with the "exact" pseudo-inverse."""
    impl: str = "triton"


def problems() -> Iterator[Problem]:
    for dtype, landmarks in itertools.product(DTYPES, (16, 64)):
        yield Problem(dtype, landmarks)
    for dtype, variant in itertools.product(DTYPES, ("masked", "given", "exact")):
        yield Problem(dtype, 7, 33, 5, 301, variant)
    yield Problem("float32", 32, 16, 16, 20_000)


def tasks(device: str) -> list[Task]:
    return parity_tasks(problems(), shares, device, "window, ")


def _attention(problem: Problem, leaves: tuple[Tensor, ...], mask: Tensor | None, impl: str) -> Tensor:
    options: dict[str, Any] = {"num_landmarks": problem.landmarks, "key_padding_mask": mask, "impl": impl}
    if problem.variant == "given":
        options |= {"num_landmarks": None, "landmarks": tuple(t[:, :, : problem.landmarks] for t in leaves[:2])}
    return ck.nystrom_attention(*leaves, pinv="exact" if problem.variant == "exact" else "iterative", **options)


def _results(problem: Problem, given: tuple[Tensor, ...], dout: Tensor, mask: Tensor | None, impl: str) -> tuple[Tensor, ...]:
    leaves = tuple(t.detach().requires_grad_() for t in given)
    out = _attention(problem, leaves, mask, impl)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def shares(problem: Problem, device: str) -> Shares:
    """The worst row of each result. Rows of a head share one pseudo-inverse, whose error all show."""
    torch.manual_seed(0)
    dtype = DTYPES[problem.dtype]
    widths = (problem.width, problem.width, problem.value_width)
    given = tuple(torch.randn(2, 3, problem.tokens, n, device=device).to(dtype) for n in widths)
    dout = torch.randn(2, 3, problem.tokens, problem.value_width, device=device).to(dtype)
    mask = torch.rand(2, problem.tokens, device=device) < 0.3 if problem.variant == "masked" else None
    ours = _results(problem, given, dout, mask, problem.impl)
    own = _results(problem, given, dout, mask, "reference")
    right = _results(problem, tuple(t.double() for t in given), dout, mask, "reference")
    score = largest_score(*given[:2])
    found = {}
    for name, a, b, wanted in zip(("out", "dq", "dk", "dv"), ours, own, right, strict=True):
        size = sizes_of(wanted)
        error, theirs = ((t.double() - wanted).norm(dim=-1) / size for t in (a, b))
        allowed = bound(dtype, score, theirs.amax(-1, keepdim=True), factor=1.0 if name == "out" else 4.0)
        found[name] = worst(error / allowed)
    return found
