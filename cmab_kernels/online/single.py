"""One example at a time: examples that are collected before they are added to the sums, and a solution that is kept up
to date by rank-one updates."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

from ..runtime.checks import kind_of, mismatch
from .rows import Rows
from .sums import Solution, Sums

WAITING = 128
"""The largest number of examples that are collected. Adding a block of this many takes as long as adding one."""

LARGEST_GROWTH = 1e4
"""The largest factor by which rank-one updates may increase the determinant of the system. A growth
by 10^k loses at most k digits. Beyond this factor the solution is recomputed from the sums."""


class Solved(NamedTuple):
    """A solution theta = P b for b = sum w k y, with the inverse P of sum w k k' + diag(alpha, ..., alpha, 0) for
    k = [x - centre, 1]. Nothing writes to its arrays, so threads may read them."""

    theta: np.ndarray
    inverse: np.ndarray
    centre: np.ndarray
    growth: float
    """The factor by which rank-one updates have increased the determinant of the system."""

    @classmethod
    def of(cls, held: Sums, solution: Solution, alpha: float) -> Solved:
        """Return the solution of one target from the sums, with its inverse."""
        width, intercept = held.width, held.intercept
        inverse = np.zeros((width + intercept,) * 2)
        inverse[:width, :width] = held.factor(alpha).inverse().cpu().numpy()
        theta = solution.weight[:, 0].cpu().numpy().copy()
        if intercept:
            inverse[width, width] = 1 / float(held.state.gram[0, 0, -1, -1])
            theta = np.append(theta, float(solution.offset))
        return cls(theta, inverse, solution.centre.cpu().numpy(), 1.0)

    def at(self, row: np.ndarray) -> float:
        width = len(row)
        value = float((row - self.centre).dot(self.theta[:width]))
        return value if len(self.theta) == width else value + float(self.theta[width])

    def after(self, row: np.ndarray, y: float, w: float) -> Solved:
        """Return the solution after one more example. It changes P by the formula of Sherman and Morrison,
        P - (P k)(P k)' / (1 / w + k'P k)."""
        key = np.ones(len(self.theta))
        np.subtract(row, self.centre, out=key[: len(row)])
        error = y - float(key.dot(self.theta))
        along = self.inverse.dot(key)
        spread = w * float(along.dot(key))
        share = math.sqrt(w / (1 + spread))
        along *= share
        inverse = along[:, None] * along
        np.subtract(self.inverse, inverse, out=inverse)
        theta = self.theta + along * (error * share)  # w times the new P k, which is the old P k / (1 + spread)
        return Solved(theta, inverse, self.centre, self.growth * (1 + spread))


class Waiting:
    """Examples that came one by one after the examples of the sums `held`, and are not in the sums yet."""

    def __init__(
        self, held: Sums, alpha: Any, forgetting: Any, fit_intercept: Any, solution: Solved | None = None
    ) -> None:
        self.held, self.alpha, self.forgetting, self.fit_intercept = held, alpha, forgetting, fit_intercept
        self._examples: list[tuple[np.ndarray, float, float]] = []
        self._now: tuple[int, Solved | None] = 0, solution
        """The number of examples, and the solution after them. One assignment changes both, so that an interruption
        leaves all or nothing of an example. Later entries of `_examples` are from interrupted calls."""
        self.names: list[Any] = list(range(held.width)) if held.names is None else held.names

    def __len__(self) -> int:
        return self._now[0]

    @property
    def solution(self) -> Solved | None:
        """The solution after all examples; None if it must be computed from the sums."""
        return self._now[1]

    def parameters_are(self, alpha: Any, forgetting: Any, fit_intercept: Any) -> bool:
        return self.alpha is alpha and self.forgetting is forgetting and self.fit_intercept is fit_intercept

    def add(self, row: np.ndarray, y: float, w: float) -> None:
        count, solution = self._now
        if solution is not None:
            solution = solution.after(row, y, w)
            if not solution.growth < LARGEST_GROWTH:
                solution = None
        self._examples[count:] = [(row, y, w)]
        self._now = count + 1, solution

    def flushed(self, name: str) -> Sums:
        """Return the sums with the collected examples."""
        examples = zip(*self._examples[: len(self)], strict=True)
        x, y, weights = (torch.from_numpy(np.array(each)).to(self.held.device) for each in examples)
        return self.held.added(Rows(name, x, y, weights), float(self.forgetting))

    def row(self, x: Any) -> np.ndarray:
        """Return the features (D,) of an example. A feature that is missing in a dict is 0."""
        if self.held.names is not None:
            x = _named(x)
        if isinstance(x, dict):
            try:
                row = np.array([x[name] for name in self.names], dtype=np.float64)
                known = len(x) == len(self.names)
            except (KeyError, TypeError, ValueError):
                row = np.array([number("x", x.get(name, 0.0), name) for name in self.names])
                known = False
            if not known and not x.keys() <= set(self.names):
                strange = ", ".join(sorted(map(repr, x.keys() - set(self.names))))
                raise ValueError(
                    mismatch("x", f"the features {strange}", f"only those of the first example, {self.names}")
                )
        else:
            row = vector(x)
            if len(row) != len(self.names):
                raise ValueError(mismatch("x", f"{len(row)} features", f"{len(self.names)}, as in the examples before"))
        if not math.isfinite(row.sum()) and not np.isfinite(row).all():
            raise ValueError(mismatch("x", "an infinity or NaN", "finite numbers"))
        return row


def _named(x: Any) -> Any:
    """Return a row of a data frame, a pandas Series whose index is names, as a dict; anything else as it is."""
    index = getattr(x, "index", None) if type(x).__module__.split(".")[0] == "pandas" else None
    return x.to_dict() if index is not None and all(isinstance(name, str) for name in index) else x


def vector(x: Any) -> np.ndarray:
    """Return a sequence of numbers as an array (D,)."""
    try:
        row = np.array(x.numpy(force=True) if isinstance(x, torch.Tensor) else x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(mismatch("x", kind_of(x), f"a dict of numbers, or a sequence of them; {error}")) from error
    if row.ndim != 1 or not len(row):
        raise ValueError(mismatch("x", f"shape {row.shape}", "a dict of numbers, or a sequence (D,) of them"))
    return row


def number(argument: str, given: Any, feature: Any = None) -> float:
    """Return a finite number as a float."""
    if type(given) is not float and not isinstance(given, (Real, np.generic, np.ndarray, torch.Tensor)):
        raise TypeError(
            mismatch(argument, kind_of(given) + ("" if feature is None else f" at {feature!r}"), "a number")
        )
    try:
        value = float(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(mismatch(argument, repr(given), "a number")) from error
    if not math.isfinite(value):
        raise ValueError(mismatch(argument, value, "a finite number"))
    return value


def features_of(x: Any) -> tuple[list[str] | None, np.ndarray]:
    """Return the names of the features of a first example, or None, and its features (D,)."""
    x = _named(x)
    if not isinstance(x, dict):
        return None, vector(x)
    if x.keys() == set(range(len(x))):
        return None, vector([x[i] for i in range(len(x))])
    if not all(isinstance(name, str) for name in x):
        raise TypeError(mismatch("x", f"the features {list(x)}", "names that are strings, or the numbers 0 to D - 1"))
    return list(x), vector(list(x.values()))
