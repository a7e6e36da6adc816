"""Ridge regression that takes examples in and lets them go, with the methods of an estimator of scikit-learn."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .intention import RidgeState, empty_ridge, regularised_solve, remove_ridge, ridge_state
from .runtime.checks import kind_of, mismatch
from .runtime.constants import ILL_CONDITIONED, INFO_ILL_CONDITIONED, INFO_NOT_POSITIVE_DEFINITE, INFO_SOUND
from .runtime.dtypes import FLOATING, state_dtype

if TYPE_CHECKING:
    from typing import Self


class OnlineRidge:
    """Ridge regression that can add and remove examples.

    It minimises sum_i w_i |y_i - x_i' W - b|^2 + alpha |W|^2 over the examples that it holds. It keeps sums of products
    in float64. Their size does not depend on the number of examples read. `partial_fit` adds to the sums and `forget`
    subtracts from them. The result is then as if the forgotten examples were never seen, up to rounding. If rounding is
    large, `info_` says so.

    Args:
        alpha: the penalty, a number >= 0, or an array with one penalty for each of the E targets. The intercept b is
            not penalised.
        fit_intercept: False fixes b = 0. Then nothing is centred: where columns of X lie c times their spread from 0, an
            error of about 2e-16 c^2 remains in `coef_` (1e-8 for c = 1e4), and from c = 1e8 on there is no solution.
            With an intercept, c may be 1e10.
        forgetting: a factor from 0 (excluded) to 1. Each example of `partial_fit` multiplies the weights of all earlier
            examples by this factor. The result does not depend on how a stream is divided into calls. With 1 the
            weights do not fade.

    X is (N, D) and y is (N,) or (N, E). Results have the kind and the dtype of X. For a tensor they are a tensor on its
    device. For other inputs they are a NumPy array, float64 unless X has a smaller floating dtype. Predictions at a
    tensor carry its gradient; examples record no gradient. Every wrong argument raises a `ValueError` or `TypeError`
    that names the argument, and leaves the estimator unchanged. The class works as an estimator of scikit-learn:
    pipelines, searches and `sklearn.base.clone` accept it. All other uses work without scikit-learn.

    Attributes: `coef_`, (D,) or (E, D); `intercept_`, a number or (E,); `n_features_in_`, D; `feature_names_in_`, the
    columns of the data frame with the first examples (later data frames must have the same columns in the same order);
    `n_samples_seen_`, the number of examples held; `info_`, 0 for a sound solution, otherwise a code as in
    `cmab_kernels.RidgeSolution`.

    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> model = cmab_kernels.OnlineRidge(alpha=0.1)
    >>> for rows in range(0, 100, 20):
    ...     _ = model.partial_fit(x[rows : rows + 20], y[rows : rows + 20])
    >>> _ = model.forget(x[:50], y[:50])
    >>> anew = cmab_kernels.OnlineRidge(alpha=0.1).fit(x[50:], y[50:])
    >>> torch.allclose(model.predict(x), anew.predict(x), atol=1e-5), model.n_samples_seen_
    (True, 50)
    """

    def __init__(self, alpha: Any = 1.0, *, fit_intercept: bool = True, forgetting: float = 1.0) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.forgetting = forgetting

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Forget all examples, and hold these.

        `sample_weight` is (N,) >= 0. A number is the weight of each example, and None means 1.
        """
        return self._hold(X, y, sample_weight, None)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Hold these examples too, in time O(N D (D + E)), for any number of examples held before.

        In a stream, the examples come oldest first.
        """
        return self._hold(X, y, sample_weight, self._held())

    @torch.no_grad()
    def forget(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Remove these examples. The estimator must hold them, with the same weights.

        An estimator that holds no example afterwards behaves as if it was never fitted. With a `forgetting` below 1 the
        method raises a `ValueError`, because the weights of the held examples have changed.
        """
        held = self._fitted()
        self._check_parameters()
        if self.forgetting != 1:
            raise ValueError(mismatch("forgetting", self.forgetting, "1, as only then do examples keep the weights to subtract"))
        rows = _Rows(self, X, y, sample_weight, held)
        if len(rows.x) > self.n_samples_seen_:
            raise ValueError(mismatch("X", f"{len(rows.x)} rows", f"at most {self.n_samples_seen_}, the examples held"))
        left = held.with_state(remove_ridge(held.state, *rows.operands(held), weights=rows.weights))
        self._sums = left if int(left.state.count) else None
        return self

    def predict(self, X: Any) -> Any:
        """Return the predictions (N,) or (N, E) at X (N, D)."""
        held = self._fitted()
        points = _points(self, X, held)
        out = held.solved(self).at(points)
        return _cast(out.squeeze(1) if held.flat else out, _result_dtype(X))

    @torch.no_grad()
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return R^2, averaged over the E targets.

        R^2 is 1 - (sum of squared errors) / (sum of squared distances from the mean).
        """
        held = self._fitted()
        rows = _Rows(self, X, y, sample_weight, held)
        if rows.weights is not None and not rows.weights.any():
            raise ValueError(mismatch("sample_weight", "0 throughout", "a number above 0 for one example at least"))
        y_ = rows.y.double()
        weights = y_.new_ones(len(y_), 1) if rows.weights is None else rows.weights[0, :, None]
        errors = y_ - held.solved(self).at(rows.x).double()
        spread = y_ - (weights * y_).sum(0) / weights.sum()
        error, total = (weights * errors.square()).sum(0), (weights * spread.square()).sum(0)
        none = (error != 0).double()  # where all targets are equal: 1 for predictions without error, else 0
        return float((1 - torch.where(total == 0, none, error / total)).mean())

    @property
    def coef_(self) -> Any:
        """(D,), or (E, D) where y had two dimensions."""
        held = self._fitted()
        coefficients = held.solved(self).weight.T.clone()  # the caller may scale it
        return _cast(coefficients[0] if held.flat else coefficients, held.dtype)

    @property
    def intercept_(self) -> Any:
        """A number, or (E,) where y had two dimensions."""
        held = self._fitted()
        intercept = held.solved(self).intercept
        return _cast(intercept[0] if held.flat else intercept, held.dtype)

    @property
    def info_(self) -> int:
        """0 for a sound solution, 1 for no solution, 2 for an ill-conditioned solution or sums with two digits at most.

        Sums lose digits if examples, held or forgotten, lie too far from the first examples, or if no weight is left.
        """
        return self._fitted().solved(self, sound=False).info

    @property
    def feature_names_in_(self) -> Any:
        """The column names of the data frame with the first examples, (D,); `AttributeError` if they had no names."""
        names = self._fitted().names
        if names is None:
            raise AttributeError("the first examples had no names of columns")
        import numpy as np

        return np.array(names, dtype=object)

    @property
    def n_samples_seen_(self) -> int:
        """The number of examples held."""
        return int(self._fitted().state.count)

    @torch.no_grad()
    def _hold(self, X: Any, y: Any, sample_weight: Any, held: _Sums | None) -> Self:
        """Add examples to the sums `held`; None stands for the sums of no examples."""
        self._check_parameters()
        rows = _Rows(self, X, y, sample_weight, held)
        _penalties(self.alpha, rows.y.shape[1])
        if held is None:
            if rows.weights is not None and not rows.weights.any():
                raise ValueError(
                    mismatch("sample_weight", "zero for all examples", "a number above 0 for one of the first examples at least")
                )
            held = _Sums.of_none(rows, X, bool(self.fit_intercept))
        elif held.intercept != bool(self.fit_intercept):
            allowed = f"{held.intercept}, as for the examples so far; change it before `fit`, which starts anew"
            raise ValueError(mismatch("fit_intercept", repr(self.fit_intercept), allowed))
        weights, state, number = rows.weights, held.state, len(rows.x)
        forgetting = float(self.forgetting)  # powers of a small NumPy float would keep few digits
        faded = forgetting**number
        if forgetting != 1:
            ages = torch.arange(number - 1, -1, -1, dtype=torch.float64, device=rows.x.device)
            fading = forgetting**ages
            weights = fading[None] if weights is None else fading * weights
            state = RidgeState(state.gram * faded, state.moment * faded, state.count)
        self._sums = held.with_state(ridge_state(*rows.operands(held), weights=weights, state=state), faded)
        self.n_features_in_ = rows.x.shape[1]
        return self

    def _check_parameters(self) -> None:
        _penalties(self.alpha)
        if not isinstance(self.forgetting, Real) or not 0 < self.forgetting <= 1:
            raise ValueError(mismatch("forgetting", repr(self.forgetting), "a number above 0 and at most 1"))
        if getattr(self.fit_intercept, "shape", ()) or self.fit_intercept not in (True, False):
            raise ValueError(mismatch("fit_intercept", repr(self.fit_intercept), "True or False"))

    def _held(self) -> _Sums | None:
        held: _Sums | None = getattr(self, "_sums", None)
        return held

    def _fitted(self) -> _Sums:
        """Return the sums held. If there are none, raise `NotFittedError`, or `AttributeError` without scikit-learn."""
        held = self._held()
        if held is None:
            try:
                from sklearn.exceptions import NotFittedError as error
            except ImportError:
                error = AttributeError
            raise error("OnlineRidge holds no example; call fit or partial_fit first")
        return held

    # ---- the interface of an estimator of scikit-learn

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor. An unknown name raises a `ValueError`."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"Invalid parameter {name!r} for estimator {self!r}. Valid parameters are: {sorted(known)!r}.")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        changed = (f"{name}={value!r}" for name, value in self.get_params().items() if not _is(value, defaults[name].default))
        return f"{type(self).__name__}({', '.join(changed)})"

    def __sklearn_is_fitted__(self) -> bool:
        return self._held() is not None

    def get_metadata_routing(self) -> Any:
        """Return a `MetadataRequest` of scikit-learn that says which methods ask for `sample_weight`.

        scikit-learn uses it for metadata routing.
        """
        from sklearn.utils.metadata_routing import MetadataRequest

        request = getattr(self, "_metadata_request", None)  # scikit-learn's name: `clone` copies this attribute
        if request is None:
            request = MetadataRequest(owner=type(self).__name__)
            for method in ("fit", "partial_fit", "score"):
                getattr(request, method).add_request(param="sample_weight", alias=None)
        return copy.deepcopy(request)

    def set_fit_request(self, *, sample_weight: bool | str | None) -> Self:
        """Say whether a search or a pipeline passes `sample_weight` to `fit`.

        True or False says so directly. None makes a given weight an error. A string is another name of the weight.
        """
        return self._ask("fit", sample_weight)

    def set_partial_fit_request(self, *, sample_weight: bool | str | None) -> Self:
        """Do what `set_fit_request` does for `partial_fit`."""
        return self._ask("partial_fit", sample_weight)

    def set_score_request(self, *, sample_weight: bool | str | None) -> Self:
        """Do what `set_fit_request` does for `score`."""
        return self._ask("score", sample_weight)

    def _ask(self, method: str, sample_weight: bool | str | None) -> Self:
        request = self.get_metadata_routing()
        getattr(request, method).add_request(param="sample_weight", alias=sample_weight)
        self._metadata_request = request
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import RegressorTags, Tags, TargetTags

        target = TargetTags(required=True, multi_output=True)
        return Tags(estimator_type="regressor", target_tags=target, regressor_tags=RegressorTags())


class _Solution(NamedTuple):
    """The function offset + (x - centre) weight of a point x, in float64. The centre avoids cancellation.

    Its parts require no gradient.
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


class _Sums:
    """The examples held, as the sums of a ridge regression of y - `target_origin` on x - `origin`.

    For an intercept, x has an additional column of ones. The origins are close to the means of the first examples,
    compared with their spread, so that data far from 0 lose no digits. `peak` is the largest absolute value that the
    diagonal of the sums ever had, faded like the sums: rounding errors of that size stay in the sums. The solution is
    kept until the sums change.
    """

    def __init__(
        self,
        state: RidgeState,
        peak: Tensor,
        origin: Tensor,
        target_origin: Tensor,
        intercept: bool,
        flat: bool,
        dtype: Any,
        names: list[str] | None,
    ) -> None:
        self.state, self.peak, self.origin, self.target_origin = state, peak, origin, target_origin
        self.intercept, self.flat, self.dtype, self.names = intercept, flat, dtype, names
        self._solution: tuple[tuple[float, ...], _Solution] | None = None

    @classmethod
    def of_none(cls, rows: _Rows, given: Any, intercept: bool) -> _Sums:
        """Return the sums of no examples, with the origins, kind and dtype of the first examples."""
        width, outputs = rows.x.shape[1], rows.y.shape[1]
        counted = slice(None) if rows.weights is None else rows.weights[0] > 0  # a row of weight 0 may hold padding
        origin, target_origin = (intercept * _origin(t[counted].double()) for t in (rows.x, rows.y))
        state = empty_ridge(1, 1, width + intercept, outputs, device=rows.x.device)
        return cls(state, _diagonal(state.gram), origin, target_origin, intercept, rows.flat, _result_dtype(given), _names(given))

    def with_state(self, state: RidgeState, faded: float = 1.0) -> _Sums:
        """Return these sums after a change to `state`, in which earlier weights were multiplied by `faded`."""
        peak = torch.maximum(self.peak if faded == 1 else faded * self.peak, _diagonal(state.gram).abs())
        return _Sums(state, peak, self.origin, self.target_origin, self.intercept, self.flat, self.dtype, self.names)

    def solved(self, model: OnlineRidge, sound: bool = True) -> _Solution:
        """Return the solution with the penalty of the model.

        With `sound`, an ill-conditioned solution gives a warning, and a missing solution raises an error.
        """
        penalties = _penalties(model.alpha, self.state.moment.shape[-1])
        if self._solution is None or self._solution[0] != penalties:
            model._check_parameters()
            with torch.inference_mode(False):  # kept for later calls, which may record a gradient
                self._solution = penalties, self._solve(penalties)
        solution = self._solution[1]
        if sound and solution.info == INFO_NOT_POSITIVE_DEFINITE:
            allowed = "a number > 0 for these examples, which do not determine the coefficients"
            if min(penalties) > 0:
                allowed = (
                    "examples that have a solution; their numbers are too large, or some were forgotten that were not held, "
                    "or that were far from the others"
                )
            raise ValueError(mismatch("alpha", model.alpha, allowed))
        if sound and solution.info == INFO_ILL_CONDITIONED:
            warnings.warn(
                f"alpha: got {model.alpha}, with which the regression is ill-conditioned; few digits may be right",
                RuntimeWarning,
                stacklevel=4,
            )
        return solution

    def _solve(self, penalties: tuple[float, ...]) -> _Solution:
        gram, moment, peak = (_quick(sums)[0, 0] for sums in (self.state.gram, self.state.moment, self.peak))
        origin, target_origin, least, known = _quick(self.origin), _quick(self.target_origin), _LOST * peak, True
        if self.intercept:
            total, x_sum, y_sum = gram[-1, -1], gram[-1, :-1], moment[-1]
            known = bool(total > least[-1])
            x_mean, y_mean = (sums / total if known else sums * 0.0 for sums in (x_sum, y_sum))
            origin, target_origin, least = origin + x_mean, target_origin + y_mean, least[:-1]
            gram, moment = gram[:-1, :-1] - x_mean[:, None] * x_sum, moment[:-1] - x_mean[:, None] * y_sum
        weight, info = _solved_each(_as_tensor(gram)[None], _as_tensor(moment)[None], penalties, least)
        return _Solution(weight, _as_tensor(origin), _as_tensor(target_origin), info if known else _doubted(info))


def _quick(sums: Tensor) -> Any:
    """Return sums on a CPU as a NumPy array in the same memory.

    For so few numbers NumPy's operators take a quarter of the time of torch's.
    """
    return sums.numpy() if sums.device.type == "cpu" else sums


def _as_tensor(quick: Any) -> Tensor:
    return quick if isinstance(quick, Tensor) else torch.from_numpy(quick)


_LOST = torch.finfo(torch.float64).eps / ILL_CONDITIONED
"""A number below this share of a sum has two digits at most."""


def _penalties(alpha: Any, targets: int | None = None) -> tuple[float, ...]:
    """Return the penalties: one for all targets, or one for each target.

    Raise unless they are numbers >= 0 and there are one or `targets` of them.
    """
    try:
        given = [float(each) for each in ([alpha] if isinstance(alpha, Real) or getattr(alpha, "ndim", 1) == 0 else alpha)]
    except (TypeError, ValueError, OverflowError):
        given = []
    if not given or isinstance(alpha, (str, bytes)) or not all(0 <= each < math.inf for each in given):
        raise ValueError(mismatch("alpha", repr(alpha), "a number >= 0, or an array with one for each target"))
    if targets is not None and len(given) not in (1, targets):
        raise ValueError(mismatch("alpha", f"{len(given)} penalties", f"one, or one for each target of y, {targets}"))
    return tuple(given) if len(set(given)) > 1 else (given[0],)


def _is(value: Any, default: Any) -> bool:
    """Return whether a parameter equals its default. An array never does."""
    return not getattr(value, "shape", ()) and bool(value == default)


def _solved_each(gram: Tensor, moment: Tensor, penalties: tuple[float, ...], least: Any) -> tuple[Tensor, int]:
    """Return what `_solved` returns, for one penalty or one per target. The info is the worst of all targets."""
    if len(penalties) == 1:
        return _solved(gram, moment, penalties[0], least)
    weight, infos = gram.new_empty(moment.shape[1:]), set()
    for alpha in set(penalties):
        columns = [i for i, each in enumerate(penalties) if each == alpha]
        weight[:, columns], info = _solved(gram, moment[:, :, columns], alpha, least)
        infos.add(info)
    return weight, next(info for info in (INFO_NOT_POSITIVE_DEFINITE, INFO_ILL_CONDITIONED, INFO_SOUND) if info in infos)


def _solved(gram: Tensor, moment: Tensor, alpha: float, least: Any) -> tuple[Tensor, int]:
    """Return the weight (D, E) for sums (1, D, D) and (1, D, E), and its info.

    The info says ill-conditioned if the other features leave less than `least` (D,) of some feature. A large alpha
    alone leaves more, and then there is no such check.
    """
    outputs, small = moment.shape[-1], alpha < 2 * float(least.max())
    if small:
        moment = torch.cat([moment, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)[None]], -1)
    both, found = regularised_solve(gram, moment, alpha)
    weight, info = both[0, :, :outputs], int(found)
    if not all(math.isfinite(extreme) for extreme in weight.aminmax()):
        return weight, INFO_NOT_POSITIVE_DEFINITE
    if small and bool((least * _quick(both)[0, :, outputs:].diagonal() > 1).any()):
        return weight, _doubted(info)
    return weight, info


def _doubted(info: int) -> int:
    return INFO_ILL_CONDITIONED if info == INFO_SOUND else info


def _diagonal(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1)


def _origin(rows: Tensor) -> Tensor:
    """Return the means (C,) of rows (N, C), rounded to a multiple of a power of two below the spread.

    Differences of numbers with few bits then have few bits too.
    """
    spread, mean = rows.std(0, correction=0), rows.mean(0)
    step = torch.ldexp(torch.ones_like(spread), spread.frexp().exponent - 1)
    return torch.where(spread > 0, (mean / step).round() * step, mean).nan_to_num(0.0, 0.0, 0.0)


class _Rows:
    """Examples as tensors: x (N, D), y (N, E) and weights (1, N) or None; `flat` where y was (N,)."""

    def __init__(self, model: OnlineRidge, X: Any, y: Any, sample_weight: Any, held: _Sums | None) -> None:
        if y is None:
            raise ValueError(f"{type(model).__name__} requires y to be passed, but the target y is None")
        self.x = _points(model, X, held)
        targets = _tensor("y", y, self.x.device)
        self.flat = targets.dim() == 1
        if targets.dim() not in (1, 2) or len(targets) != len(self.x) or targets.shape[-1] == 0 < len(targets):
            raise ValueError(
                mismatch(
                    "y", f"shape {tuple(targets.shape)}", f"(N,) or (N, E) with N = {len(self.x)} and E >= 1, as X has {len(self.x)} rows"
                )
            )
        self.y = targets[:, None] if self.flat else targets
        if held is not None and (self.flat, self.y.shape[1]) != (held.flat, held.state.moment.shape[3]):
            wanted = "(N,)" if held.flat else f"(N, {held.state.moment.shape[3]})"
            raise ValueError(mismatch("y", f"shape {tuple(targets.shape)}", f"{wanted}, as in the examples before"))
        self.weights: Tensor | None = None
        if sample_weight is not None:
            if isinstance(sample_weight, Real):
                sample_weight = torch.full((len(self.x),), float(sample_weight), dtype=torch.float64, device=self.x.device)
            weights = _tensor("sample_weight", sample_weight, self.x.device)
            if weights.shape != (len(self.x),):
                raise ValueError(mismatch("sample_weight", f"shape {tuple(weights.shape)}", f"({len(self.x)},), one for each row"))
            if (weights < 0).any():
                raise ValueError(mismatch("sample_weight", "a negative element", "numbers >= 0"))
            self.weights = weights[None].double()

    def operands(self, held: _Sums) -> tuple[Tensor, Tensor]:
        """Return key (1, 1, N, D [+ 1]) and value (1, 1, N, E) of these examples for the sums `held`.

        They are float64, so that an example of any dtype is forgotten exactly.
        """
        rows, width = self.x.shape
        key = held.origin.new_ones(1, 1, rows, width + held.intercept)
        torch.sub(self.x, held.origin, out=key[0, 0, :, :width])
        return key, (self.y - held.target_origin).view(1, 1, rows, -1)


def _points(model: OnlineRidge, X: Any, held: _Sums | None) -> Tensor:
    """Return X as a tensor (N, D) on the device of the sums `held`. Raise if X has another form or width.

    Some messages have the wording that scikit-learn's estimator checks expect.
    """
    points = _tensor("X", X, held.state.gram.device if held is not None else None)
    if points.dim() != 2:
        shown = f"shape {tuple(points.shape)}"
        raise ValueError(mismatch("X", shown, "(N, D); Reshape your data: X.reshape(-1, 1) for one feature, X.reshape(1, -1) for one row"))
    for axis, name in enumerate(("sample", "feature")):
        if points.shape[axis] == 0:
            raise ValueError(f"Found array X with 0 {name}(s) (shape={tuple(points.shape)}) while a minimum of 1 is required.")
    names = _names(X)
    if held is not None and None not in (names, held.names) and names != held.names:
        raise ValueError(f"The feature names should match those that were passed during fit: {names} were given, not {held.names}")
    if held is not None and points.shape[1] != held.origin.shape[0]:
        raise ValueError(
            f"X has {points.shape[1]} features, but {type(model).__name__} is expecting {held.origin.shape[0]} features as input"
        )
    return points


def _tensor(name: str, given: Any, device: torch.device | None) -> Tensor:
    """Return finite numbers as a tensor: float32 for half types and float32, float64 for all other numbers."""
    if not isinstance(given, Tensor):
        return _array(name, given).to(device)
    if device is not None and given.device != device:
        raise ValueError(mismatch(name, f"device {given.device}", f"{device}, the device of the examples before or of X"))
    if given.is_nested or given.layout != torch.strided or given.is_meta:
        shown = "a nested tensor" if given.is_nested else given.layout
        raise TypeError(mismatch(name, f"{shown} on {given.device}", "a dense tensor with values"))
    if given.is_complex():
        raise ValueError(f"Complex data not supported: {name} is {given.dtype}")
    tensor = given.to(state_dtype(given.dtype) if given.dtype in FLOATING else torch.float64)
    if not tensor.isfinite().all():
        raise ValueError(_not_finite(name))
    return tensor


def _not_finite(name: str) -> str:
    return f"Input {name} contains infinity or NaN; every element must be finite"


def _array(name: str, given: Any) -> Tensor:
    """Return a sequence, an array or a table of numbers as a tensor on the CPU, with the dtypes of `_tensor`."""
    import numpy as np

    if hasattr(given, "tocsr"):
        raise TypeError(mismatch(name, "a sparse matrix", "a dense array; use toarray()"))
    if np.ma.is_masked(given):
        raise ValueError(mismatch(name, "an array with masked entries", "an array without; fill them in, or leave out their rows"))
    try:
        array = np.asarray(given)
        if array.dtype.kind in "mM":
            raise TypeError(f"{array.dtype} is not a number")
        if array.dtype.kind != "c":
            small = array.dtype.kind == "f" and array.dtype.itemsize in (2, 4)
            array = array.astype(np.float32 if small else np.float64, copy=False)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(mismatch(name, kind_of(given), f"an array of numbers; {error}")) from error
    if array.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: {name} is {array.dtype}")
    if not np.isfinite(array).all():
        raise ValueError(_not_finite(name))
    is_read = array.flags.c_contiguous and array.flags.writeable and min(array.strides, default=0) >= 0  # a reversed row is "contiguous"
    return torch.from_numpy(array if is_read else array.copy())


def _names(given: Any) -> list[str] | None:
    """Return the column names of a data frame, or None if there are none or not all are strings."""
    columns = getattr(given, "columns", None)
    names = None if columns is None else list(columns)
    return names if names and all(isinstance(name, str) for name in names) else None


def _result_dtype(given: Any) -> Any:
    """Return the dtype of results for an input: a floating dtype of torch for a tensor, of NumPy for other inputs."""
    if isinstance(given, Tensor):
        return given.dtype if given.is_floating_point() else torch.float64
    import numpy as np

    dtype: Any = getattr(given, "dtype", None)
    return dtype if getattr(dtype, "kind", "") == "f" and dtype.itemsize in (2, 4, 8) else np.dtype(np.float64)


def _cast(out: Tensor, dtype: Any) -> Any:
    """Return a tensor with a dtype of torch, or an array with a dtype of NumPy."""
    return out.to(dtype) if isinstance(dtype, torch.dtype) else out.detach().cpu().numpy().astype(dtype, copy=False)
