"""The facts that the sums contain besides the coefficients: the best of several penalties, the noise, and the
uncertainty of a prediction.

With the centred Gram matrix G, its eigenvalues l and eigenvectors V, the penalty a, and the precision p of the noise,
the coefficients have the covariance P / p with P = (G + a I)^-1. The examples determine gamma = sum l / (l + a) = D - a
tr P coefficients (MacKay, Bayesian interpolation, 1992).
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from ..runtime.checks import mismatch
from .rows import Rows
from .sums import LOST, Solution, Sums, as_tensor, numbers_of


def grid_of(alphas: Any) -> tuple[float, ...]:
    """Return the penalties to choose from. Raise an error unless the penalties are numbers > 0."""
    grid = numbers_of(alphas)
    if not grid or not all(0 < each < math.inf for each in grid):
        raise ValueError(mismatch("alphas", repr(alphas), "numbers > 0, from which alpha='gcv' and alpha='loo' choose"))
    return tuple(grid)


def precisions_of(noise_precision: Any, targets: int | None = None) -> list[float]:
    """Return the given precisions of the noise, one for all targets or one for each. Raise an error unless the
    precisions are numbers > 0."""
    given = numbers_of(noise_precision)
    if not given or not all(0 < each < math.inf for each in given):
        raise ValueError(
            mismatch(
                "noise_precision", repr(noise_precision), "None, a number > 0, or an array with one for each target"
            )
        )
    if targets is not None and len(given) not in (1, targets):
        raise ValueError(
            mismatch("noise_precision", f"{len(given)} numbers", f"one, or one for each target of y, {targets}")
        )
    return given


def best_by_gcv(held: Sums, grid: tuple[float, ...]) -> float:
    """Return the penalty a with the least n sum (y - f)^2 / (n - gamma)^2, summed over the targets, computed from the
    sums alone.

    n is the sum of the weights, and gamma counts the intercept. This is the leave-one-out error if every example has
    the mean leverage (Golub, Heath and Wahba, Generalized cross-validation, 1979).
    """
    values, vectors = held.spectrum()
    squared = (vectors.T @ as_tensor(held.centred().moment)).square()
    spread, total = _spread(held)
    scores = []
    for alpha in grid:
        left = float(total - (values / (values + alpha)).sum()) - held.intercept
        errors = spread - (squared * ((values + 2 * alpha) / (values + alpha).square())[:, None]).sum(0)
        scores.append(float(errors.clamp(min=0.0).sum()) / left**2 if left > 0 else math.inf)
    return grid[scores.index(min(scores))]


def best_by_leave_one_out(held: Sums, rows: Rows, weights: Tensor | None, grid: tuple[float, ...]) -> float:
    """Return the penalty with the least weighted squared leave-one-out error: the error at each example of a fit to all
    other examples.

    `held` are the sums of exactly these examples. If example i is left out, its error is e_i / (1 - h_i), with h_i =
    w_i (|V'(x_i - mean)|^2 / (l + a) + 1 / sum w). The last term is present only with an intercept (Allen, PRESS,
    1974).
    """
    values, vectors = held.spectrum()
    _, moment, centre, offset, _, _ = (part if isinstance(part, bool) else as_tensor(part) for part in held.centred())
    along, total = vectors.T @ moment, _spread(held)[1]
    scores = torch.zeros(len(grid), dtype=torch.float64, device=held.device)
    for x, part in rows.blocks():
        places, y = (x - centre) @ vectors, rows.y[part] - offset
        w = y.new_ones(len(y), 1) if weights is None else weights[0, part, None]
        for i, alpha in enumerate(grid):
            leverage = w * (places.square() @ (1 / (values + alpha))[:, None] + held.intercept / total)
            errors = (y - places @ (along / (values + alpha)[:, None])) / (1 - leverage)
            scores[i] += (w * errors.square()).sum()
    found = scores.nan_to_num(nan=math.inf).tolist()
    return grid[found.index(min(found))]


class Posterior:
    """The Gaussian distribution of coefficients and targets, given the examples, the penalties and the noise.

    As in scikit-learn's `BayesianRidge`, the intercept is treated as known.
    """

    def __init__(self, held: Sums, solution: Solution, penalties: tuple[float, ...], noise_precision: Any) -> None:
        self._solution, like = solution, as_tensor(held.state.gram)
        self._factors = [held.factor(each) for each in penalties]
        """The factor of P for each penalty: one for all targets, or one for each target."""
        if noise_precision is None:
            traces = torch.stack([each.inverse().diagonal().sum() for each in self._factors])
            self.precision = _estimated(
                held, solution.weight, (held.width - traces * like.new_tensor(penalties)).expand(held.targets)
            )
        else:
            self.precision = like.new_tensor(precisions_of(noise_precision, held.targets)).expand(held.targets)

    def deviation(self, points: Tensor) -> Tensor:
        """Return the standard deviation (N, E) of the targets at points (N, D), with their noise, in the dtype of
        points."""
        places = points - self._solution.centre
        spread = torch.stack([factor.halves(places).square().sum(1) for factor in self._factors], 1)
        return ((1 + spread) / self.precision).sqrt().to(points.dtype)

    def sample(self, points: Tensor, number: int, normal: Any) -> Tensor:
        """Return `number` joint draws (N, E, number) of the targets at points (N, D); `normal(shape)` draws numbers."""

        def drawn(*shape: int) -> Tensor:
            return torch.from_numpy(normal(shape)).to(points.device)

        places = points - self._solution.centre
        halves = torch.stack([factor.halves(places) for factor in self._factors])
        targets = len(self.precision)
        around = torch.einsum("end,des->nes", halves.expand(targets, -1, -1), drawn(places.shape[1], targets, number))
        around += drawn(*around.shape)
        return (self._solution.at(points.double())[:, :, None] + around / self.precision.sqrt()[:, None]).to(
            points.dtype
        )


def _spread(held: Sums) -> tuple[Tensor, Any]:
    """Return the centred sums (E,) of w y^2, and the sum of w, a scalar."""
    if held.squares is None:
        allowed = "a regression that is fitted again; this one was saved by a version that kept no squares of targets"
        raise ValueError(mismatch("examples", "sums without the squares of targets", allowed))
    sums, total, _ = held.squares
    spread = as_tensor(sums)
    return spread - held.state.moment[0, 0, -1].square() / total if held.intercept else spread, total


def _estimated(held: Sums, weight: Tensor, determined: Tensor) -> Tensor:
    """Return the precision (E,) of the noise, (sum w - gamma) / sum w (y - f)^2."""
    gram, moment = (as_tensor(part) for part in held.centred()[:2])
    spread, total = _spread(held)
    errors = spread - (weight * (2 * moment - gram @ weight)).sum(0)
    free = total - determined
    if bool((free <= 0).any()):
        shown = f"None, but the weights sum to {float(total):g} and determine {float(determined.max()):g} coefficients"
        raise ValueError(mismatch("noise_precision", shown, "a number > 0, or more examples"))
    if held.squares is not None and bool((errors < LOST * as_tensor(held.squares.peak)).any()):
        warnings.warn(
            "noise_precision: got None for so little noise that few digits of the estimate may be right",
            RuntimeWarning,
            stacklevel=5,
        )
    return free / errors.clamp(min=0.0)
