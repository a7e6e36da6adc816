"""Fields of a caller's own arrays: beside predictions without a model, in any units, with gaps, saved and served."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from cmab_models import Field, fit_field
from cmab_models.arrays import Scale, numbers
from cmab_models.fields import Maps, _pairs, _parts
from cmab_models.training import Interrupted
from torch.optim.optimizer import register_optimizer_step_post_hook


def drawn(points: int, seed: int = 0, noise: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """Places in units of a map, far from 0, and noisy values."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 10, (points, 2))
    y = np.sin(0.5 * x[:, 0]) * np.cos(0.35 * x[:, 1]) + noise * rng.standard_normal(points)
    return x * [1.0, 1000.0] + [5e6, -3e5], 300 + 20 * y


def nearest(x: np.ndarray, y: np.ndarray, asked: np.ndarray) -> np.ndarray:
    scale = x.std(0)
    return y[(((asked[:, None] - x) / scale) ** 2).sum(-1).argmin(1)]


def rmse(a: Any, b: Any) -> float:
    return float(np.sqrt(np.mean((np.asarray(a) - np.asarray(b)) ** 2)))


@pytest.fixture(scope="module")
def fitted() -> Field:
    return fit_field(*drawn(300), steps=2)


def test_a_fitted_field_beats_the_nearest_point_and_the_mean() -> None:
    (x, y), (asked, truth) = drawn(200), drawn(200, seed=1)
    mean, (lower, upper) = fit_field(x, y, steps=100).predict(asked)
    assert rmse(mean, truth) < 0.9 * rmse(nearest(x, y, asked), truth)
    assert rmse(mean, truth) < 0.6 * rmse(y.mean(), truth)
    assert 0.7 < ((lower < truth) & (truth < upper)).mean() <= 1.0


def test_maps_teach_what_a_new_map_needs() -> None:
    """Each map is a plane with a slope of its own. Two of 60 maps have one point, and many values are missing."""
    rng = np.random.default_rng(0)
    x, maps = rng.uniform(-1, 1, (1200, 1)), np.repeat(np.arange(60), 20)
    slopes = rng.standard_normal(62)
    y = np.stack([slopes[maps] * x[:, 0], 10 - slopes[maps] * x[:, 0]], 1)
    y[rng.random(y.shape) < 0.1] = np.nan
    x, y, maps = np.concatenate([x, [[0.0], [0.5]]]), np.concatenate([y, [[0.0, 10.0], [0.0, 10.0]]]), [*maps, 60, 61]
    field = fit_field(pandas.DataFrame(x), pandas.DataFrame(y), pandas.Series(maps), steps=200)
    assert field.state is None
    errors = []
    for slope in rng.standard_normal(20):
        field.state = None
        values = _planes([-1.0, 0.1, 1.0, 0.3], slope)
        values[3, 0] = np.nan
        field.update([[-1.0], [0.1], [1.0], [0.3]], values)
        mean, band = field.predict([[0.5], [-0.5]])
        assert mean.shape == (2, 2) and band.shape == (2, 2, 2)
        errors.append(mean - _planes([0.5, -0.5], slope))
    assert rmse(errors, 0) < 0.25 * 0.5  # the mean of all maps has an error of 0.5


def _planes(x: list[float], slope: float) -> np.ndarray:
    return np.outer(x, [slope, -slope]) + np.array([0, 10])


def test_a_state_reads_points_in_any_parts(fitted: Field, tmp_path: Path) -> None:
    x, y = drawn(300)
    whole = fitted.predict(x[:7])
    fitted.save(tmp_path / "field")
    server = Field.load(tmp_path / "field")
    assert all(np.array_equal(a, b) for a, b in zip(server.predict(x[:7]), whole, strict=True))
    server.state = None
    empty = server.predict(x[:7])[0]
    size = None
    for some in np.split(np.arange(300), 3):
        server.update(torch.from_numpy(x[some]), y[some])
        server.save(tmp_path / "later")
        size = size or (tmp_path / "later" / "state.pt").stat().st_size
    server = Field.load(tmp_path / "later")
    assert np.allclose(server.predict(x[:7])[0], whole[0], rtol=1e-5) and not np.allclose(empty, whole[0], rtol=1e-5)
    assert (tmp_path / "later" / "state.pt").stat().st_size == size


def test_predictions_follow_the_units(fitted: Field) -> None:
    """The band is that of the normal distribution of the model, in the caller's units."""
    x, y = drawn(300)
    scale_x, scale_y = Scale(x.mean(0), x.std(0)), Scale(y.mean(keepdims=True), y.std(keepdims=True))
    points = scale_x.standardise(x)[None], scale_y.standardise(y[:, None])[None]
    with torch.no_grad():
        predicted = fitted.model(*points, scale_x.standardise(x[:5])[None])
    mean, (lower, upper) = fitted.predict(x[:5], coverage=0.6826894921370859)
    assert np.allclose(mean, y.mean() + y.std() * predicted.mean[0, :, 0].double().numpy(), rtol=1e-5)
    assert np.allclose((upper - lower) / 2, y.std() * predicted.stddev[0, :, 0].double().numpy(), rtol=1e-5)
    many = np.repeat(x[:5], 300, 0)
    assert np.allclose(fitted.predict(many)[0], np.repeat(mean, 300), rtol=1e-5)
    assert [part.shape for part in fitted.predict(x[:0])] == [(0,), (2, 0)]
    assert all(part.dtype == np.float64 for part in fitted.predict(x[:1]))


def test_small_differences_of_large_numbers_are_kept() -> None:
    x = 1.7e9 + np.arange(4.0)[:, None]
    scale = Scale.of("x", x)
    assert torch.allclose(scale.standardise(x).squeeze(), torch.tensor([-1.5, -0.5, 0.5, 1.5]) / 1.25**0.5)
    for rows in (3, 100_000):
        constant = Scale.of("x", np.full((rows, 2), 0.1) * [1.0, 1e9])
        assert (constant.std == 1).all() and (constant.mean == [0.1, 0.1 * 1e9]).all()
    assert all(np.array_equal(a, b) for a, b in zip(Scale.read(scale.told()), scale, strict=True))
    for one, other in ((1e300, 2.0), (2.0, -np.finfo(np.float64).max), (1.7e308, -1.7e308)):
        with pytest.raises(ValueError, match=r"^y: got values up to [\d.]+e\+30\d, expected values below 1e150"):
            fit_field(np.arange(6.0), np.array([1.0, one, other, 3.0, 4.0, 5.0]), steps=1)


def test_points_that_stop_a_training_are_in_no_batch() -> None:
    x = torch.arange(40.0)[:, None]
    for sizes in ([40], [3] * 12 + [4]):
        maps = [(part, part) for part in x.split(sizes)]
        known, checked = _parts(maps, seed=0)
        asked = torch.cat([batch.target_y.flatten() for batch in checked])
        seen = torch.cat([part.flatten() for part, _ in known])
        assert len(asked) >= 4 and not set(asked.tolist()) & set(seen.tolist())
    task = Maps(known=known, checked=checked)
    again, other = Maps(known=known, checked=checked), Maps(known=known[1:], checked=checked)
    assert task.settings() == again.settings() != other.settings()


def test_a_training_goes_on_with_the_same_data_only(tmp_path: Path) -> None:
    x, y = drawn(30)
    first = fit_field(x, y, steps=2, folder=tmp_path)
    again = fit_field(x, y, steps=2, folder=tmp_path)
    assert np.array_equal(first.predict(x)[0], again.predict(x)[0])
    with pytest.raises(ValueError, match=r"^data: got '\w+', expected '\w+', as .*checkpoint.pt was trained with$"):
        fit_field(x, y + x[:, 0] ** 2, steps=2, folder=tmp_path)


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_interrupted_fit_says_how_it_goes_on(is_kept: bool, tmp_path: Path) -> None:
    x, y = drawn(30)
    whole = fit_field(x, y, steps=3)
    folder, stops = tmp_path if is_kept else None, iter([True])

    def interrupt(*_: Any) -> None:
        if next(stops, False):
            signal.raise_signal(signal.SIGINT)

    handle = register_optimizer_step_post_hook(interrupt)
    try:
        hint = f"the same call goes on from {tmp_path}" if is_kept else "with folder=..., a next call would go on"
        with pytest.raises(Interrupted, match=rf"^training: it stopped after 1 of 3 steps; {re.escape(hint)}"):
            fit_field(x, y, steps=3, folder=folder)
        again = fit_field(x, y, steps=3, folder=folder)
    finally:
        handle.remove()
    assert np.array_equal(again.predict(x)[0], whole.predict(x)[0])


def test_rows_without_a_value_change_nothing() -> None:
    """Their places are not counted in the scale."""
    x, y = drawn(30)
    more, gaps = np.concatenate([x, [[9e6, 1e6]] * 5]), np.concatenate([y, [np.nan] * 5])
    fields = fit_field(x, y, steps=2), fit_field(more, gaps, steps=2)
    assert np.array_equal(*(field.predict(x)[0] for field in fields))


X, Y = np.zeros((9, 2)), np.arange(9.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": X[:8]}, "y: got 9 rows, expected 8, as x has"),
        ({"x": X[:, :0]}, "x: got shape (9, 0), expected (N, columns) or (N,)"),
        ({"x": X + np.nan}, "x: got 18 missing numbers, expected finite numbers"),
        ({"x": X[None]}, "x: got shape (1, 9, 2), expected (N, columns) or (N,)"),
        ({"y": Y + np.inf}, "y: got an infinity, expected finite numbers, or NaN for a missing one"),
        ({"y": Y * np.nan}, "y: got 0 rows with a number, expected at least 5"),
        ({"y": ["a"] * 9}, "y: got a list (could not convert string to float: np.str_('a')), expected an array"),
        ({"y": Y.astype("M8[s]")}, "y: got a ndarray (datetime64[s]), expected an array or a table of numbers"),
        ({"maps": [1, 2]}, "maps: got shape (2,), expected (9,), a label for each row of x"),
        ({"maps": range(9)}, "maps: got only maps of one point, or without a complete point, expected at least one"),
        (
            {"maps": [0, 0, 1, 1, 2, 2, 3, 3, 4]},
            "maps: got only maps of two points, expected at least one",
        ),
        ({"maps": [0] * 8 + [None]}, "maps: got no label in row 8, expected a label for each row of x"),
        ({"y": np.stack([Y, Y * np.nan], 1)}, "y: got no number in column 1, expected a number in each column"),
        ({"system": "cmhp"}, "system: got 'cmhp', expected one of cmanp"),
        ({"system": "cmanp-and"}, "system: got 'cmanp-and', expected one of cmanp, lbanp, "),
        ({"steps": 0}, "steps: got 0, expected"),
        ({"model": {"dims": 3}}, "dims: got an unknown argument of cmanp, expected one of dim_x"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        fit_field(**({"x": X, "y": Y} | given))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_field_refuses_what_does_not_belong_to_it(fitted: Field, tmp_path: Path) -> None:
    before = fitted.state
    for call, message in (
        (lambda: fitted.predict(np.zeros((3, 1))), "x: got shape (3, 1), expected (N, 2)"),
        (lambda: fitted.predict(np.zeros((3, 2)), coverage=1.0), "coverage: got 1.0, expected a float between 0 and 1"),
        (lambda: fitted.update(np.zeros((3, 2)), np.zeros((3, 2))), "y: got shape (3, 2), expected (N, 1) or (N,)"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == message
    assert fitted.state is before
    with pytest.raises(
        FileNotFoundError, match=r": got a folder without model/config.json, expected one that `save` wrote$"
    ):
        Field.load(tmp_path)
    fitted.save(tmp_path)
    for name, text in (("fitted.json", '{"kind": "other"}'), ("fitted.json", "["), ("state.pt", "x")):
        fitted.save(tmp_path)
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=r"files that cannot be read \(.*\), expected a saved field$"):
            Field.load(tmp_path)
    fitted.save(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1  # as if a later `save` had been interrupted
    weights.write_bytes(changed)
    with pytest.raises(ValueError, match=r"got those of other files, expected files of one `save`"):
        Field.load(tmp_path)
    with pytest.raises(OSError, match=r"cannot be written"):
        fitted.save(tmp_path / "fitted.json")


def test_missing_values_do_not_count() -> None:
    x, y = _pairs([[0.0], [1.0]], [1.0, None])
    assert y[0] == 1 and np.isnan(y[1]) and x.shape == y.shape == (2, 1)
    assert numbers("x", pandas.DataFrame({"a": [1, 2]})).tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize("maps", [None, np.repeat(np.arange(12), 5)], ids=["one map", "maps"])
def test_systems_that_need_a_point_take_rows_that_lack_values(maps: Any) -> None:
    """Half of all numbers are missing, so that some maps have a single complete row."""
    (x, y), rng = drawn(60), np.random.default_rng(1)
    values = np.where(rng.random((60, 2)) < 0.5, np.nan, np.stack([y, -y], 1))
    found = fit_field(x, values, maps, system="tnp-d", steps=4, patience=1)
    if maps is not None:
        found.update(x[:1], [[300.0, -300.0]])
    assert np.isfinite(found.predict(x[:3])[1]).all()


def test_missing_numbers_of_masked_arrays_and_tables() -> None:
    masked = np.ma.MaskedArray([[1.0], [1e20], [3.0]], mask=[[False], [True], [False]])
    np.testing.assert_array_equal(numbers("y", masked, missing=True), [[1.0], [np.nan], [3.0]])
    table = pandas.DataFrame({"a": [1, None, 3], "b": [0.5, 1.5, None]}).convert_dtypes()
    np.testing.assert_array_equal(numbers("y", table, missing=True), [[1.0, 0.5], [np.nan, 1.5], [3.0, np.nan]])


def test_a_training_leaves_the_callers_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    with torch.no_grad():
        fit_field(*drawn(30), steps=1, seed=np.int64(2))
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.randn(4), expected)
