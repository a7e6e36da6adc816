"""One example at a time: examples that are collected before they are added to the sums, and a solution that is kept up
to date by rank-one updates."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
import torch

from ..runtime.checks import kind_of, mismatch
from .rows import Rows
from .sums import Solution, Sums

WAITING = 128
"""The largest number of examples that are collected. Adding a block of this many takes as long as adding one."""

LARGEST_GROWTH = 1e4
"""The factor by which rank-one updates may increase the determinant of the system, so that they lose at most as many
digits, before the solution is recomputed from the sums."""


class Recursion:
    """A solution of one target after rank-one updates: theta = P b for b = sum w k y, with the inverse P of
    sum w k k' + diag(alpha, ..., alpha, 0) for k = [x - centre, 1]. An example changes P by the formula of Sherman and
    Morrison, P - (P k)(P k)' / (1 / w + k'P k).
    """

    def __init__(self, held: Sums, solution: Solution, alpha: float) -> None:
        width, intercept = held.width, held.intercept
        self.width, self.centre, self.growth = width, solution.centre.cpu().numpy(), 1.0
        self.inverse = np.zeros((width + intercept,) * 2)
        self.inverse[:width, :width] = held.factor(alpha).inverse().cpu().numpy()
        self.theta = solution.weight[:, 0].cpu().numpy().copy()
        if intercept:
            self.inverse[width, width] = 1 / float(held.state.gram[0, 0, -1, -1])
            self.theta = np.append(self.theta, float(solution.offset))
        self.key = np.ones(width + intercept)

    def at(self, row: np.ndarray) -> float:
        np.subtract(row, self.centre, out=self.key[: self.width])
        return float(self.key.dot(self.theta))

    def add(self, row: np.ndarray, y: float, w: float) -> None:
        error = y - self.at(row)
        along = self.inverse.dot(self.key)
        spread = w * float(along.dot(self.key))
        self.growth *= 1 + spread
        share = math.sqrt(w / (1 + spread))
        along *= share
        self.inverse -= along[:, None] * along
        self.theta += along * (error * share)  # w times the new P k, which is the old P k / (1 + spread)


class Waiting:
    """Examples that came one by one after the examples of the sums `held`, and are not in the sums yet."""

    def __init__(self, held: Sums, alpha: Any, forgetting: Any, fit_intercept: Any) -> None:
        self.held, self.alpha, self.forgetting, self.fit_intercept = held, alpha, forgetting, fit_intercept
        self.recursion: Recursion | None = None
        self.rows: list[np.ndarray] = []
        self.targets: list[float] = []
        self.weights: list[float] = []
        self.names: list[Any] = list(range(held.width)) if held.names is None else held.names

    def parameters_are(self, alpha: Any, forgetting: Any, fit_intercept: Any) -> bool:
        return self.alpha is alpha and self.forgetting is forgetting and self.fit_intercept is fit_intercept

    def add(self, row: np.ndarray, y: float, w: float) -> None:
        self.rows.append(row)
        self.targets.append(y)
        self.weights.append(w)
        recursion = self.recursion
        if recursion is not None:
            recursion.add(row, y, w)
            if not recursion.growth < LARGEST_GROWTH:
                self.recursion = None

    def flushed(self, name: str) -> Sums:
        """Return the sums with the collected examples."""
        x, y, weights = (
            torch.from_numpy(np.array(each)).to(self.held.device) for each in (self.rows, self.targets, self.weights)
        )
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
