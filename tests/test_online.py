"""Ridge regression that forgets, as a scikit-learn estimator: it equals scikit-learn's `Ridge`, and passes
scikit-learn's checks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cmab_kernels import OnlineRidge

pytest.importorskip("sklearn", reason="the package scikit-learn is not installed")
from sklearn import config_context
from sklearn.base import clone, is_regressor
from sklearn.exceptions import NotFittedError, UnsetMetadataPassedError
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks


# All of the checks apply if nothing is forgotten; `check_array_api_input` skips itself, with its reason, unless
# SCIPY_ARRAY_API is set.
def do_not_apply(estimator: OnlineRidge) -> dict[str, str]:
    """Return the checks that an estimator cannot pass, and why."""
    reason = "the ages of all examples before it change where one is repeated or removed"
    checks = (f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse"))
    return {} if estimator.forgetting == 1 else dict.fromkeys(checks, reason)


ESTIMATORS = [OnlineRidge(), OnlineRidge(fit_intercept=False), OnlineRidge(forgetting=0.99), OnlineRidge("gcv")]


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(ESTIMATORS, expected_failed_checks=do_not_apply)
def test_checks_of_scikit_learn(estimator: OnlineRidge, check: Any, threads: Any) -> None:
    check(estimator)


def _data(rows: int = 60, targets: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 5)) + 3
    y = x @ random.normal(size=(5, targets)) + 7 + 0.1 * random.normal(size=(rows, targets))
    return x, y[:, 0] if targets == 1 else y, random.uniform(0.1, 2, size=rows)


def _streamed(model: OnlineRidge, *data: Any, size: int = 7) -> OnlineRidge:
    for first in range(0, len(data[0]), size):
        model.partial_fit(*(part[first : first + size] for part in data))
    return model


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("targets", [1, 2])
def test_equals_ridge(intercept: bool, targets: int) -> None:
    x, y, weights = _data(targets=targets)
    theirs = Ridge(0.3, fit_intercept=intercept).fit(x, y, weights)
    for ours in (
        OnlineRidge(0.3, fit_intercept=intercept).fit(x, y, weights),
        _streamed(OnlineRidge(0.3, fit_intercept=intercept), x, y, weights),
    ):
        for name in ("coef_", "intercept_"):
            assert np.shape(getattr(ours, name)) == np.shape(getattr(theirs, name)) or not intercept
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(ours.predict(x), theirs.predict(x), rtol=1e-11)
        assert abs(ours.score(x, y, weights) - theirs.score(x, y, weights)) < 1e-12
        assert ours.n_samples_seen_ == 60 and ours.info_ == 0


def test_a_row_backwards() -> None:
    """NumPy accepts this, and torch does not."""
    rows, targets = np.array([[1.0, 2.0]]), np.array([3.0])
    both = [OnlineRidge().fit(*given).predict(rows) for given in ((rows, targets), (rows[::-1], targets[::-1]))]
    assert np.array_equal(*both)


def test_what_was_forgotten_was_never_seen() -> None:
    x, y, weights = _data()
    model = _streamed(OnlineRidge(), x, y, weights).forget(x[:45].astype(object), y[:45].tolist(), weights[:45])
    anew = OnlineRidge().fit(x[45:], y[45:], weights[45:])
    np.testing.assert_allclose(model.predict(x), anew.predict(x), rtol=1e-12)
    assert model.n_samples_seen_ == 15
    model.forget(x[45:], y[45:], weights[45:])
    with pytest.raises(NotFittedError):
        model.predict(x)
    np.testing.assert_allclose(model.partial_fit(x, y).predict(x), OnlineRidge().fit(x, y).predict(x), rtol=1e-12)
    assert model.forget(x, y).partial_fit(x[:, :2], y[:, 0]).predict(x[:, :2]).shape == (60,)  # as if unfitted


def test_what_was_never_held_is_not_blamed_on_alpha() -> None:
    x, y, _ = _data()
    with pytest.raises(ValueError, match="forgotten examples were not held"):
        OnlineRidge().fit(x, y).forget(9 * x[:10], y[:10]).predict(x)


class Frame:
    """A data frame with the attributes that are read."""

    def __init__(self, rows: np.ndarray, columns: str) -> None:
        self.rows, self.columns = rows, list(columns)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self.rows


def test_columns_in_another_order_are_refused() -> None:
    x, y, _ = _data()
    model = OnlineRidge().fit(Frame(x, "abcde"), y)
    assert model.feature_names_in_.tolist() == list("abcde") and model.predict(x).shape == (60, 2)
    for call in (model.predict, lambda rows: model.partial_fit(rows, y), lambda rows: model.forget(rows, y)):
        with pytest.raises(ValueError, match="feature names should match"):
            call(Frame(x[:, ::-1], "edcba"))
    assert model.n_samples_seen_ == 60 and not hasattr(model.fit(x, y), "feature_names_in_")


@pytest.mark.parametrize("number", [np.int64(2), np.float32(2)])
def test_numbers_of_numpy(number: Any) -> None:
    """A search over an array of penalties passes single elements of the array."""
    x, y, _ = _data()
    assert GridSearchCV(OnlineRidge(), {"alpha": [number]}, error_score="raise").fit(x, y).best_params_ == {"alpha": 2}
    assert OnlineRidge(forgetting=np.float32(0.5)).fit(x, y).info_ == 0


@pytest.mark.parametrize("number", [np.float32, np.float16])
def test_a_forgetting_factor_of_few_digits_is_as_exact(number: Any) -> None:
    """A power of a float16 number has the precision of float16, so the result depended on how a stream was divided."""
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((400, 3)), rng.standard_normal((400, 1))
    at_once, in_parts = (_streamed(OnlineRidge(forgetting=number(0.99)), x, y, size=size) for size in (400, 40))
    np.testing.assert_allclose(in_parts.coef_, at_once.coef_, rtol=1e-12, atol=1e-12)


def test_a_forgetting_factor_is_a_weight_by_age() -> None:
    """Any cut of the stream gives the same result."""
    x, y, weights = _data()
    theirs = Ridge(1.0).fit(x, y, weights * 0.9 ** np.arange(59, -1, -1))
    for size in (1, 7, 60):
        ours = _streamed(OnlineRidge(forgetting=0.9), x, y, weights, size=size)
        np.testing.assert_allclose(ours.predict(x), theirs.predict(x), rtol=1e-11)
    with pytest.raises(ValueError, match=r"^forgetting: got 0\.9"):
        ours.forget(x, y)


@pytest.mark.parametrize("spread", [1, 1e-3])
@pytest.mark.parametrize("offset", [1e6, 1e7])
def test_far_from_zero(offset: float, spread: float) -> None:
    """An offset costs no more digits than it costs the data themselves, even at 1e10 times their spread."""
    x, y, weights = _data()
    x, y = (spread * x + offset) - offset, (y + offset) - offset  # the digits that are left
    ours, theirs = (
        _streamed(OnlineRidge(spread**2), x + offset, y + offset, weights),
        Ridge(spread**2).fit(x, y, weights),
    )
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-10)
    digits = np.spacing(offset) * (1 + np.abs(theirs.coef_).sum())
    np.testing.assert_allclose(ours.predict(x + offset) - offset, theirs.predict(x), rtol=1e-10, atol=digits)
    assert ours.info_ == 0


def test_the_range_of_the_docstring() -> None:
    """With an intercept, the offset of the columns costs no digits; without one, it causes an error of 2e-16
    offset^2."""
    generator = np.random.default_rng(0)
    near, weight = generator.standard_normal((200, 3)), np.array([1.0, -2.0, 3.0])

    def error(offset: float, intercept: bool) -> float:
        x = (near + offset).astype(np.float64)
        y = (x - offset if intercept else x) @ weight
        return float(np.abs(OnlineRidge(1e-9, fit_intercept=intercept).fit(x, y).coef_ - weight).max())

    assert error(1e10, True) < 1e-9
    assert error(1e4, False) < 1e-6
    with pytest.raises(ValueError, match=r"^alpha: got 1e-09, expected examples that have a solution"):
        error(1e8, False)


def test_far_from_the_first_examples() -> None:
    """Sums far from the first examples keep few digits of the spread of the others, and a warning reports this."""
    x, y, _ = _data()
    model = OnlineRidge().fit(x, y).partial_fit(x + 1.5e7, y).forget(x, y)
    assert model.info_ == 2
    with pytest.warns(RuntimeWarning, match="few digits may be right"):
        model.predict(x)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(("distance", "said"), [(1e6, {0}), (3e8, {1, 2}), (1e9, {1, 2}), (1e10, {1, 2})])
def test_what_far_examples_leave_is_said(distance: float, said: set[int], intercept: bool) -> None:
    """The sums keep the rounding errors of their largest values so far."""
    x, y, _ = _data(targets=1)
    for far in distance * np.random.default_rng(1).normal(size=(4, 1, 5)):
        for methods in (("partial_fit", "forget"), ("forget", "partial_fit")):
            model = OnlineRidge(fit_intercept=intercept).fit(x, y)
            for method in methods:
                getattr(model, method)(far, [1.0])
            assert model.info_ in said
            if model.info_ == 0:
                np.testing.assert_allclose(model.coef_, Ridge(fit_intercept=intercept).fit(x, y).coef_, rtol=1e-3)


def test_features_that_nearly_agree_have_fewer_digits_to_lose() -> None:
    x, y, _ = _data(targets=1)
    x[:, 1] = x[:, 0] + 1e-4 * x[:, 1]
    far = np.full((1, 5), 2e4)
    model = OnlineRidge(1e-9).fit(x, y)
    assert model.info_ == 0 and model.partial_fit(far, [1.0]).forget(far, [1.0]).info_ == 2


def test_what_fades_takes_its_rounding_along() -> None:
    x, y, _ = _data(rows=100)
    model = _streamed(OnlineRidge(forgetting=0.5).fit(x, y).partial_fit(np.full((1, 5), 1e9), [[0.0, 0.0]]), x, y)
    assert model.info_ == 0
    np.testing.assert_allclose(model.coef_, OnlineRidge(forgetting=0.5).fit(x, y).coef_, rtol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_what_rows_of_no_weight_determine_is_said(seed: int) -> None:
    """If the other examples were forgotten, the remaining weight is only rounding error."""
    x, y, weights = _data(seed=seed)
    weights[30:] = 0
    model = OnlineRidge().fit(x, y, weights)
    for row in range(30):
        model.forget(x[row : row + 1], y[row : row + 1], weights[row : row + 1])
    assert model.n_samples_seen_ == 30 and model.info_ == 2
    np.testing.assert_allclose(
        model.intercept_ + model.coef_ @ model._sums.origin.numpy(), model._sums.target_origin, rtol=1e-10
    )


def test_what_is_forgotten_may_come_in_another_dtype() -> None:
    x, y, weights = (part.astype(np.float32) for part in _data())
    doubled = [part.astype(np.float64) for part in (x, y, weights)]
    for added, taken in (((x, y, weights), doubled), (doubled, (x, y, weights))):
        model = OnlineRidge().fit(*added).forget(*(part[:50] for part in taken))
        np.testing.assert_allclose(
            model.coef_,
            OnlineRidge().fit(*(part[50:] for part in doubled)).coef_,
            rtol=1e-6 if added[0] is x else 1e-11,
        )


def test_whole_numbers_are_forgotten_to_the_last_bit() -> None:
    random = np.random.default_rng(0)
    x, y = random.integers(0, 9, (500, 5)), random.integers(0, 99, 500)
    model = _streamed(OnlineRidge(), x, y).forget(x[:450], y[:450])
    key = np.c_[x[450:] - model._sums.origin.numpy(), np.ones(50)]
    np.testing.assert_array_equal(model._sums.state.gram[0, 0], key.T @ key)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_results_are_of_the_kind_and_dtype_of_the_input(dtype: torch.dtype) -> None:
    x, y = (torch.from_numpy(part).to(dtype) for part in _data()[:2])
    model = OnlineRidge().fit(x, y)
    wanted = Ridge().fit(x.double().numpy(), y.double().numpy()).predict(x.double().numpy())
    assert all(
        isinstance(each, Tensor) and each.dtype == dtype for each in (model.predict(x), model.coef_, model.intercept_)
    )
    limit = max(4 * torch.finfo(dtype).eps, 1e-12)
    torch.testing.assert_close(model.predict(x).double(), torch.from_numpy(wanted), rtol=limit, atol=limit)
    if dtype != torch.bfloat16:
        out = model.predict(x.numpy())
        assert isinstance(out, np.ndarray) and out.dtype == x.numpy().dtype
    assert model.predict([[1, 2, 3, 4, 5]]).dtype == np.float64


def test_predictions_carry_the_gradient_of_a_tensor() -> None:
    x, y, _ = _data()
    model, points = OnlineRidge().fit(x, y), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(model.predict(points).sum(), points)[0]
    np.testing.assert_allclose(gradient, np.tile(model.coef_.sum(0), (3, 1)), rtol=1e-12)


def test_a_solution_found_in_inference_mode_has_gradients_later() -> None:
    x, y, _ = _data()
    model, points = OnlineRidge(), torch.randn(3, 5, dtype=torch.float64)
    with torch.inference_mode():
        before = model.fit(x, y).predict(points)
    after = model.predict(points.requires_grad_())
    assert torch.equal(before, after) and torch.autograd.grad(after.sum(), points)[0].any()


def test_the_default_device_is_not_asked() -> None:
    x, y, _ = _data()
    with torch.device("meta"):
        assert OnlineRidge().fit(x, y).score(x, y) > 0.9


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "alpha": ({"alpha": -1.0}, "^alpha: got -1.0"),
    "forgetting": ({"forgetting": 0}, "^forgetting: got 0"),
    "fit_intercept": ({"fit_intercept": "no"}, "^fit_intercept: got 'no'"),
    "fit_intercept array": ({"fit_intercept": np.array([1, 2])}, r"^fit_intercept: got array\(\[1, 2\]\)"),
    "X text": ({"X": [["a"] * 5] * 4}, r"^X: got a list, expected an array of numbers"),
    "X ragged": ({"X": [[1.0], [1.0, 2.0]]}, r"^X: got a list, expected an array of numbers"),
    "X sparse": ({"X": torch.zeros(4, 5).to_sparse()}, "^X: got torch.sparse_coo"),
    "X": ({"X": np.zeros((4, 3))}, "X has 3 features"),
    "X nan": ({"X": np.full((4, 5), np.nan)}, "Input X contains"),
    "y": ({"y": np.zeros(3)}, "^y: got shape"),
    "y targets": ({"y": np.zeros((4, 3))}, "^y: got shape"),
    "y None": ({"y": None}, "requires y"),
    "sample_weight": ({"sample_weight": -np.ones(4)}, "^sample_weight: got a negative element"),
    "sample_weight shape": ({"sample_weight": np.ones(3)}, "^sample_weight: got shape"),
    "device": ({"X": torch.zeros(4, 5, device="meta")}, "^X: got device meta"),
    "too many": (
        {"forget": True, "X": np.zeros((70, 5)), "y": np.zeros((70, 2))},
        "^X: got 70 rows, expected at most 60, the examples",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_argument_and_change_nothing(case: str) -> None:
    changed, message = WRONG[case]
    x, y, _ = _data()
    model = OnlineRidge().fit(x, y)
    before = model.predict(x)
    arguments: dict[str, Any] = {"X": np.zeros((4, 5)), "y": np.zeros((4, 2)), "sample_weight": None, **changed}
    method = model.forget if arguments.pop("forget", False) else model.partial_fit
    parameters = {name: arguments.pop(name) for name in ("alpha", "forgetting", "fit_intercept") if name in arguments}
    model.set_params(**parameters)
    with pytest.raises((ValueError, TypeError), match=message):
        method(**arguments)
    model.set_params(alpha=1.0, forgetting=1.0, fit_intercept=True)
    np.testing.assert_array_equal(model.predict(x), before)


def test_a_system_without_a_solution() -> None:
    x, y = np.ones((4, 3)), np.ones(4)
    model = OnlineRidge(alpha=0.0, fit_intercept=False).fit(x, y)
    assert model.info_ > 0
    with pytest.raises(ValueError, match=r"^alpha: got 0\.0"):
        model.predict(x)
    assert model.set_params(alpha=1.0).predict(x).shape == (4,)  # the sums are the same: only the penalty differs


def test_with_the_tools_of_scikit_learn() -> None:
    x, y, _ = _data()
    search = GridSearchCV(make_pipeline(StandardScaler(), OnlineRidge()), {"onlineridge__alpha": [1e-3, 1e3]}).fit(x, y)
    assert search.best_params_ == {"onlineridge__alpha": 1e-3} and is_regressor(OnlineRidge())
    model = OnlineRidge(2.0, forgetting=0.5).fit(x, y)
    assert repr(clone(model)) == "OnlineRidge(alpha=2.0, forgetting=0.5)" and not hasattr(
        clone(model), "n_features_in_"
    )
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(x), model.predict(x))
    assert abs(model.score(x, y) - r2_score(y, model.predict(x))) < 1e-12


def test_weights_are_routed() -> None:
    """With scikit-learn's metadata routing, a search passes the weights that its estimator, or a clone, requests."""
    x, y, weights = _data()
    with config_context(enable_metadata_routing=True):
        with pytest.raises(UnsetMetadataPassedError, match="OnlineRidge"):
            GridSearchCV(OnlineRidge(), {"alpha": [1.0]}).fit(x, y, sample_weight=weights)
        asking = OnlineRidge().set_fit_request(sample_weight=True).set_score_request(sample_weight=False)
        asking.set_partial_fit_request(sample_weight="other")
        search = GridSearchCV(clone(asking), {"alpha": [1.0]}).fit(x, y, sample_weight=weights)
        assert asking.get_metadata_routing().partial_fit.requests == {"sample_weight": "other"}
    np.testing.assert_array_equal(search.predict(x), OnlineRidge().fit(x, y, weights).predict(x))


def test_without_scikit_learn() -> None:
    program = """
import sys
sys.modules["sklearn"] = None
import torch, cmab_kernels
model = cmab_kernels.OnlineRidge()
try:
    model.predict(torch.ones(2, 3))
except AttributeError as error:
    assert "holds no example" in str(error)
x = torch.randn(20, 3)
assert model.fit(x, x.sum(1)).score(x, x.sum(1)) > 0.9
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_intercept_cannot_come_or_go_between_examples() -> None:
    x = np.random.default_rng(0).standard_normal((20, 3))
    model = OnlineRidge().partial_fit(x, x[:, 0]).set_params(fit_intercept=False)
    with pytest.raises(ValueError, match=r"^fit_intercept: got False"):
        model.partial_fit(x, x[:, 0])
    assert model.n_samples_seen_ == 20 and model.fit(x, x[:, 0]).intercept_ == 0


def test_rows_of_no_weight_may_hold_anything() -> None:
    """Rows of weight 0 do not move the origin. Otherwise the other examples would be too far from it."""
    x, y, weights = _data()
    for anything in (1e17, 1e200):
        filled, counted = (
            (np.r_[part, np.full_like(part, anything)] for part in (x, y)),
            np.r_[weights, np.zeros_like(weights)],
        )
        ours, right = OnlineRidge().fit(*filled, counted), OnlineRidge().fit(x, y, weights)
        np.testing.assert_allclose(ours.coef_, right.coef_, rtol=1e-12)
        np.testing.assert_allclose(
            ours.predict(x, return_std=True)[1], right.predict(x, return_std=True)[1], rtol=1e-12
        )
        assert ours.info_ == 0


def test_coefficients_beyond_the_range_are_none() -> None:
    model = OnlineRidge(0.1).fit([[1.0], [-1.0], [1.0]], [1e308, -1e308, 1e308])
    assert model.info_ == 1
    with pytest.raises(ValueError, match="numbers are too large"):
        model.predict([[1.0]])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.ma.masked_array(np.ones((2, 1)), [[0], [1]]), "^X: got an array with masked entries"),
        (np.zeros((2, 1), "datetime64[D]"), r"^X: got a ndarray, expected an array of numbers"),
        (torch.nested.nested_tensor([torch.zeros(1)] * 2), "^X: got a nested tensor"),
    ],
    ids=["masked", "dates", "nested"],
)
def test_what_holds_no_numbers_is_named(given: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{said}"):
        OnlineRidge().fit(given, [1.0, 2.0])


@pytest.mark.parametrize(
    "alpha",
    [
        np.array([0.1, 10.0]),
        [0.1, 10.0],
        torch.tensor([0.1, 10.0], dtype=torch.float64),
        [0.3, 0.3],
        np.array([2.0]),
        torch.tensor(0.5),
        np.array(0.5),
    ],
)
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_a_penalty_for_each_target(alpha: Any, offset: float) -> None:
    x, y, weights = _data()
    x, y = (x + offset) - offset, (y + offset) - offset
    theirs = Ridge(np.asarray(alpha)).fit(x, y, weights)
    ours = _streamed(OnlineRidge(alpha), x + offset, y + offset, weights)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(
        ours.predict(x + offset) - offset, theirs.predict(x), rtol=1e-9, atol=1e-8 if offset else 1e-11
    )
    assert ours.info_ == 0 and "alpha=" in repr(clone(ours)) and ours.set_params(alpha=1.0).info_ == 0
    np.testing.assert_allclose(ours.coef_, Ridge().fit(x, y, weights).coef_, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "alpha",
    [
        [],
        [1.0, -1.0],
        [1.0, np.nan],
        [1.0, np.inf],
        "ab",
        "11",
        None,
        [[1.0, 2.0]],
        [1.0, 2.0, 3.0],
        np.ones((2, 2)),
        {1.0: 2.0, "a": 1},
    ],
)
def test_penalties_that_do_not_fit(alpha: Any) -> None:
    x, y, _ = _data()
    model = OnlineRidge().fit(x, y)
    before = model.predict(x)
    with pytest.raises(ValueError, match=r"^alpha: "):
        model.set_params(alpha=alpha).partial_fit(x, y)
    with pytest.raises(ValueError, match=r"^alpha: "):
        model.predict(x)
    np.testing.assert_array_equal(model.set_params(alpha=1.0).predict(x), before)


def test_the_worst_penalty_of_any_target_decides() -> None:
    x, y = np.ones((4, 3)), np.ones((4, 2))
    model = OnlineRidge([1.0, 0.0], fit_intercept=False).fit(x, y)
    assert model.info_ > 0
    with pytest.raises(ValueError, match=r"^alpha: got \[1\.0, 0\.0\]"):
        model.predict(x)


@pytest.mark.parametrize("number", [2.0, 2, np.float32(2), np.int64(2), True])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_one_weight_for_all_examples(number: Any, offset: float) -> None:
    """scikit-learn accepts weights like this, in every method with weights."""
    x, y, _ = _data()
    x, y = (x + offset) - offset, (y + offset) - offset
    theirs = Ridge(0.3).fit(x, y, sample_weight=number)
    ours = OnlineRidge(0.3).fit(x + offset, y + offset, sample_weight=number)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-9, atol=1e-10)
    assert abs(ours.score(x + offset, y + offset, number) - theirs.score(x, y)) < 1e-9
    less = ours.partial_fit(x[:9] + offset, y[:9] + offset, number).forget(x[:9] + offset, y[:9] + offset, number)
    np.testing.assert_allclose(less.coef_, theirs.coef_, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("number", [-1.0, np.nan, np.inf, 0.0])
def test_one_weight_that_is_none(number: float) -> None:
    x, y, _ = _data()
    with pytest.raises(ValueError, match="sample_weight"):
        OnlineRidge().fit(x, y, number)


def test_a_score_needs_a_weight() -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 2)), np.arange(6.0)
    with pytest.raises(ValueError, match=r"^sample_weight: got 0 throughout"):
        OnlineRidge().fit(x, y).score(x, y, sample_weight=np.zeros(6))
    for alpha in (10**400, [1.0, 10**400]):
        with pytest.raises(ValueError, match=r"^alpha: got"):
            OnlineRidge(alpha=alpha).fit(x, y)
    with pytest.raises(ValueError, match=r"^y: got shape \(6, 0\)"):
        OnlineRidge().fit(x, np.zeros((6, 0)))


def test_coefficients_are_the_callers() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20.0)
    for points, targets in ((x, y), (torch.from_numpy(x), torch.from_numpy(y))):
        model = OnlineRidge().fit(points, targets)
        before = model.predict(points)
        coefficients = model.coef_
        coefficients /= 9
        assert (model.predict(points) == before).all()
