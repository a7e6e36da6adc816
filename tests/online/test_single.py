"""`learn_one` and `predict_one` equal `partial_fit` and `predict`, one example at a time."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from cmab_kernels import OnlineRidge

from .data import examples


def _dicts(x: np.ndarray, names: str = "abcde") -> list[dict[str, float]]:
    return [dict(zip(names, row, strict=True)) for row in x.tolist()]


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("alpha", [1e-8, 1e-2, 1.0, 100.0])
def test_predicts_before_it_learns(alpha: float, intercept: bool) -> None:
    """Each prediction is that of a fit to the examples before."""
    x, y, weights = examples(rows=300, targets=1)
    model, blocks = OnlineRidge(alpha, fit_intercept=intercept), OnlineRidge(alpha, fit_intercept=intercept)
    for row, (each, target, weight) in enumerate(zip(_dicts(x), y.tolist(), weights.tolist(), strict=True)):
        guess = model.predict_one(each)
        if row in (1, 2, 3, 5, 8, 13, 40, 100, 127, 128, 129, 200, 256, 299):
            right = np.r_[
                np.c_[x, np.full(300, intercept)][:row] * np.sqrt(weights[:row, None]),
                np.c_[np.sqrt(alpha) * np.eye(5), np.zeros(5)],
            ]
            fitted = np.linalg.lstsq(right, np.r_[y[:row] * np.sqrt(weights[:row]), np.zeros(5)], rcond=None)[0]
            # The condition number of the sums is the square of that of the rows.
            assert guess == pytest.approx(np.r_[x[row], intercept] @ fitted, rel=max(1e-10, 1e-14 / alpha))
        assert row > 0 or guess == 0.0
        assert model.learn_one(each, target, weight) is None
        blocks.partial_fit(x[row : row + 1], y[row : row + 1], weights[row : row + 1])
    np.testing.assert_allclose(model.coef_, blocks.coef_, rtol=1e-12)
    assert (
        model.n_samples_seen_ == 300 and model.feature_names_in_.tolist() == list("abcde") and model.n_features_in_ == 5
    )


@pytest.mark.parametrize("rows", [20_000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_errors_do_not_grow(rows: int) -> None:
    """For examples that drift, the rank-one updates agree with the sums, and the sums agree with those of one fit."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 5)) + np.linspace(0, 30, rows)[:, None]
    y = x @ np.arange(5.0) + 2 + 0.1 * random.normal(size=rows)
    model, worst = OnlineRidge(0.1), 0.0
    for row, (each, target) in enumerate(zip(x, y.tolist(), strict=True)):
        guess = model.predict_one(each)
        if row % 997 == 996:
            right = float(copy.copy(model).predict(each[None])[0])
            worst = max(worst, abs(guess - right) / abs(right))
        model.learn_one(each, target)
    assert worst < 1e-11
    np.testing.assert_allclose(model.coef_, OnlineRidge(0.1).fit(x, y).coef_, rtol=1e-11, atol=1e-11)


def test_updates_follow_between_two_solutions() -> None:
    """Sums are read at most once in 128 examples: all other predictions come from updates of rank one."""
    x, y, _ = examples(rows=2000, targets=1)
    model, solved = OnlineRidge(), 0
    for each, target in zip(x, y, strict=True):
        before = model._waiting is not None and model._waiting.solution is not None
        model.predict_one(each)
        solved += not before
        model.learn_one(each, target)
    assert 2000 / 128 < solved < 2000 / 128 + 15


def test_any_method_sees_what_waits() -> None:
    x, y, weights = examples(targets=1)
    right = OnlineRidge().fit(x, y, weights)

    def learned() -> OnlineRidge:
        model = OnlineRidge()
        for each in zip(x, y, weights, strict=True):
            model.predict_one(each[0])
            model.learn_one(*each)
        return model

    for see in (
        lambda each: each,
        copy.copy,
        copy.deepcopy,
        lambda each: pickle.loads(pickle.dumps(each)),
        OnlineRidge().merge,
    ):
        np.testing.assert_allclose(see(learned()).coef_, right.coef_, rtol=1e-11)
    model = learned()
    twin = copy.copy(model)
    twin.learn_one(x[0], y[0])
    assert (model.n_samples_seen_, twin.n_samples_seen_) == (60, 61)
    np.testing.assert_allclose(
        model.forget(x[:20], y[:20], weights[:20]).coef_,
        OnlineRidge().fit(x[20:], y[20:], weights[20:]).coef_,
        rtol=1e-11,
    )
    model.learn_one(x[0], y[0])
    assert model.predict_one(x[1]) == pytest.approx(model.predict(x[1:2])[0], rel=1e-12)
    assert model.fit(x, y).n_samples_seen_ == 60 and model.predict_one(x[0]) == pytest.approx(
        OnlineRidge().fit(x, y).predict(x[:1])[0]
    )


@pytest.mark.parametrize(
    "parameters", [{"forgetting": 0.9}, {"alpha": np.array([0.5])}, {"alpha": 0.0}, {"alpha": "gcv"}]
)
def test_where_no_update_of_rank_one_follows(parameters: dict[str, Any]) -> None:
    x, y, _ = examples(targets=1)
    model = OnlineRidge(**parameters).partial_fit(x[:20], y[:20])
    for row in range(20, 60):
        assert model.predict_one(x[row]) == pytest.approx(
            OnlineRidge(**parameters).fit(x[:row], y[:row]).predict(x[row : row + 1])[0], rel=1e-9
        )
        model.learn_one(x[row], y[row])


def test_parameters_may_change_between_examples() -> None:
    x, y, _ = examples(targets=1)
    model = OnlineRidge()
    for row in range(20):
        model.learn_one(x[row], y[row])
        model.predict_one(x[row])
    assert model.set_params(alpha=50.0).predict_one(x[0]) == pytest.approx(
        OnlineRidge(50.0).fit(x[:20], y[:20]).predict(x[:1])[0]
    )
    model.learn_one(x[20], y[20])
    model.set_params(forgetting=0.5, alpha=1.0).learn_one(x[21], y[21])
    weights = np.r_[np.full(21, 0.5), 1.0]
    np.testing.assert_allclose(model.coef_, OnlineRidge().fit(x[:22], y[:22], weights).coef_, rtol=1e-10)
    with pytest.raises(ValueError, match=r"^fit_intercept: got False"):
        model.set_params(fit_intercept=False).learn_one(x[0], y[0])
    with pytest.raises(ValueError, match=r"^alpha: got -1"):
        model.set_params(fit_intercept=True, alpha=-1).learn_one(x[0], y[0])
    with pytest.raises(ValueError, match=r"^alpha: got 2 penalties, expected one, or one for each target of y, 1"):
        model.set_params(alpha=[1.0, 2.0]).learn_one(x[0], y[0])
    with pytest.raises(ValueError, match=r"^alpha: got array\(\[\[1\.\]\]\), expected a number"):
        model.set_params(alpha=np.ones((1, 1))).learn_one(x[0], y[0])
    assert model.set_params(alpha=1.0).n_samples_seen_ == 22


def test_kinds_of_examples() -> None:
    x, y, _ = examples(targets=1)
    right = OnlineRidge().fit(x, y)
    for given in (
        x,
        x.tolist(),
        [tuple(row) for row in x],
        list(torch.from_numpy(x)),
        [dict(enumerate(row)) for row in x],
        _dicts(x),
    ):
        model = OnlineRidge()
        for each, target in zip(given, y, strict=True):
            model.learn_one(each, np.float64(target), np.float32(1))
        np.testing.assert_allclose(model.coef_, right.coef_, rtol=1e-12)
        assert type(model.predict_one(given[0])) is float and model.predict_one(given[0]) == pytest.approx(
            right.predict(x[:1])[0]
        )
    # A feature that a dict lacks is 0.
    assert model.predict_one({"c": 1.0}) == pytest.approx(model.predict([[0, 0, 1.0, 0, 0]])[0])
    mixed = OnlineRidge().fit(x[:30], y[:30])
    for row in range(30, 60):
        mixed.learn_one(dict(enumerate(x[row])), y[row])
    np.testing.assert_allclose(mixed.coef_, right.coef_, rtol=1e-11)


def test_a_row_belongs_to_the_caller() -> None:
    x, y, _ = examples(targets=1)
    model, row = OnlineRidge(), np.zeros(5)
    for each, target in zip(x, y, strict=True):
        row[:] = each
        model.learn_one(row, target)
    np.testing.assert_allclose(model.coef_, OnlineRidge().fit(x, y).coef_, rtol=1e-12)


def test_updates_that_lose_digits_are_not_followed() -> None:
    """Examples that are a million times as large leave nothing of the earlier inverse: the solution is recomputed from
    the sums."""
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 3)) * np.where(np.arange(60) < 20, 1e-3, 1e3)[:, None]
    y = x @ np.ones(3) + random.normal(size=60)
    model = OnlineRidge(1e-6, fit_intercept=False)
    for row in range(60):
        guess = model.predict_one(x[row])
        if row > 24:  # from here on the sums are well conditioned again
            assert guess == pytest.approx(
                OnlineRidge(1e-6, fit_intercept=False).fit(x[:row], y[:row]).predict(x[row : row + 1])[0], rel=1e-9
            )
        model.learn_one(x[row], y[row])


GOOD = dict.fromkeys("abcde", 1.0)
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "a stranger": (
        (GOOD | {"f": 1.0}, 1.0),
        r"^x: got the features 'f', expected only those of the first example, \['a', 'b', 'c', 'd', 'e'\]",
    ),
    "a stranger for one that lacks": (
        ({"f": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0}, 1.0),
        "^x: got the features 'f'",
    ),
    "text": ((GOOD | {"b": "high"}, 1.0), "^x: got a str at 'b', expected a number"),
    "None": ((GOOD | {"b": None}, 1.0), "^x: got an infinity or NaN"),
    "NaN": ((GOOD | {"b": np.nan}, 1.0), "^x: got an infinity or NaN"),
    "width": (([1.0, 2.0], 1.0), "^x: got 2 features, expected 5"),
    "shape": (([[1.0, 2.0]], 1.0), r"^x: got shape \(1, 2\)"),
    "kind": (("abcde", 1.0), "^x: got a str"),
    "y": ((GOOD, "a"), "^y: got a str, expected a number"),
    "y NaN": ((GOOD, np.nan), "^y: got nan"),
    "y array": ((GOOD, np.ones(2)), "^y: got array"),
    "w": ((GOOD, 1.0, -1.0), "^w: got -1.0"),
    "w None": ((GOOD, 1.0, None), "^w: got None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_argument_and_change_nothing(case: str) -> None:
    arguments, message = WRONG[case]
    x, y, _ = examples(targets=1)
    model = OnlineRidge()
    for each, target in zip(_dicts(x), y.tolist(), strict=True):
        model.learn_one(each, target)
    before = model.predict_one(GOOD)
    with pytest.raises((TypeError, ValueError), match=message):
        model.learn_one(*arguments)
    if message.startswith("^x"):
        with pytest.raises((TypeError, ValueError), match=message):
            model.predict_one(arguments[0])
    assert model.predict_one(GOOD) == before and model.n_samples_seen_ == 60


def test_first_examples_that_are_none() -> None:
    for x, message in (
        ({}, "^x: got shape"),
        ({"a": 1.0, 2: 1.0}, "^x: got the features"),
        ([], "^x: got shape"),
        ({"a": np.nan}, "infinity or NaN"),
    ):
        model = OnlineRidge()
        with pytest.raises((TypeError, ValueError), match=message):
            model.learn_one(x, 1.0)
        assert model.predict_one({"a": 1.0}) == 0.0 and not model.__sklearn_is_fitted__()
    x, y, _ = examples()
    with pytest.raises(ValueError, match=r"^y: got one number after examples with y"):
        OnlineRidge().fit(x, y).learn_one(x[0], 1.0)
