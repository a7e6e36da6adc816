"""Where scikit-learn has the same estimator, results agree on its own data sets to 1e-6."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import datasets
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.kernel_approximation import Nystroem
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from cmab_kernels.intention import variants

CLASSIFICATION = ("iris", "wine", "breast_cancer", "digits")


def head(array: Any) -> Tensor:
    """Return rows (N, ...) as (1, 1, N, ...)."""
    return torch.as_tensor(np.ascontiguousarray(array))[None, None]


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and targets of a data set.

    Pixels of the digits that hardly vary are left out, because their covariance is singular for every estimator.
    """
    rows, targets = getattr(datasets, f"load_{name}")(return_X_y=True)
    rows = rows.astype(float)
    return (rows[:, rows.std(0) > 0.5], targets) if name == "digits" else (rows, targets)


BIASED = np.isclose(
    QuadraticDiscriminantAnalysis().fit([[0.0], [2.0], [1.0], [5.0]], [0, 0, 1, 1]).scalings_[0], 1.0
).all()
by_maximum_likelihood = pytest.mark.skipif(
    not BIASED, reason="this scikit-learn divides covariances by one less than the rows"
)


def _close(ours: torch.Tensor, theirs: np.ndarray, rtol: float = 1e-6) -> None:
    """Check that the largest difference is small relative to the largest element."""
    assert ours.shape == theirs.shape
    assert np.abs(ours.numpy() - theirs).max() <= rtol * np.abs(theirs).max()


@pytest.mark.parametrize("alpha", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", ["diabetes", "linnerud", "breast_cancer"])
def test_ridge(impl: str, name: str, weighted: bool, intercept: bool, alpha: float) -> None:
    rows, targets = load(name)
    targets = targets.reshape(len(rows), -1).astype(float)
    weights = np.random.default_rng(0).integers(0, 4, len(rows)).astype(float) if weighted else None
    theirs = Ridge(alpha=alpha, fit_intercept=intercept, solver="svd").fit(rows, targets, sample_weight=weights)
    given = None if weights is None else torch.as_tensor(weights)[None]
    ours = variants.ridge(head(rows), head(targets), alpha, intercept=intercept, weights=given, impl=impl)
    assert ours.info.eq(0).all()
    _close(ours.coefficients[0, 0], theirs.coef_.reshape(targets.shape[1], -1).T)
    _close(ours.intercept[0, 0], np.broadcast_to(theirs.intercept_, targets.shape[1]), 1e-5 if intercept else 0.0)
    _close(ours.predict(head(rows))[0, 0], theirs.predict(rows).reshape(targets.shape))


@pytest.mark.parametrize("name", CLASSIFICATION)
@pytest.mark.parametrize("alpha", [1e-2, 10.0])
def test_lssvm(impl: str, name: str, alpha: float) -> None:
    rows, labels = load(name)
    classes = int(labels.max()) + 1
    theirs = RidgeClassifier(alpha=alpha, solver="svd").fit(rows, labels)
    ours = variants.lssvm(head(rows), head(labels), classes, alpha, impl=impl)
    scores = theirs.decision_function(rows)
    _close(ours.decision(head(rows))[0, 0], scores if classes > 2 else np.stack([-scores, scores], -1))
    assert (ours.predict(head(rows))[0, 0].numpy() == theirs.predict(rows)).all()


@by_maximum_likelihood
@pytest.mark.parametrize("name", CLASSIFICATION)
@pytest.mark.parametrize(
    "solver, shrinkage, priors",
    [("lsqr", None, False), ("lsqr", 0.3, False), ("svd", None, False), ("svd", None, True)],
)
def test_lda(impl: str, name: str, solver: str, shrinkage: float | None, priors: bool) -> None:
    rows, labels = load(name)
    classes = int(labels.max()) + 1
    given = np.arange(1.0, classes + 1) / np.arange(1.0, classes + 1).sum() if priors else None
    theirs = LinearDiscriminantAnalysis(solver=solver, shrinkage=shrinkage, priors=given, tol=1e-12).fit(rows, labels)
    wanted = None if given is None else torch.as_tensor(given)
    ours = variants.lda(head(rows), head(labels), classes, shrinkage=shrinkage or 0.0, priors=wanted, impl=impl)
    assert ours.info.eq(0).all()
    scores, weights, offset = ours.decision(head(rows))[0, 0], ours.coefficients[0, 0], ours.intercept[0, 0]
    decision, coef, intercept = theirs.decision_function(rows), theirs.coef_, theirs.intercept_
    if classes == 2:
        scores, weights, offset = (t[..., 1] - t[..., 0] for t in (scores, weights, offset))
        coef, intercept = coef[0], intercept[0]
    elif solver == "lsqr":  # all classes share a term of its scores
        scores, weights, offset = (t - t.mean(-1, keepdim=True) for t in (scores, weights, offset))
        decision, coef, intercept = (
            decision - decision.mean(-1, keepdims=True),
            coef - coef.mean(0),
            intercept - intercept.mean(),
        )
    _close(scores, decision)
    _close(weights.mT if classes > 2 else weights, coef)
    _close(offset, np.asarray(intercept))
    np.testing.assert_allclose(ours.probabilities(head(rows))[0, 0], theirs.predict_proba(rows), atol=1e-6)
    assert (ours.predict(head(rows))[0, 0].numpy() == theirs.predict(rows)).all()


@by_maximum_likelihood
@pytest.mark.parametrize("name", CLASSIFICATION)
@pytest.mark.parametrize("regularisation", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("priors", [True, False])
def test_qda(impl: str, name: str, regularisation: float, priors: bool) -> None:
    rows, labels = load(name)
    classes = int(labels.max()) + 1
    if name == "digits" and regularisation == 0.0:
        pytest.skip("every digit has pixels that are always 0: singular covariances, in scikit-learn an error")
    rows = StandardScaler().fit_transform(rows)
    given = np.arange(1.0, classes + 1) / np.arange(1.0, classes + 1).sum() if priors else None
    theirs = QuadraticDiscriminantAnalysis(reg_param=regularisation, priors=given, tol=0.0).fit(rows, labels)
    wanted = None if given is None else torch.as_tensor(given)
    ours = variants.qda(head(rows), head(labels), classes, regularisation=regularisation, priors=wanted, impl=impl)
    assert ours.info.eq(0).all()
    scores, decision = ours.decision(head(rows))[0, 0], theirs.decision_function(rows)
    _close(scores[:, 1] - scores[:, 0] if classes == 2 else scores, decision)
    np.testing.assert_allclose(ours.probabilities(head(rows))[0, 0], theirs.predict_proba(rows), atol=1e-6)


@pytest.mark.parametrize("name", ["iris", "diabetes", "wine"])
@pytest.mark.parametrize("alpha, gamma", [(1e-2, 0.1), (1.0, 0.01), (0.1, 5.0)])
def test_kernel_ridge(impl: str, name: str, alpha: float, gamma: float) -> None:
    rows, targets = load(name)
    rows, targets = StandardScaler().fit_transform(rows), targets.astype(float)
    new = rows[:40] + 0.3
    theirs = KernelRidge(kernel="rbf", alpha=alpha, gamma=gamma).fit(rows, targets)
    features = variants.kernel_features(head(rows), head(rows), gamma)
    ours = variants.ridge(features, head(targets[:, None]), alpha, intercept=False, impl=impl)
    for points in (rows, new):
        predicted = ours.predict(variants.kernel_features(head(points), head(rows), gamma))
        _close(predicted[0, 0, :, 0], theirs.predict(points))


@pytest.mark.parametrize("count", [1, 7, 40])
def test_nystrom(count: int) -> None:
    """Features equal scikit-learn's up to a rotation: their products agree."""
    rows = StandardScaler().fit_transform(load("wine")[0])
    spaced = [i * (len(rows) - 1) // max(count - 1, 1) for i in range(count)]
    theirs = Nystroem(kernel="rbf", gamma=0.2, n_components=count).fit(rows[spaced])
    wanted = theirs.transform(rows)
    ours = variants.nystrom_features(head(rows), head(rows), count, 0.2)[0, 0].numpy()
    np.testing.assert_allclose(ours @ ours.T, wanted @ wanted.T, atol=1e-6)
