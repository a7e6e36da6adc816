"""`alpha="gcv"`, from the sums, and `alpha="loo"`, from all rows; the latter is compared with scikit-learn's
`RidgeCV`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cmab_kernels import OnlineRidge

pytest.importorskip("sklearn", reason="the package scikit-learn is not installed")
from sklearn.base import clone
from sklearn.linear_model import Ridge, RidgeCV

from .data import examples

ALPHAS = tuple(10.0 ** np.arange(-4, 5, 0.5))


def _noisy(
    seed: int, rows: int = 40, features: int = 15, targets: int = 1, noise: float = 3.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return examples whose best penalty depends on the seed."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, features)) @ random.normal(size=(features, features)) + 2
    y = x @ random.normal(size=(features, targets)) + noise * random.exponential() * random.normal(size=(rows, targets))
    return x, y[:, 0] if targets == 1 else y, random.uniform(0.1, 2, size=rows)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("targets", [1, 3])
def test_loo_chooses_as_ridge_cv(targets: int, intercept: bool, weighted: bool) -> None:
    chosen = set()
    for seed in range(12):
        x, y, weights = _noisy(seed, targets=targets)
        weights = weights if weighted else None
        theirs = RidgeCV(ALPHAS, fit_intercept=intercept).fit(x, y, weights)
        ours = OnlineRidge("loo", alphas=ALPHAS, fit_intercept=intercept).fit(x, y, weights)
        assert ours.alpha_ == theirs.alpha_
        np.testing.assert_allclose(ours.predict(x), theirs.predict(x), rtol=1e-8, atol=1e-8)
        chosen.add(ours.alpha_)
    assert len(chosen) > 3  # the choice depends on the examples


@pytest.mark.parametrize("intercept", [True, False])
def test_gcv_equals_the_definition(intercept: bool) -> None:
    for seed in range(8):
        x, y, weights = _noisy(seed, targets=2)
        scores = []
        for alpha in ALPHAS:
            mean = intercept * np.average(x, axis=0, weights=weights)
            gram = (x - mean).T @ (weights[:, None] * (x - mean))
            used = np.trace(gram @ np.linalg.inv(gram + alpha * np.eye(15))) + intercept
            errors = y - Ridge(alpha, fit_intercept=intercept).fit(x, y, weights).predict(x)
            scores.append((weights[:, None] * errors**2).sum() / (weights.sum() - used) ** 2)
        assert (
            OnlineRidge("gcv", alphas=ALPHAS, fit_intercept=intercept).fit(x, y, weights).alpha_
            == ALPHAS[int(np.argmin(scores))]
        )


def test_gcv_is_near_leave_one_out() -> None:
    """With 400 examples, the two choose the same penalty, or neighbours in the grid, in nine of ten cases."""
    near = 0
    for seed in range(30):
        x, y, _ = _noisy(seed, rows=400, noise=10.0)
        steps = np.log10(OnlineRidge("gcv", alphas=ALPHAS).fit(x, y).alpha_ / RidgeCV(ALPHAS).fit(x, y).alpha_) * 2
        near += abs(steps) < 1.5
    assert near >= 27


def test_gcv_follows_from_the_examples_held() -> None:
    """The choice does not depend on how the examples came: in chunks, one by one, from two workers, or with others that
    were forgotten."""
    x, y, weights = _noisy(3)
    right = OnlineRidge("gcv", alphas=ALPHAS).fit(x, y, weights)
    chunks, one_by_one = OnlineRidge("gcv", alphas=ALPHAS), OnlineRidge("gcv", alphas=ALPHAS)
    for row in range(40):
        one_by_one.learn_one(x[row], y[row], weights[row])
        if row % 8 == 0:
            chunks.partial_fit(x[row : row + 8], y[row : row + 8], weights[row : row + 8])
    merged = (
        OnlineRidge("gcv", alphas=ALPHAS)
        .fit(x[:9], y[:9], weights[:9])
        .merge(OnlineRidge().fit(x[9:], y[9:], weights[9:]))
    )
    more = (
        OnlineRidge("gcv", alphas=ALPHAS)
        .fit(np.r_[x, x + 1], np.r_[y, y**2])
        .forget(x + 1, y**2)
        .forget(x, y)
        .partial_fit(x, y, weights)
    )
    for model in (chunks, one_by_one, merged, more):
        assert model.alpha_ == right.alpha_
        np.testing.assert_allclose(model.predict(x), right.predict(x), rtol=1e-9, atol=1e-9)
    assert one_by_one.predict_one(x[0]) == pytest.approx(right.predict(x[:1])[0], rel=1e-9)
    assert right.alpha_ != right.partial_fit(100 * x, y).alpha_


def test_what_is_chosen_is_used() -> None:
    x, y, weights = _noisy(1)
    for alpha in ("gcv", "loo"):
        model = OnlineRidge(alpha, alphas=[0.3, 30.0]).fit(x, y, weights)
        np.testing.assert_allclose(model.coef_, Ridge(model.alpha_).fit(x, y, weights).coef_, rtol=1e-9)
        fixed = OnlineRidge(model.alpha_).fit(x, y, weights)
        np.testing.assert_array_equal(model.predict(x, return_std=True), fixed.predict(x, return_std=True))
        assert repr(clone(model)) == f"OnlineRidge(alpha='{alpha}', alphas=[0.3, 30.0])" and model.info_ == 0
    assert (
        OnlineRidge([1.0, 2.0]).fit(*examples()[:2]).alpha_.tolist() == [1.0, 2.0]
        and OnlineRidge().fit(x, y).alpha_ == 1.0
    )


def test_loo_of_a_tensor_and_of_faded_examples() -> None:
    x, y, weights = _noisy(5)
    on_tensors = OnlineRidge("loo", alphas=ALPHAS).fit(*(torch.from_numpy(each) for each in (x, y, weights)))
    assert on_tensors.alpha_ == RidgeCV(ALPHAS).fit(x, y, weights).alpha_
    ages = 0.95 ** np.arange(39, -1, -1)
    faded = OnlineRidge("loo", alphas=ALPHAS, forgetting=0.95).fit(x, y, weights)
    assert faded.alpha_ == RidgeCV(ALPHAS).fit(x, y, weights * ages).alpha_


def test_loo_needs_all_rows() -> None:
    x, y, _ = _noisy(2)
    model = OnlineRidge("loo").fit(x, y)
    before = model.predict(x)
    for change in (
        lambda: model.partial_fit(x, y),
        lambda: model.forget(x[:3], y[:3]),
        lambda: model.merge(OnlineRidge().fit(x, y)),
        lambda: model.learn_one(x[0], y[0]),
        lambda: OnlineRidge("loo").partial_fit(x, y),
    ):
        with pytest.raises(ValueError, match=r"^alpha: got 'loo', expected 'gcv', which needs only the sums"):
            change()
    np.testing.assert_array_equal(model.predict(x), before)
    assert model.predict_one(x[0]) == pytest.approx(before[0])
    with pytest.raises(ValueError, match=r"^alpha: got 'loo', expected 'gcv' or a number; 'loo' needs a"):
        model.set_params(alphas=[1.0, 2.0]).predict(x)
    with pytest.raises(ValueError, match=r"^alpha: got 'loo'"):
        OnlineRidge().fit(x, y).set_params(alpha="loo").predict(x)
    assert model.set_params(alpha=1.0).partial_fit(x, y).n_samples_seen_ == 80


@pytest.mark.parametrize("alphas", [(), 0.0, [1.0, 0.0], [1.0, -1.0], ["a"], "12", None, [np.nan], [[1.0]]])
def test_grids_that_are_none(alphas: Any) -> None:
    x, y, _ = _noisy(2)
    for alpha in ("gcv", "loo"):
        with pytest.raises(ValueError, match=r"^alphas: got"):
            OnlineRidge(alpha, alphas=alphas).fit(x, y)
    assert OnlineRidge(alphas=alphas).fit(x, y).info_ == 0  # not asked
