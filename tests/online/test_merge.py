"""`OnlineRidge.merge`: workers that read parts of the data hold the same as one `fit` of the whole data."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from cmab_kernels import OnlineRidge

from .data import examples


def _equal(ours: OnlineRidge, right: OnlineRidge, x: Any, rtol: float = 1e-11) -> None:
    np.testing.assert_allclose(ours.coef_, right.coef_, rtol=rtol, atol=rtol)
    for each, wanted in zip(ours.predict(x, return_std=True), right.predict(x, return_std=True), strict=True):
        np.testing.assert_allclose(each, wanted, rtol=rtol)
    assert ours.n_samples_seen_ == right.n_samples_seen_ and ours.info_ == right.info_


@pytest.mark.parametrize("forgetting", [1.0, 0.9])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("targets", [1, 2])
def test_workers_equal_one_fit(forgetting: float, intercept: bool, targets: int) -> None:
    x, y, weights = examples(targets=targets)
    made = {"alpha": 0.3, "fit_intercept": intercept, "forgetting": forgetting}
    parts = [slice(0, 7), slice(7, 31), slice(31, 32), slice(32, 60)]
    workers = [OnlineRidge(**made).fit(x[part], y[part], weights[part]) for part in parts]
    right = OnlineRidge(**made).fit(x, y, weights)
    one_by_one = copy.copy(workers[0]).merge(workers[1]).merge(workers[2]).merge(workers[3])
    in_a_tree = copy.copy(workers[0]).merge(workers[1]).merge(copy.copy(workers[2]).merge(workers[3]))
    for merged in (one_by_one, in_a_tree):
        _equal(merged, right, x)
    assert [worker.n_samples_seen_ for worker in workers] == [7, 24, 1, 28]


@pytest.mark.parametrize("distance", [1e3, 1e6])
def test_parts_far_from_each_other(distance: float) -> None:
    """The shift of the origin loses as many digits as the distance costs, and no more."""
    x, y, _ = examples(offset=0.0)
    x[30:] += distance
    merged = OnlineRidge(fit_intercept=True).fit(x[:30], y[:30]).merge(OnlineRidge().fit(x[30:], y[30:]))
    right = np.linalg.lstsq(
        np.r_[np.c_[x, np.ones(60)], np.c_[np.eye(5), np.zeros(5)]], np.r_[y, np.zeros((5, 2))], rcond=None
    )[0]
    np.testing.assert_allclose(merged.coef_.T, right[:5], rtol=distance**2 * 1e-15, atol=distance**2 * 1e-15)
    assert merged.info_ == 0


def test_what_a_part_has_lost_is_said() -> None:
    """The peak of a part is counted about the new origin."""
    x, y, _ = examples()
    lossy = OnlineRidge().fit(x, y).partial_fit(x + 1.5e7, y).forget(x + 1.5e7, y)
    assert OnlineRidge().fit(x, y).merge(lossy).info_ == lossy.info_ == 2
    assert OnlineRidge().fit(x + 1e9, y).merge(OnlineRidge().fit(x, y)).forget(x + 1e9, y).info_ > 0


def test_merged_examples_can_be_forgotten() -> None:
    x, y, weights = examples()
    merged = OnlineRidge().fit(x[:40], y[:40], weights[:40]).merge(OnlineRidge().fit(x[40:], y[40:], weights[40:]))
    _equal(
        merged.forget(x[20:50], y[20:50], weights[20:50]),
        OnlineRidge().fit(*(np.r_[each[:20], each[50:]] for each in (x, y, weights))),
        x,
    )


def test_an_estimator_without_examples() -> None:
    x, y, _ = examples()
    fitted, right = OnlineRidge().fit(x, y), OnlineRidge().fit(x, y)
    _equal(fitted.merge(OnlineRidge()), right, x)
    _equal(OnlineRidge().merge(fitted), right, x)
    empty = OnlineRidge().merge(OnlineRidge())
    assert not empty.__sklearn_is_fitted__() and not hasattr(empty, "n_features_in_")
    taken = OnlineRidge().merge(fitted).partial_fit(x, y)
    assert taken.n_samples_seen_ == 120 and fitted.n_samples_seen_ == 60 == taken.n_features_in_ * 12


def test_with_itself() -> None:
    x, y, _ = examples()
    model = OnlineRidge().fit(x, y)
    _equal(model.merge(model), OnlineRidge().fit(np.r_[x, x], np.r_[y, y]), x)


def test_of_tensors() -> None:
    x, y, _ = (torch.from_numpy(each).float() for each in examples())
    merged = OnlineRidge().fit(x[:9], y[:9]).merge(OnlineRidge().fit(x[9:].numpy(), y[9:].numpy()))
    assert merged.coef_.dtype == torch.float32
    torch.testing.assert_close(merged.coef_, OnlineRidge().fit(x, y).coef_)


x, y, _ = examples()
OTHERS: dict[str, tuple[Any, str]] = {
    "a list": ([], "^other: got a list, expected an OnlineRidge"),
    "features": (OnlineRidge().fit(x[:, :4], y), "^other: got features 4, expected 5"),
    "targets": (OnlineRidge().fit(x, y[:, :1]), "^other: got targets 1, expected 2"),
    "dimensions": (OnlineRidge().fit(x, y[:, 0]), "^other: got targets 1, expected 2"),
    "fit_intercept": (OnlineRidge(fit_intercept=False).fit(x, y), "^other: got fit_intercept False, expected True"),
    "forgetting": (OnlineRidge(forgetting=0.5).fit(x, y), r"^other: got forgetting 0.5, expected 1.0"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_that_do_not_fit_change_nothing(case: str) -> None:
    other, message = OTHERS[case]
    model = OnlineRidge().fit(x, y)
    before = model.predict(x)
    with pytest.raises((TypeError, ValueError), match=message):
        model.merge(other)
    np.testing.assert_array_equal(model.predict(x), before)


def test_other_names_and_parameters() -> None:
    pandas = pytest.importorskip("pandas", reason="the package pandas is not installed")
    frames = [pandas.DataFrame(x, columns=list(names)) for names in ("abcde", "abced")]
    models = [OnlineRidge().fit(frame, y) for frame in frames]
    with pytest.raises(ValueError, match=r"^other: got names of features"):
        models[0].merge(models[1])
    assert OnlineRidge().fit(x, y).merge(models[0]).feature_names_in_.tolist() == list("abcde")
    with pytest.raises(ValueError, match=r"^other: got fit_intercept True, expected False"):
        OnlineRidge(fit_intercept=False).merge(models[0])
    with pytest.raises(ValueError, match=r"^alpha: got 3 penalties"):
        OnlineRidge([1.0, 2.0, 3.0]).merge(models[0])


def test_the_size_does_not_depend_on_the_examples() -> None:
    sizes = {len(pickle.dumps(OnlineRidge().fit(*examples(rows)[:2]))) for rows in (1000, 100_000)}
    assert len(sizes) == 1
    model = OnlineRidge().fit(*examples(1000)[:2])
    model.predict(x, return_std=True)
    assert {len(pickle.dumps(model))} == sizes
