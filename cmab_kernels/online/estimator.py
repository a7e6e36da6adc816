"""`OnlineRidge`."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..runtime.checks import kind_of, mismatch
from ..runtime.constants import INFO_SOUND
from .interface import Interface
from .posterior import Posterior, best_by_gcv, best_by_leave_one_out, grid_of, precisions_of
from .results import cast, framed, result_dtype
from .rows import Rows, dense_blocks, read_points
from .single import WAITING, Solved, Waiting, features_of, number
from .sums import Solution, Sums, penalties_of

if TYPE_CHECKING:
    from typing import Self


class OnlineRidge(Interface):
    """Ridge regression that can add, remove and merge examples.

    It minimises sum_i w_i |y_i - x_i' W - b|^2 + alpha |W|^2 over the examples that it holds. It
    keeps sums of products in float64. Their size does not depend on the number of examples read.
    `partial_fit` adds to the sums, `forget` subtracts from them, and `merge` adds those of another
    estimator. The result is then as if one `fit` had read the examples held, up to rounding.
    `info_` says if the products of features have lost their digits. It does not report lost digits
    in the products with targets. So call `fit` again after you have forgotten examples that were
    larger by many orders of magnitude.

    Args:
        alpha: the penalty, a number >= 0, or an array with one penalty for each of the E targets. The intercept b is
            not penalised. "gcv" chooses one of `alphas` by generalised cross-validation. The choice depends only on the
            sums, so it is made again whenever examples are added or removed. "loo" chooses as scikit-learn's `RidgeCV`
            does, by the leave-one-out error. This error needs every row under the final fit, but the sums hold no rows.
            So only `fit`, which has all rows, accepts "loo". The other methods that change examples then raise a
            `ValueError`.
        fit_intercept: False means b = 0. Then nothing is centred. If the distance of a column of X
            from 0 is c times its spread, an error of about 2e-16 c^2 remains in `coef_` (1e-8 for c
            = 1e4), and from c = 1e8 on there is no solution. With an intercept, c may be 1e10.
        forgetting: a factor from 0 (excluded) to 1. Each example of `partial_fit` multiplies the weights of all earlier
            examples by this factor. The result does not depend on how a stream is divided into calls. With 1 the
            weights do not fade.
        alphas: the penalties > 0 from which "gcv" and "loo" choose one, the same for all targets.
        noise_precision: one over the variance of the noise of an example of weight 1, for `predict(return_std=True)`
            and `sample_y`. It is a number > 0, or one number for each target. None means an estimate for each target,
            (n - gamma) / sum_i w_i (y_i - x_i' W - b)^2, with the sum of weights n, and gamma coefficients that the
            examples determine (gamma = tr(G (G + alpha I)^-1) for the centred Gram matrix G). `BayesianRidge` iterates
            to a fixed point of this formula.

    X is (N, D) and y is (N,) or (N, E). X may be a sparse matrix or array of SciPy; its sums are taken by sparse
    products. Results have the same kind and dtype as X. If X is a tensor, results are tensors on its device. If X is
    not a tensor, results are NumPy arrays, float64 unless X has a smaller floating dtype, or have the kind that
    `set_output` chose. Predictions at a tensor have its gradient; examples record no gradient. Every wrong argument
    raises a `ValueError` or `TypeError` that names the argument, and leaves the estimator unchanged. The class works as
    an estimator of scikit-learn: pipelines, searches and `sklearn.base.clone` accept it. Everything else works without
    scikit-learn.

    Attributes: `coef_`, (D,) or (E, D); `intercept_`, a number or (E,); `alpha_`, the penalty in use, a number or (E,);
    `n_features_in_`, D; `feature_names_in_`, the columns of the data frame with the first examples (later data frames
    must have the same columns in the same order); `n_samples_seen_`, the number of examples held; `info_`, 0 for a
    sound solution, otherwise a code as in `cmab_kernels.RidgeSolution`.

    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> model = cmab_kernels.OnlineRidge(alpha=0.1)
    >>> for rows in range(0, 100, 20):
    ...     _ = model.partial_fit(x[rows : rows + 20], y[rows : rows + 20])
    >>> _ = model.forget(x[:50], y[:50])
    >>> anew = cmab_kernels.OnlineRidge(alpha=0.1).fit(x[50:], y[50:])
    >>> torch.allclose(model.predict(x), anew.predict(x), atol=1e-5), model.n_samples_seen_
    (True, 50)
    """

    _sums: Sums | None = None
    _waiting: Waiting | None = None

    def __init__(
        self,
        alpha: Any = 1.0,
        *,
        fit_intercept: bool = True,
        forgetting: float = 1.0,
        alphas: Any = (0.1, 1.0, 10.0),
        noise_precision: Any = None,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.forgetting = forgetting
        self.alphas = alphas
        self.noise_precision = noise_precision

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Forget all examples, and hold these examples.

        `sample_weight` is (N,) >= 0. A number is the weight of each example, and None means 1.
        """
        return self._hold(X, y, sample_weight, None)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Hold these examples too. This takes time O(N D (D + E)), for any number of examples held before.

        In a stream, the examples come oldest first.
        """
        self._check_streamed()
        return self._hold(X, y, sample_weight, self._held())

    @torch.no_grad()
    def forget(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Remove these examples. The estimator must hold these examples, with the same weights.

        An estimator that holds no example afterwards behaves as if it was never fitted. With a `forgetting` below 1 the
        method raises a `ValueError`, because the weights of the held examples have changed.
        """
        held = self._fitted()
        self._check_parameters()
        self._check_streamed()
        if self.forgetting != 1:
            raise ValueError(
                mismatch(
                    "forgetting", self.forgetting, "1, because otherwise the weights of the held examples have changed"
                )
            )
        rows = Rows(type(self).__name__, X, y, sample_weight, held)
        if len(rows) > self.n_samples_seen_:
            raise ValueError(mismatch("X", f"{len(rows)} rows", f"at most {self.n_samples_seen_}, the examples held"))
        left = held.removed(rows)
        self._keep(left if int(left.state.count) else None)
        return self

    @torch.no_grad()
    def merge(self, other: OnlineRidge) -> Self:
        """Hold the examples of another estimator too, in time O(D^2 (D + E)). The other estimator does not change.

        If several workers have read the parts of a data set, their estimators merge into the result of one `fit` of the
        whole set, up to rounding. With a `forgetting` below 1, the examples of `other` come after those held. The
        penalty `alpha` of this estimator applies. If one of the two holds no example, the result is the other.

        Raises a `TypeError` if `other` is not an `OnlineRidge`. Raises a `ValueError` if the numbers of features or
        targets, the names of features, the device, `fit_intercept` or `forgetting` differ.

        >>> x, y = torch.randn(100, 3), torch.randn(100)
        >>> first = cmab_kernels.OnlineRidge().fit(x[:40], y[:40])
        >>> second = cmab_kernels.OnlineRidge().fit(x[40:], y[40:])
        >>> torch.allclose(first.merge(second).coef_, cmab_kernels.OnlineRidge().fit(x, y).coef_, atol=1e-5)
        True
        """
        if not isinstance(other, OnlineRidge):
            raise TypeError(mismatch("other", kind_of(other), "an OnlineRidge"))
        self._check_parameters()
        self._check_streamed()
        held, more = self._held(), other._held()
        if more is None:
            return self
        for name, ours, theirs in (
            ("fit_intercept", bool(self.fit_intercept) if held is None else held.intercept, more.intercept),
            ("forgetting", self.forgetting, other.forgetting),
            *(() if held is None else held.differences(more)),
        ):
            if ours != theirs:
                raise ValueError(
                    mismatch("other", f"{name} {theirs}", f"{ours}, as in the estimator that it is merged into")
                )
        self._check_parameters(more.targets)
        self._keep(more if held is None else held.merged(more, float(self.forgetting)))
        self.n_features_in_ = more.width
        return self

    def learn_one(self, x: Any, y: Any, w: float = 1.0) -> None:
        """Hold one more example of weight w. The method has the interface of the package river, and is faster than
        `partial_fit`.

        x is a dict of features, or a sequence (D,). The first dict gives the names of the features and their order. In
        a later dict, a missing feature means 0, and an unknown feature raises a `ValueError`. y is a number, because
        this method has one target. Up to 128 examples are collected before they are added to the sums; all other
        methods add the collected examples first.

        >>> model = cmab_kernels.OnlineRidge()
        >>> for x, y in (({"a": 1.0, "b": 2.0}, 3.0), ({"a": 2.0, "b": 0.0}, 2.0)):
        ...     guess = model.predict_one(x)
        ...     model.learn_one(x, y)
        >>> guess, model.n_samples_seen_, model.feature_names_in_.tolist()
        (3.0, 2, ['a', 'b'])
        """
        y, w = number("y", y), number("w", w)
        if w < 0:
            raise ValueError(mismatch("w", w, "a number >= 0"))
        self._check_streamed()
        waiting = self._one_by_one()
        if waiting is None:
            names, row = features_of(x)
            self._hold(row[None], [y], [w], None, names)
            return
        self._check_intercept(waiting.held)
        waiting.add(waiting.row(x), y, w)
        if len(waiting) == WAITING:
            self._held()

    def predict_one(self, x: Any) -> float:
        """Return the prediction at one example, a dict or a sequence as in `learn_one`; 0.0 before the first example.

        Between two calls of other methods, rank-one updates change the solution, in time O(D^2) for each example. The
        solution is recomputed from the sums after 128 examples, and earlier if more than four digits could be lost. So
        it stays within 1e-9 of the result of `predict`, unless the regression is ill-conditioned: both then lose
        digits. With a `forgetting` below 1, an alpha that is not a number, or a solution that is not sound, it is
        recomputed for each example, as in `predict`.
        """
        waiting = self._one_by_one()
        if waiting is None:
            return 0.0
        row, found = waiting.row(x), waiting.solution
        if found is None:
            held = self._fitted()
            solution = self._solved(held)
            if self.forgetting != 1 or not isinstance(self.alpha, Real) or solution.info != INFO_SOUND:
                return float(solution.at(torch.from_numpy(row).to(held.device)[None]))
            found = Solved.of(held, solution, float(self.alpha))
            self._waiting = Waiting(held, self.alpha, self.forgetting, self.fit_intercept, found)
        return found.at(row)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predictions (N,) or (N, E) at X (N, D).

        With `return_std`, also return the standard deviations of the targets around the predictions, in the same shape.
        Each is the root of (1 + (x - m)' (G + alpha I)^-1 (x - m)) / noise_precision, with the mean m of the examples
        and the centred Gram matrix G. They equal the standard deviations of scikit-learn's `BayesianRidge` with the
        precisions `alpha_` = noise_precision and `lambda_` = alpha * noise_precision.

        >>> x = torch.randn(50, 3)
        >>> mean, std = cmab_kernels.OnlineRidge(noise_precision=4.0).fit(x, x.sum(1)).predict(x, return_std=True)
        >>> mean.shape, (std > 0.5).all()
        (torch.Size([50]), tensor(True))
        """
        held = self._fitted()
        points = read_points(type(self).__name__, X, held)
        solution = self._solved(held)
        mean = self._returned(_joined(solution.at(each) for each in dense_blocks(points, held.device)), X, held)
        if not return_std:
            return mean
        posterior = self._posterior(held, solution)
        return mean, self._returned(
            _joined(posterior.deviation(each) for each in dense_blocks(points, held.device)), X, held
        )

    @torch.no_grad()
    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Any:
        """Return joint draws of the targets at X (N, D), noise included: (N, n_samples), or (N, E, n_samples).

        Each draw takes coefficients from their distribution, given the examples, and adds noise; `predict` with
        `return_std` returns the means and standard deviations of the draws. `random_state` is an int, a `RandomState`
        or a `Generator` of NumPy, or None for a new one. The name, arguments and shapes are those of scikit-learn's
        `GaussianProcessRegressor`.

        >>> x = torch.randn(50, 3)
        >>> cmab_kernels.OnlineRidge().fit(x, x.sum(1) + torch.randn(50)).sample_y(x, n_samples=4).shape
        torch.Size([50, 4])
        """
        import numpy as np

        if isinstance(n_samples, bool) or not isinstance(n_samples, (int, np.integer)) or n_samples < 1:
            raise ValueError(mismatch("n_samples", repr(n_samples), "an int >= 1"))
        if random_state is None or isinstance(random_state, (int, np.integer)):
            try:
                random_state = np.random.default_rng(random_state)
            except ValueError as error:
                raise ValueError(mismatch("random_state", random_state, "an int >= 0")) from error
        if not isinstance(random_state, (np.random.Generator, np.random.RandomState)):
            raise TypeError(
                mismatch("random_state", kind_of(random_state), "None, an int, a RandomState or a Generator of NumPy")
            )
        held = self._fitted()
        points = read_points(type(self).__name__, X, held)
        posterior = self._posterior(held, self._solved(held))
        points = _joined(dense_blocks(points, held.device))
        out = posterior.sample(points, int(n_samples), random_state.standard_normal)
        return cast(out[:, 0] if held.flat else out, result_dtype(X))

    @torch.no_grad()
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return R^2, averaged over the E targets.

        R^2 is 1 - (sum of squared errors) / (sum of squared distances from the mean).
        """
        held = self._fitted()
        rows = Rows(type(self).__name__, X, y, sample_weight, held)
        if rows.weights is not None and not rows.weights.any():
            raise ValueError(mismatch("sample_weight", "0 throughout", "a number above 0 for one example at least"))
        y_ = rows.y.double()
        weights = y_.new_ones(len(y_), 1) if rows.weights is None else rows.weights[0, :, None]
        solution = self._solved(held)
        errors = y_ - _joined(solution.at(each) for each, _ in rows.blocks()).double()
        spread = y_ - (weights * y_).sum(0) / weights.sum()
        error, total = (weights * errors.square()).sum(0), (weights * spread.square()).sum(0)
        none = (
            error != 0
        ).double()  # if all targets are equal, the score is 1 for predictions without error, and otherwise 0
        return float((1 - torch.where(total == 0, none, error / total)).mean())

    @property
    def coef_(self) -> Any:
        """(D,), or (E, D) where y had two dimensions."""
        held = self._fitted()
        coefficients = self._solved(held).weight.T.clone()  # the caller may change the copy
        return cast(coefficients[0] if held.flat else coefficients, held.dtype)

    @property
    def intercept_(self) -> Any:
        """A number, or (E,) where y had two dimensions."""
        held = self._fitted()
        intercept = self._solved(held).intercept
        return cast(intercept[0] if held.flat else intercept, held.dtype)

    @property
    def alpha_(self) -> Any:
        """The penalty in use, a number, or (E,) where targets have different penalties."""
        import numpy as np

        penalties = self._penalties(self._fitted())
        return penalties[0] if len(penalties) == 1 else np.array(penalties)

    @property
    def info_(self) -> int:
        """0 for a sound solution, 1 for no solution, 2 for an ill-conditioned solution or sums with
        at most two correct digits.

        Sums lose digits if examples, held or forgotten, are too far from the first examples, or if no weight is left.
        """
        held = self._fitted()
        return held.solved(self._penalties(held)).info

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
    def _hold(self, X: Any, y: Any, sample_weight: Any, held: Sums | None, names: list[str] | None = None) -> Self:
        """Add examples to the sums `held`. None means the sums of no examples; their features get these names."""
        rows = Rows(type(self).__name__, X, y, sample_weight, held)
        self._check_parameters(rows.y.shape[1])
        if held is None:
            if rows.weights is not None and not rows.weights.any():
                raise ValueError(
                    mismatch(
                        "sample_weight",
                        "zero for all examples",
                        "a number above 0 for one of the first examples at least",
                    )
                )
            rows.names = rows.names or names
            held = Sums(rows, bool(self.fit_intercept))
        else:
            self._check_intercept(held)
        forgetting = float(self.forgetting)  # powers of a small NumPy float would keep few digits
        sums = held.added(rows, forgetting)
        if isinstance(self.alpha, str) and self.alpha == "loo":
            grid = grid_of(self.alphas)
            sums.chosen = grid, best_by_leave_one_out(sums, rows, rows.faded(forgetting), grid)
        self._keep(sums)
        self.n_features_in_ = held.width
        return self

    def _check_parameters(self, targets: int | None = None) -> None:
        if isinstance(self.alpha, str) and self.alpha in ("gcv", "loo"):
            grid_of(self.alphas)
        else:
            penalties_of(self.alpha, targets)
        if not isinstance(self.forgetting, Real) or not 0 < self.forgetting <= 1:
            raise ValueError(mismatch("forgetting", repr(self.forgetting), "a number above 0 and at most 1"))
        if getattr(self.fit_intercept, "shape", ()) or self.fit_intercept not in (True, False):
            raise ValueError(mismatch("fit_intercept", repr(self.fit_intercept), "True or False"))
        if self.noise_precision is not None:
            precisions_of(self.noise_precision, targets)

    def _check_streamed(self) -> None:
        """Raise an error if a method other than `fit` cannot change the examples, because `alpha` needs all rows."""
        if isinstance(self.alpha, str) and self.alpha == "loo":
            allowed = (
                "'gcv', which needs only the sums, or a number; leave-one-out needs all rows, which only `fit` has"
            )
            raise ValueError(mismatch("alpha", "'loo'", allowed))

    def _check_intercept(self, held: Sums) -> None:
        if held.intercept != self.fit_intercept:
            allowed = f"{held.intercept}, as for the earlier examples; change it before `fit`, which forgets them"
            raise ValueError(mismatch("fit_intercept", repr(self.fit_intercept), allowed))

    def _penalties(self, held: Sums) -> tuple[float, ...]:
        """Return the penalties in use, one for all targets or one for each."""
        if not isinstance(self.alpha, str) or self.alpha not in ("gcv", "loo"):
            return penalties_of(self.alpha, held.targets)
        grid = grid_of(self.alphas)
        if self.alpha == "gcv":
            return (best_by_gcv(held, grid),)
        if held.chosen is None or held.chosen[0] != grid:
            allowed = "'gcv' or a number; 'loo' needs a `fit` of all examples with this alpha and the same alphas"
            raise ValueError(mismatch("alpha", "'loo'", allowed))
        return (held.chosen[1],)

    def _solved(self, held: Sums) -> Solution:
        return held.solved(self._penalties(held), self.alpha)

    def _posterior(self, held: Sums, solution: Solution) -> Posterior:
        return Posterior(held, solution, self._penalties(held), self.noise_precision)

    def _returned(self, out: Tensor, given: Any, held: Sums) -> Any:
        """Return predictions (N, E) for the points that were given."""
        out = out[:, 0] if held.flat else out
        package = getattr(self, "_sklearn_output_config", {}).get("transform", "default")
        return (
            cast(out, result_dtype(given)) if package == "default" else framed(out, package, held.target_names, given)
        )

    @torch.no_grad()
    def _held(self) -> Sums | None:
        """Return the sums of all examples, including the collected examples."""
        waiting = self._waiting
        if waiting is not None and len(waiting):
            self._keep(waiting.flushed(type(self).__name__))
        return self._sums

    def _keep(self, sums: Sums | None) -> None:
        self._sums, self._waiting = sums, None

    def _one_by_one(self) -> Waiting | None:
        """Return the object in which `learn_one` collects examples, or None if no example is held."""
        waiting = self._waiting
        if waiting is not None and waiting.parameters_are(self.alpha, self.forgetting, self.fit_intercept):
            return waiting
        held = self._held()
        self._check_parameters(None if held is None else held.targets)
        if held is None:
            return None
        if not held.flat:
            raise ValueError(
                mismatch("y", f"one number after examples with y (N, {held.targets})", "earlier examples with y (N,)")
            )
        self._waiting = Waiting(held, self.alpha, self.forgetting, self.fit_intercept)
        return self._waiting

    def _fitted(self) -> Sums:
        """Return the sums held. If there are none, raise `NotFittedError`, or `AttributeError` without scikit-learn."""
        held = self._held()
        if held is None:
            try:
                from sklearn.exceptions import NotFittedError as error
            except ImportError:
                error = AttributeError
            raise error("OnlineRidge holds no example; call fit or partial_fit first")
        return held

    def __sklearn_is_fitted__(self) -> bool:
        return self._held() is not None

    def __getstate__(self) -> dict[str, Any]:
        self._held()
        return {name: part for name, part in self.__dict__.items() if name != "_waiting"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        OnlineRidge.__init__(self)  # arguments that an earlier version did not have
        self.__dict__.update(state)


def _joined(blocks: Iterator[Tensor]) -> Tensor:
    first, *others = blocks
    return torch.cat([first, *others]) if others else first
