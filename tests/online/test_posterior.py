"""`predict(return_std=True)` and `sample_y`, compared with scikit-learn's `BayesianRidge` for the same precisions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from cmab_kernels import OnlineRidge

pytest.importorskip("sklearn", reason="the package scikit-learn is not installed")
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, WhiteKernel
from sklearn.linear_model import BayesianRidge

from .data import examples


def _defined(
    x: np.ndarray, y: np.ndarray, w: np.ndarray, alpha: float, intercept: bool, points: np.ndarray
) -> tuple[Any, ...]:
    """Return the covariance of noiseless predictions, times the precision of the noise, and the estimate of this
    precision."""
    mean, offset = (intercept * np.average(each, axis=0, weights=w) for each in (x, y))
    x, y = x - mean, y - offset
    gram = x.T @ (w[:, None] * x)
    inverse = np.linalg.inv(gram + alpha * np.eye(x.shape[1]))
    weight = inverse @ (x.T @ (w[:, None] * y))
    errors = (w[:, None] * (y - x @ weight) ** 2).sum(0)
    return (points - mean) @ inverse @ (points - mean).T, (w.sum() - np.trace(gram @ inverse)) / errors


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("intercept", [True, False])
def test_equals_the_bayesian_ridge(intercept: bool, weighted: bool) -> None:
    x, y, weights = examples(targets=1)
    weights = weights if weighted else None
    theirs = BayesianRidge(
        fit_intercept=intercept, tol=1e-13, max_iter=3000, alpha_1=0, alpha_2=0, lambda_1=0, lambda_2=0
    )
    theirs.fit(x, y, weights)
    wanted = theirs.predict(x, return_std=True)
    for noise in (theirs.alpha_, None):  # the fixed point of its iteration is our estimate
        ours = OnlineRidge(theirs.lambda_ / theirs.alpha_, fit_intercept=intercept, noise_precision=noise).fit(
            x, y, weights
        )
        for each, right in zip(ours.predict(x, return_std=True), wanted, strict=True):
            np.testing.assert_allclose(each, right, rtol=1e-9)


@pytest.mark.parametrize("intercept", [True, False])
def test_equals_the_definition(intercept: bool) -> None:
    x, y, weights = examples()
    points = np.random.default_rng(1).normal(size=(9, 5)) * 10
    alphas, given = [0.1, 20.0], [3.0, 0.5]
    estimated = OnlineRidge(alphas, fit_intercept=intercept).fit(x, y, weights).predict(points, return_std=True)[1]
    fixed = (
        OnlineRidge(alphas, fit_intercept=intercept, noise_precision=given)
        .fit(x, y, weights)
        .predict(points, return_std=True)[1]
    )
    assert estimated.shape == (9, 2)
    for target, alpha in enumerate(alphas):
        around, noise = _defined(x, y, weights, alpha, intercept, points)
        for std, precision in ((estimated, noise[target]), (fixed, given[target])):
            np.testing.assert_allclose(std[:, target], np.sqrt((1 + np.diag(around)) / precision), rtol=1e-12)


def test_draws_have_the_covariance() -> None:
    """If the vectors of a basis replace random numbers, the products of the draws are the covariance."""
    x, y, weights = examples()
    points, alphas, noise = x[:4] + 1, [0.5, 8.0], [2.0, 0.3]
    model = OnlineRidge(alphas, noise_precision=noise).fit(x, y, weights)

    class Basis(np.random.RandomState):
        """A source of random numbers that returns unit vectors, for coefficients (D, E) and noise (N, E) in turn."""

        taken = 0

        def standard_normal(self, shape: Any = None) -> np.ndarray:
            out = np.zeros(shape)
            size = int(np.prod(shape[:2]))
            for each in range(size):
                out[(*np.unravel_index(each, shape[:2]), self.taken + each)] = 1
            self.taken += size
            return out

    draws = model.sample_y(points, 5 * 2 + 4 * 2, Basis())
    assert draws.shape == (4, 2, 18)
    around = draws - model.predict(points)[:, :, None]
    covariance = np.einsum("nes,mfs->nmef", around, around)
    np.testing.assert_allclose(covariance[:, :, 0, 1], 0, atol=1e-13)
    for target, (alpha, precision) in enumerate(zip(alphas, noise, strict=True)):
        wanted = (_defined(x, y, weights, alpha, True, points)[0] + np.eye(4)) / precision
        np.testing.assert_allclose(covariance[:, :, target, target], wanted, rtol=1e-11, atol=1e-12)


def test_equals_a_gaussian_process() -> None:
    """The Gaussian process has the kernel of a dot product and the same noise; our draws have its means and
    covariance."""
    x, y, _ = examples(targets=1)
    y, noise, prior = y - 7, 4.0, 0.5
    kernel = ConstantKernel(1 / prior, "fixed") * DotProduct(0.0, "fixed") + WhiteKernel(1 / noise, "fixed")
    theirs = GaussianProcessRegressor(kernel, optimizer=None).fit(x, y)
    ours = OnlineRidge(prior / noise, fit_intercept=False, noise_precision=noise).fit(x, y)
    points = x[:5] * 2
    mean, covariance = theirs.predict(points, return_cov=True)
    np.testing.assert_allclose(ours.predict(points), mean, rtol=1e-6)
    draws = ours.sample_y(points, 40_000, random_state=1)
    assert draws.shape == theirs.sample_y(points, 40_000).shape == (5, 40_000)
    np.testing.assert_allclose(np.cov(draws), covariance, atol=5 * covariance.max() / 200)
    np.testing.assert_allclose(draws.mean(1), mean, atol=5 * np.sqrt(covariance.max()) / 200)


def test_repeats() -> None:
    x, y, _ = examples()
    model = OnlineRidge().fit(x, y)
    first, again, other = (model.sample_y(x, 3, random_state=seed) for seed in (5, 5, 6))
    assert first.shape == (60, 2, 3) and np.array_equal(first, again) and not np.array_equal(first, other)
    generators = [np.random.default_rng(0) for _ in range(2)]
    assert np.array_equal(*(model.sample_y(x, random_state=each) for each in generators))
    assert not np.array_equal(*(model.sample_y(x, random_state=None) for _ in range(2)))


def test_of_tensors() -> None:
    x, y, _ = (torch.from_numpy(each).float() for each in examples(targets=1))
    model = OnlineRidge().fit(x, y)
    points = x[:3].clone().requires_grad_()
    mean, std = model.predict(points, return_std=True)
    assert mean.dtype == std.dtype == model.sample_y(points).dtype == torch.float32 and mean.shape == std.shape == (3,)
    double = x[:3].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda each: model.predict(each, return_std=True), double)


def test_the_noise_is_that_of_the_examples_held() -> None:
    x, y, weights = examples()
    model = OnlineRidge(forgetting=1.0).fit(x, y, weights).forget(x[:30], y[:30], weights[:30])
    right = OnlineRidge().fit(x[30:], y[30:], weights[30:])
    np.testing.assert_allclose(model.predict(x, return_std=True)[1], right.predict(x, return_std=True)[1], rtol=1e-11)
    faded = OnlineRidge(forgetting=0.9)
    for row in range(0, 60, 7):
        faded.partial_fit(x[row : row + 7], y[row : row + 7])
    right = OnlineRidge().fit(x, y, 0.9 ** np.arange(59, -1, -1))
    np.testing.assert_allclose(faded.predict(x, return_std=True)[1], right.predict(x, return_std=True)[1], rtol=1e-11)


def test_far_from_zero() -> None:
    x, y, weights = examples()
    x, y = (x + 1e7) - 1e7, (y + 1e7) - 1e7
    far, near = OnlineRidge().fit(x + 1e7, y + 1e7, weights), OnlineRidge().fit(x, y, weights)
    np.testing.assert_allclose(far.predict(x + 1e7, return_std=True)[1], near.predict(x, return_std=True)[1], rtol=1e-9)


def test_examples_that_leave_no_noise() -> None:
    x, y, _ = examples()
    with pytest.raises(ValueError, match=r"^noise_precision: got None, but the weights sum to 0.03"):
        OnlineRidge(1e-6).fit(x[:3], y[:3], 0.01).predict(x, return_std=True)
    exact = OnlineRidge(1e-12).fit(x, x[:, 0])
    with pytest.warns(RuntimeWarning, match=r"^noise_precision: got None for so little noise"):
        assert exact.predict(x, return_std=True)[1].max() < 1e-6


@pytest.mark.parametrize("noise", [0.0, -1.0, np.nan, np.inf, "a", [], [1.0, 2.0, 3.0], [1.0, 0.0]])
def test_precisions_that_are_none(noise: Any) -> None:
    x, y, _ = examples()
    model = OnlineRidge().fit(x, y).set_params(noise_precision=noise)
    with pytest.raises(ValueError, match=r"^noise_precision: got"):
        model.partial_fit(x, y)
    with pytest.raises(ValueError, match=r"^noise_precision: got"):
        model.predict(x, return_std=True)
    assert model.n_samples_seen_ == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_samples": 0}, "^n_samples: got 0"),
        ({"n_samples": True}, "^n_samples: got True"),
        ({"random_state": "a"}, "^random_state: got a str"),
        ({"random_state": -1}, "^random_state: got -1"),
    ],
)
def test_draws_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    x, y, _ = examples()
    with pytest.raises((TypeError, ValueError), match=message):
        OnlineRidge().fit(x, y).sample_y(x, **arguments)


@pytest.mark.parametrize("seed", range(3))
def test_features_of_unlike_scales_keep_their_digits(seed: int) -> None:
    """Without a penalty, scales change no prediction. Eigenvectors of the unscaled Gram matrix would lose the digits of
    small features."""
    numbers = np.random.default_rng(seed)
    scale = np.array([1.0, 1e-3, 1e3])
    x, y = numbers.normal(size=(30, 3)), numbers.normal(size=30)
    alike, unlike = OnlineRidge(0.0).fit(x, y), OnlineRidge(0.0).fit(x * scale, y)
    for ours, right in zip(unlike.predict(x * scale, return_std=True), alike.predict(x, return_std=True), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-10)
    for i in range(10):
        unlike.learn_one(x[i] * scale, y[i])
        one = unlike.predict_one(x[i + 1] * scale)
        np.testing.assert_allclose(one, copy.copy(unlike).predict(x[None, i + 1] * scale)[0], rtol=1e-9, atol=1e-9)
