"""Family C's systems: many small ones at once, beside torch's Cholesky."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from cmab_kernels import RidgeState, regularised_inverse, regularised_solve, solve_ridge

from ..floors import Work, inverse_work, rows_work, solve_work
from ..harness import generator, normal
from .intention_peers import cholesky_gradients, cholesky_solve, inverse_of
from .operators import Implementation, OperatorCase, direction, identity, kernels, passes, refused, sample, wide

CHOLESKY = "torch, Cholesky"
INVERSE = "torch, inverse"

SystemInputs = tuple[Tensor, ...]
"""Matrices and right-hand sides; with a backward the gradient of the solution."""


def matrices(random: torch.Generator, batch: int, width: int) -> Tensor:
    """Means of the products of as many rows, whose eigenvalues are up to 4, and 1/2: condition 9."""
    rows = normal(random, batch, width, width)
    return rows.mT @ rows / width + 0.5 * identity(rows)


@dataclass(frozen=True)
class Solve(OperatorCase):
    """Well-conditioned systems of `width` unknowns for `columns` right-hand sides each. alpha is 0, so that torch need not add it.

    A product with the inverse is less accurate (it fails LAPACK's test from condition 1e3 on), but faster in torch than its triangular
    solves: it is shown, and no baseline.
    """

    width: int
    columns: int
    batch: int
    backward: bool = False

    scan = "regularised_solve"
    baselines = (CHOLESKY,)
    name: ClassVar[str] = "solve"

    def __str__(self) -> str:
        way = "+backward" if self.backward else ""
        return f"{self.name}{way}-{self._dtype}-D{self.width}-E{self.columns}-B{self.batch}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        columns = "D" if self.columns == self.width else str(self.columns)  # so that D varies alone
        return {"pass": direction(self.backward), "B": self.batch, "D": self.width, "right-hand sides": columns}

    @property
    def work(self) -> Work:
        """Backward: two more triangular solves, and a product of the two solutions."""
        dtype = "float32" if self.dtype.itemsize < 4 else self._dtype
        forward = solve_work(self.batch, self.width, self.columns, dtype)
        if not self.backward:
            return forward
        again = Work(0.0, self.batch * 2 * self.width**2 * self.columns, forward.bytes, dtype)
        return forward + again + replace(rows_work(self.batch * self.width, self.columns, self.width, dtype), bytes=0.0)

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        ours = {name: passes(partial(self.solved, impl=name), 2, self.backward) for name in kernels(self.scan)}
        return ours | (self._peers if not self.backward else {CHOLESKY: lambda inputs: cholesky_gradients(*inputs)})

    @staticmethod
    def solved(gram: Tensor, rhs: Tensor, impl: str) -> Tensor:
        return regularised_solve(gram, rhs, 0.0, impl=impl).weight

    @property
    def _peers(self) -> Mapping[str, Implementation]:
        return {CHOLESKY: self._widened(cholesky_solve), INVERSE: self._widened(lambda gram, rhs: inverse_of(gram) @ rhs)}

    def _widened(self, solve: Callable[..., Tensor]) -> Implementation:
        """torch factorises no half precision."""
        return lambda inputs: (solve(*(part.to(wide(self.dtype)) for part in inputs)).to(self.dtype),)

    def inputs(self, seed: int) -> SystemInputs:
        random = generator(seed)
        gram = matrices(random, self.batch, self.width)
        rhs, dweight = (normal(random, self.batch, self.width, self.columns) for _ in range(2))
        gram, rhs = (part.to(self.dtype).requires_grad_(self.backward) for part in (gram, rhs))
        return (gram, rhs, dweight.to(self.dtype)) if self.backward else (gram, rhs)

    def oracle(self, inputs: SystemInputs) -> Mapping[str, Sequence[Tensor]]:
        """By autograd, where gradients are compared."""
        return dict.fromkeys(self.implementations, passes(self._exactly, 2, self.backward)(_doubles(inputs)))

    @staticmethod
    def _exactly(gram: Tensor, rhs: Tensor) -> Tensor:
        return torch.cholesky_solve(rhs, torch.linalg.cholesky_ex((gram + gram.mT) / 2)[0])

    def small(self) -> Solve:
        return replace(self, batch=4)

    def refusal(self, implementation: str) -> str | None:
        gram = sample(1, self.width, self.width, dtype=wide(self.dtype))
        return refused(self.scan, implementation, gram, gram[..., : self.columns])


def _doubles(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(part.detach().double().requires_grad_(part.requires_grad) for part in inputs)


@dataclass(frozen=True)
class SolveState(Solve):
    """The same of the sums of a state, which are float64."""

    dtype: torch.dtype = field(default=torch.float64, kw_only=True)

    scan = "solve_ridge"
    name = "solve-state"

    @staticmethod
    def solved(gram: Tensor, rhs: Tensor, impl: str) -> Tensor:
        state = RidgeState(gram[None], rhs[None], torch.full((1, len(gram)), 4 * gram.shape[-1], device=gram.device))
        return solve_ridge(state, 0.0, impl=impl).weight[0]


@dataclass(frozen=True)
class Inverse(OperatorCase):
    """Inverses of the same matrices, where their elements are wanted."""

    width: int
    batch: int

    scan = "regularised_inverse"
    baselines = (CHOLESKY, INVERSE)

    def __str__(self) -> str:
        return f"inverse-{self._dtype}-D{self.width}-B{self.batch}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"B": self.batch, "D": self.width}

    @property
    def work(self) -> Work:
        return inverse_work(self.batch, self.width, self._dtype)

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        ours = {name: passes(partial(regularised_inverse, alpha=0.0, impl=name), 1, backward=False) for name in kernels(self.scan)}
        return {**ours, CHOLESKY: lambda i: (cholesky_solve(i[0], identity(i[0]).expand_as(i[0])),), INVERSE: lambda i: (inverse_of(i[0]),)}

    def inputs(self, seed: int) -> SystemInputs:
        return (matrices(generator(seed), self.batch, self.width).to(self.dtype),)

    def oracle(self, inputs: SystemInputs) -> Mapping[str, Sequence[Tensor]]:
        """By the eigenvalues."""
        values, vectors = torch.linalg.eigh(inputs[0].double())
        return dict.fromkeys(self.implementations, ((vectors / values.unsqueeze(-2)) @ vectors.mT,))

    def small(self) -> Inverse:
        return replace(self, batch=4)

    def refusal(self, implementation: str) -> str | None:
        return refused(self.scan, implementation, *2 * [sample(1, self.width, self.width, dtype=self.dtype)])
