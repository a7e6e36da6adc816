"""The sums that represent the examples of a regression, and its solution."""

from __future__ import annotations

import copy
import math
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..intention import RidgeState, empty_ridge, merge_ridge, regularised_solve
from ..runtime.checks import mismatch
from ..runtime.constants import ILL_CONDITIONED, INFO_ILL_CONDITIONED, INFO_NOT_POSITIVE_DEFINITE, INFO_SOUND

if TYPE_CHECKING:
    from .rows import Rows

LOST = torch.finfo(torch.float64).eps / ILL_CONDITIONED
"""A number below this share of a sum has at most two correct digits."""


class Solution(NamedTuple):
    """The function offset + (x - centre) weight of a point x, in float64. The centre avoids cancellation.

    The parts of the function require no gradient.
    """

    weight: Tensor
    """(D, E)."""
    centre: Tensor
    """(D,)."""
    offset: Tensor
    """(E,)."""
    info: int
    """As in `cmab_kernels.RidgeSolution`."""

    def at(self, points: Tensor) -> Tensor:
        """Return the values (N, E) at points (N, D), in their dtype."""
        return torch.addmm(self.offset, points - self.centre, self.weight).to(points.dtype)

    @property
    def intercept(self) -> Tensor:
        """The value at x = 0, (E,)."""
        return self.offset - self.centre @ self.weight


class Centred(NamedTuple):
    """The sums about the means of the examples, or about 0 without an intercept; NumPy arrays on a CPU."""

    gram: Any
    """(D, D)."""
    moment: Any
    """(D, E)."""
    centre: Any
    """(D,)."""
    offset: Any
    """(E,)."""
    least: Any
    """(D,): a feature has at most two correct digits if the other features explain all but less
    than this."""
    known: bool
    """Whether the means are known: some weight is left."""


class Squares(NamedTuple):
    """The sums for the noise of the examples, which the state of a ridge regression does not have; NumPy arrays on a
    CPU."""

    sums: Any
    """(E,), sum w (y - target_origin)^2."""
    total: Any
    """A scalar, sum w."""
    peak: Any
    """(E,), the total that was ever added to `sums`, which bounds their rounding errors."""

    def changed(self, by: Squares, faded: float = 1.0) -> Squares:
        """Return these sums, multiplied by `faded`, with the given terms added to each."""
        return Squares(*(faded * mine + more for mine, more in zip(self, by, strict=True)))


class Factor:
    """P = (G + a I)^-1 = H H', H = D^-1 L'^-1, from the Cholesky factor L of the matrix that D scales to a diagonal of
    1. The scaling keeps the digits of features with very different scales, which eigenvectors of G would lose."""

    def __init__(self, gram: Tensor, penalty: float) -> None:
        with torch.inference_mode(False):
            system = gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            self.scale = system.diagonal().clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
            lower, info = torch.linalg.cholesky_ex(system / self.scale / self.scale[:, None])
            self.lower = lower.where(info == 0, math.nan)

    def halves(self, rows: Tensor) -> Tensor:
        """Return rows (N, D) times H."""
        scaled: Tensor = (rows / self.scale).to(self.lower)
        return torch.linalg.solve_triangular(self.lower, scaled.mT, upper=False).mT

    def inverse(self) -> Tensor:
        half = self.halves(torch.eye(len(self.scale), dtype=self.scale.dtype, device=self.scale.device))
        return half @ half.mT


class Sums:
    """The examples held, as the sums of a ridge regression of y - `target_origin` on x - `origin`.

    For an intercept, x has an additional column of ones. The origins are close to the means of the first examples,
    because sums far from the data lose digits. `peak` is the largest diagonal of the Gram matrix so far, which bounds
    the rounding errors of the sums. The object does not change after its construction. Results that are computed from
    it are kept.
    """

    # Attributes that pickles of earlier versions do not have.
    squares: Squares | None = None
    target_names: list[str] | None = None
    chosen: tuple[tuple[float, ...], float] | None = None
    """The penalties that `fit` compared by the leave-one-out error, and the best of them."""
    _solution: tuple[tuple[float, ...], Solution] | None = None
    _spectrum: tuple[Tensor, Tensor] | None = None

    def __init__(self, rows: Rows, intercept: bool) -> None:
        """Make the sums of no examples, with the origins, kind and names of the first examples."""
        x, y = rows.origins()
        self.origin, self.target_origin = intercept * x, intercept * y
        self.state = empty_ridge(1, 1, len(x) + intercept, len(y), device=y.device)
        self.peak = _diagonal(self.state.gram)
        none = quick(y) * 0.0
        self.squares = Squares(none, 0.0, none)
        self.intercept, self.flat, self.dtype = intercept, rows.flat, rows.dtype
        self.names, self.target_names = rows.names, rows.target_names

    def __getstate__(self) -> dict[str, Any]:
        """Leave out results that can be computed from the rest, so that copies have one size."""
        state = self.__dict__.copy()
        state.pop("_solution", None)
        state.pop("_spectrum", None)
        return state

    @property
    def device(self) -> torch.device:
        return self.state.gram.device

    @property
    def width(self) -> int:
        """D."""
        return int(self.origin.shape[0])

    @property
    def targets(self) -> int:
        """E."""
        return int(self.state.moment.shape[3])

    def _changed(
        self, state: RidgeState, squares: Squares | None, faded: float = 1.0, more: Tensor | None = None
    ) -> Sums:
        """Return sums with another state, in which earlier weights were multiplied by `faded`; `more` raises the
        peak."""
        sums = copy.copy(self)
        peak = self.peak if faded == 1 else faded * self.peak
        sums.peak = torch.maximum(peak if more is None else torch.maximum(peak, more), _diagonal(state.gram).abs())
        sums.state, sums.squares, sums.chosen = state, squares, None
        return sums

    def __copy__(self) -> Sums:
        sums = Sums.__new__(Sums)  # this takes a third of the time of copy.copy
        sums.__dict__.update(self.__getstate__())
        return sums

    def _faded(self, by: float) -> RidgeState:
        return self.state if by == 1 else RidgeState(self.state.gram * by, self.state.moment * by, self.state.count)

    def added(self, rows: Rows, forgetting: float = 1.0) -> Sums:
        """Return the sums including these examples. Each of them multiplies earlier weights by
        `forgetting`."""
        weights, faded = rows.faded(forgetting), forgetting ** len(rows)
        squares = None if self.squares is None else self.squares.changed(rows.squares(self, weights), faded)
        return self._changed(rows.added(self, self._faded(faded), weights), squares, faded)

    def removed(self, rows: Rows) -> Sums:
        """Return the sums without these examples."""
        squares = self.squares
        if squares is not None:
            gone = rows.squares(self, rows.weights)
            squares = squares.changed(Squares(-gone.sums, -gone.total, 0.0))
        return self._changed(rows.removed(self), squares)

    def merged(self, other: Sums, forgetting: float = 1.0) -> Sums:
        """Return the sums with the examples of `other`, which come after these."""
        faded = forgetting ** int(other.state.count)
        moved = other._about(self.origin, self.target_origin) if self.intercept else other
        squares = None
        if self.squares is not None and moved.squares is not None:
            squares = self.squares.changed(moved.squares, faded)
        sums = self._changed(merge_ridge(self._faded(faded), moved.state), squares, faded, moved.peak)
        sums.names, sums.target_names = self.names or other.names, self.target_names or other.target_names
        return sums

    def differences(self, other: Sums) -> list[tuple[str, Any, Any]]:
        """Return the properties that must agree for a merge, as tuples: the name, the value in
        these sums, and the value in the other sums."""
        named = [] if None in (self.names, other.names) else [("names of features", self.names, other.names)]
        if not self.flat and None not in (self.target_names, other.target_names):
            named.append(("names of targets", self.target_names, other.target_names))
        return [
            ("features", self.width, other.width),
            ("targets", self.targets, other.targets),
            ("dimensions of y", 2 - self.flat, 2 - other.flat),
            ("device", self.device, other.device),
            *named,
        ]

    def _about(self, origin: Tensor, target_origin: Tensor) -> Sums:
        """Return the same sums, which have a column of ones, relative to other origins."""
        shift, rise = self.origin - origin, self.target_origin - target_origin
        gram, moment = self.state.gram[0, 0], self.state.moment[0, 0]
        ones, y_sum = gram[:, -1:], moment[-1]
        move = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        move[:-1, -1] = shift
        moved, sums = move @ gram @ move.T, copy.copy(self)
        sums.state = RidgeState(
            ((moved + moved.T) / 2)[None, None], (move @ (moment + ones * rise))[None, None], self.state.count
        )
        if self.squares is not None:
            by, more = 2 * rise * y_sum + rise.square() * ones[-1], rise.abs() * ones[-1].clamp(min=0.0).sqrt()
            more = more * (2 * as_tensor(self.squares.peak).sqrt() + more)
            sums.squares = self.squares.changed(Squares(quick(by), 0.0, quick(more)))
        peak = self.peak[0, 0]
        sums.peak = torch.cat([(peak[:-1].sqrt() + shift.abs() * peak[-1].sqrt()).square(), peak[-1:]])[None, None]
        sums.origin, sums.target_origin = origin, target_origin
        return sums

    def centred(self) -> Centred:
        gram, moment, peak = (quick(sums)[0, 0] for sums in (self.state.gram, self.state.moment, self.peak))
        origin, target_origin, least, known = quick(self.origin), quick(self.target_origin), LOST * peak, True
        if self.intercept:
            total, x_sum, y_sum = gram[-1, -1], gram[-1, :-1], moment[-1]
            known = bool(total > least[-1])
            x_mean, y_mean = (sums / total if known else sums * 0.0 for sums in (x_sum, y_sum))
            origin, target_origin, least = origin + x_mean, target_origin + y_mean, least[:-1]
            gram, moment = gram[:-1, :-1] - x_mean[:, None] * x_sum, moment[:-1] - x_mean[:, None] * y_sum
        return Centred(gram, moment, origin, target_origin, least, known)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the eigenvalues (D,) >= 0 and eigenvectors (D, D) of the centred Gram matrix."""
        if self._spectrum is None:
            with torch.inference_mode(False):
                values, vectors = torch.linalg.eigh(as_tensor(self.centred().gram))
                self._spectrum = values.clamp(min=0.0), vectors
        return self._spectrum

    def factor(self, penalty: float) -> Factor:
        """Return a factor of the inverse of the centred Gram matrix with this penalty."""
        return Factor(as_tensor(self.centred().gram), penalty)

    def solved(self, penalties: tuple[float, ...], said: Any = None) -> Solution:
        """Return the solution with these penalties.

        With `said`, the alpha that messages name, an ill-conditioned solution gives a warning, and a missing solution
        raises an error.
        """
        if self._solution is None or self._solution[0] != penalties:
            with torch.inference_mode(False):  # kept for later calls, which may record a gradient
                self._solution = penalties, self._solve(penalties)
        solution = self._solution[1]
        if said is not None and solution.info == INFO_NOT_POSITIVE_DEFINITE:
            allowed = "a number > 0 for these examples, which do not determine the coefficients"
            if min(penalties) > 0:
                allowed = (
                    "examples that have a solution; numbers are too large, or forgotten examples were not held or "
                    "were far from the others"
                )
            raise ValueError(mismatch("alpha", said, allowed))
        if said is not None and solution.info == INFO_ILL_CONDITIONED:
            warnings.warn(
                f"alpha: got {said}, with which the regression is ill-conditioned; few digits may be right",
                RuntimeWarning,
                stacklevel=4,
            )
        return solution

    def _solve(self, penalties: tuple[float, ...]) -> Solution:
        gram, moment, centre, offset, least, known = self.centred()
        weight, info = _solved_each(as_tensor(gram)[None], as_tensor(moment)[None], penalties, least)
        return Solution(weight, as_tensor(centre), as_tensor(offset), info if known else _doubted(info))


def quick(sums: Tensor) -> Any:
    """Return sums on a CPU as a NumPy array in the same memory.

    For so few numbers NumPy's operators take a quarter of the time of torch's.
    """
    return sums.numpy() if sums.device.type == "cpu" else sums


def as_tensor(given: Any) -> Tensor:
    """Undo `quick`."""
    return given if isinstance(given, Tensor) else torch.from_numpy(given)


def penalties_of(alpha: Any, targets: int | None = None) -> tuple[float, ...]:
    """Return the penalties: one for all targets, or one for each target.

    Raise unless they are numbers >= 0 and there are one or `targets` of them.
    """
    expected = "a number >= 0, an array with one for each target, 'gcv' or 'loo'"
    given = numbers_of(alpha)
    if not given or not all(0 <= each < math.inf for each in given):
        raise ValueError(mismatch("alpha", repr(alpha), expected))
    if targets is not None and len(given) not in (1, targets):
        raise ValueError(mismatch("alpha", f"{len(given)} penalties", f"one, or one for each target of y, {targets}"))
    return tuple(given) if len(set(given)) > 1 else (given[0],)


def numbers_of(given: Any) -> list[float]:
    """Return a number, or the numbers of a sequence or an array with one dimension; the result is empty if they are not
    numbers."""
    dimensions = getattr(given, "ndim", 1)
    if isinstance(given, (str, bytes)) or dimensions > 1:
        return []
    try:
        return [float(each) for each in ([given] if isinstance(given, Real) or dimensions == 0 else given)]
    except (TypeError, ValueError, OverflowError):
        return []


def _solved_each(gram: Tensor, moment: Tensor, penalties: tuple[float, ...], least: Any) -> tuple[Tensor, int]:
    """Return the result of `_solved`, for one penalty or one per target. The info is the worst of all targets."""
    if len(penalties) == 1:
        return _solved(gram, moment, penalties[0], least)
    weight, infos = gram.new_empty(moment.shape[1:]), set()
    for alpha in set(penalties):
        columns = [i for i, each in enumerate(penalties) if each == alpha]
        weight[:, columns], info = _solved(gram, moment[:, :, columns], alpha, least)
        infos.add(info)
    return weight, next(
        info for info in (INFO_NOT_POSITIVE_DEFINITE, INFO_ILL_CONDITIONED, INFO_SOUND) if info in infos
    )


def _solved(gram: Tensor, moment: Tensor, alpha: float, least: Any) -> tuple[Tensor, int]:
    """Return the weight (D, E) for sums (1, D, D) and (1, D, E), and its info.

    The info is "ill-conditioned" if the other features explain all but less than `least` (D,) of
    some feature. A large alpha leaves more than `least` unexplained, so the check is then skipped.
    """
    outputs, small = moment.shape[-1], alpha < 2 * float(least.max())
    if small:
        moment = torch.cat([moment, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)[None]], -1)
    both, found = regularised_solve(gram, moment, alpha)
    weight, info = both[0, :, :outputs], int(found)
    if not all(math.isfinite(extreme) for extreme in weight.aminmax()):
        return weight, INFO_NOT_POSITIVE_DEFINITE
    if small and bool((least * quick(both)[0, :, outputs:].diagonal() > 1).any()):
        return weight, _doubted(info)
    return weight, info


def _doubted(info: int) -> int:
    return INFO_ILL_CONDITIONED if info == INFO_SOUND else info


def _diagonal(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1)
