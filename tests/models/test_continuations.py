"""Point processes that continue a history, and models and events of a user's own data."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import cmab_models
import numpy as np
import pandas
import pytest
import torch
from cmab_models.data.departures import DAY, departures
from cmab_models.point_processes import CMHP, THP, Events, LogNormalMixture, PointProcess
from cmab_models.tasks import TASKS
from cmab_models.tasks.base import seeded
from scipy.integrate import quad
from scipy.stats import kstest
from torch import Tensor

SIZES: dict[type[PointProcess], dict[str, Any]] = {CMHP: {"num_latents": 3, "num_heads": 2}, THP: {"num_heads": 2}}


def made(kind: type[PointProcess], **changes: Any) -> PointProcess:
    torch.manual_seed(1)
    return kind(num_marks=3, dim=8, log_gap_mean=-0.5, **(SIZES[kind] | changes)).double().eval()


def mixture(*shape: int) -> LogNormalMixture:
    draws = torch.randn(3, *shape, 5, dtype=torch.float64, generator=seeded(3))
    return LogNormalMixture(draws[0], 3 * draws[1], draws[2].exp())


# ---- the mixture


def test_a_quantile_is_the_inverse_of_the_distribution() -> None:
    distribution, probability = mixture(7), torch.rand(11, 7, dtype=torch.float64, generator=seeded(4))
    gap = distribution.icdf(probability)
    torch.testing.assert_close(distribution.cdf(gap), probability, rtol=0, atol=1e-14)
    torch.testing.assert_close(distribution.log_survival(distribution.median), torch.full((7,), 0.5).double().log())
    tiny, (logits, loc, scale) = distribution.icdf(torch.tensor(1e-20).double()), _parts(distribution)
    # Its `cdf` has no digits there.
    found = (logits.log_softmax(-1) + torch.special.log_ndtr((tiny.log().unsqueeze(-1) - loc) / scale)).exp().sum(-1)
    torch.testing.assert_close(found, torch.full((7,), 1e-20).double(), rtol=1e-10, atol=0)
    assert distribution.icdf(torch.tensor(0.0)).eq(0).all() and distribution.icdf(torch.tensor(1.0)).isinf().all()


def test_float32_weights_have_quantiles_near_1() -> None:
    """The survival at the quantile of 1 - 1e-9 is 1e-9."""
    parts = [torch.randn(50, 8, generator=seeded(i)) for i in range(3)]
    distribution = LogNormalMixture(parts[0], parts[1], parts[2].exp())
    wide = LogNormalMixture(parts[0].double(), parts[1].double(), parts[2].exp().double())
    gap = distribution.icdf(torch.tensor(1 - 1e-9, dtype=torch.float64)).double()
    torch.testing.assert_close(wide.log_survival(gap), torch.full((50,), 1e-9).double().log(), rtol=1e-3, atol=0)


def test_the_variance_is_that_of_the_definition_or_infinite() -> None:
    distribution, (weights, loc, scale) = mixture(7), _parts(mixture(7))
    first, second = ((weights.softmax(-1) * (power * loc + (power * scale) ** 2 / 2).exp()).sum(-1) for power in (1, 2))
    torch.testing.assert_close(distribution.variance, second - first**2, rtol=1e-10, atol=0)
    narrow = LogNormalMixture(torch.zeros(1), torch.ones(1), torch.tensor([1e-3]))
    assert narrow.stddev.item() == pytest.approx(math.e * 1e-3, rel=1e-5)
    small = LogNormalMixture(torch.zeros(1).double(), torch.tensor([-800.0]).double(), torch.tensor([27.0]).double())
    assert small.variance.log().item() == pytest.approx(-1600 + 2 * 27**2, rel=1e-9)
    for wide in (14.0, 40.0):
        heavy = LogNormalMixture(torch.tensor([0.0, -200.0]), torch.zeros(2), torch.tensor([1.0, wide]))
        assert heavy.variance.isinf() and heavy.stddev.isinf()


def test_components_far_apart_have_a_quantile_in_one_of_them() -> None:
    far = LogNormalMixture(torch.zeros(1, 2), torch.tensor([[-50.0, 50.0]]), torch.full((1, 2), 0.1))
    assert far.icdf(torch.tensor(0.25)).log().item() == pytest.approx(-50, abs=1e-3)
    assert far.icdf(torch.tensor(0.75)).log().item() == pytest.approx(50, abs=1e-3)
    assert LogNormalMixture(torch.zeros(1, 1), torch.full((1, 1), 500.0), torch.ones(1, 1)).median.isinf()


def test_a_quantile_has_the_derivatives_of_the_implicit_function() -> None:
    given = [torch.randn(3, 4, dtype=torch.float64, generator=seeded(i)).requires_grad_() for i in range(3)]
    probability = torch.tensor([0.1, 0.5, 0.99], dtype=torch.float64, requires_grad=True)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda a, b, c, p: LogNormalMixture(a, b, c.exp()).icdf(p), [*given, probability])


def test_a_probability_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"value: got from 0\.5 to 1\.5, expected probabilities from 0 to 1"):
        mixture(2).icdf(torch.tensor([0.5, 1.5]))
    with pytest.raises(TypeError, match=r"value: got a float, expected a torch\.Tensor"):
        mixture(2).icdf(0.5)  # type: ignore[arg-type]  # wrong on purpose
    assert mixture().draw(seeded(1)).shape == ()


def test_gaps_are_drawn_from_the_distribution() -> None:
    distribution = mixture()
    many = LogNormalMixture(*(part.expand(4000, 5) for part in _parts(distribution)))
    gaps = many.draw(seeded(6))
    assert gaps.shape == (4000,) and kstest(distribution.cdf(gaps).numpy(), "uniform").pvalue > 0.01
    assert torch.equal(gaps, many.draw(seeded(6)))


def _parts(distribution: LogNormalMixture) -> tuple[Tensor, Tensor, Tensor]:
    components: Any = distribution.component_distribution
    return distribution.mixture_distribution.logits, components.loc, components.scale


def test_a_limited_mean_is_an_integral_of_the_survival() -> None:
    distribution, limit = mixture(4), torch.tensor([0.01, 1.0, 30.0, 500.0], dtype=torch.float64)
    steps = torch.linspace(0, 1, 200_001, dtype=torch.float64).unsqueeze(1)
    at = (steps**2 * limit).clamp(min=1e-12)  # dense near 0, where the survival changes fast
    integral = torch.trapezoid(distribution.log_survival(at).exp(), at, dim=0)
    torch.testing.assert_close(distribution.limited_mean(limit), integral, rtol=1e-6, atol=0)
    heavy = LogNormalMixture(torch.tensor([[9.0, -9.0]]), torch.zeros(1, 2), torch.tensor([[0.5, 30.0]]))
    assert heavy.mean.isinf() and heavy.limited_mean(torch.tensor(50.0)).item() == pytest.approx(1.13315, rel=1e-3)
    wide = LogNormalMixture(torch.zeros(1).double(), torch.zeros(1).double(), torch.tensor([20.0]).double())
    limit = torch.tensor(12 * 20.0, dtype=torch.float64).exp()  # far out, where ndtr is 0
    found = quad(lambda z: math.exp(20 * z - z * z / 2) / math.sqrt(2 * math.pi), -10, 12, limit=500)[0]
    found += float((limit.log() + torch.special.log_ndtr(torch.tensor(-12.0).double())).exp())
    assert wide.limited_mean(limit).item() == pytest.approx(found, rel=1e-6)
    plain = LogNormalMixture(torch.zeros(1), torch.zeros(1), torch.ones(1))
    torch.testing.assert_close(plain.limited_mean(torch.tensor(1e9)), plain.mean)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"limit: got from .*, expected finite numbers > 0"):
            plain.limited_mean(torch.tensor(wrong))
    with pytest.raises(TypeError, match="limit: got a float"):
        plain.limited_mean(1.0)  # type: ignore[arg-type]  # wrong on purpose


def test_a_distribution_can_be_expanded() -> None:
    distribution, gaps = mixture(3), torch.rand(2, 3, dtype=torch.float64, generator=seeded(1))
    wide = distribution.expand((2, 3))
    assert isinstance(wide, LogNormalMixture) and wide.batch_shape == (2, 3) and wide.sample((5,)).shape == (5, 2, 3)
    for name in ("log_prob", "log_survival", "intensity"):
        torch.testing.assert_close(getattr(wide, name)(gaps), getattr(distribution, name)(gaps), rtol=1e-12, atol=0)
    torch.testing.assert_close(wide.median, distribution.median.expand(2, 3), rtol=1e-12, atol=0)
    with pytest.raises(TypeError, match="value: got a float"):
        wide.log_prob(1.0)  # type: ignore[arg-type]  # wrong on purpose


# ---- continuations


def residuals(model: PointProcess, whole: tuple[Tensor, Tensor, Tensor], until: Tensor, history: int) -> Tensor:
    """The integrated intensity from event to event after a history of some events, over all sequences as if one came
    after the other."""
    times, _, lengths = whole
    there = torch.arange(times.shape[1]) < lengths.unsqueeze(1)
    gaps = times.diff(dim=1, prepend=torch.zeros(len(times), 1, dtype=torch.float64))
    found = torch.zeros_like(gaps)
    with torch.no_grad():
        found[there] = -model.next_events(*whole).time.log_survival(gaps[there])
        rest = -model.log_prob(*whole, end=until).survival
    waited, rescaled = 0.0, []
    for row, length in enumerate(lengths.tolist()):
        for step in found[row, history:length].tolist():
            rescaled.append(waited + step)
            waited = 0.0
        waited += float(rest[row])
    return torch.tensor(rescaled)


@pytest.mark.parametrize("history", [0, 4])
@pytest.mark.parametrize("kind", SIZES)
def test_rescaled_times_are_exponential(kind: type[PointProcess], history: int) -> None:
    """The events that follow a history have the intensity that the history predicts, each sequence to its own end."""
    model, numbers = made(kind), seeded(7)
    past = torch.rand(250, history, dtype=torch.float64, generator=numbers).cumsum(1)
    kinds, state = torch.randint(3, (250, history), generator=numbers), None
    for time, mark in zip(past.T, kinds.T, strict=True):
        state = model.observe(state, time, mark)
    until = history + 2 + 5 * torch.rand(250, dtype=torch.float64, generator=numbers)
    times, marks, there = model.sample(state, until, numbers)
    assert there.sum(1).unique().numel() > 5
    whole = torch.cat([past, times], 1), torch.cat([kinds, marks], 1), history + there.sum(1)
    rescaled = residuals(model, whole, until, history)
    assert len(rescaled) > 800
    assert kstest(rescaled.numpy(), "expon").pvalue > 0.01
    of_sampled = torch.cat([torch.zeros(250, history, dtype=torch.bool), there], 1)
    of_all = torch.arange(of_sampled.shape[1]) < whole[2].unsqueeze(1)
    predicted = model.next_events(*whole).mark.probs[of_sampled[of_all]].mean(0)
    often = marks[there].bincount(minlength=3).double() / there.sum()
    assert (predicted - often).abs().max() < 4 * (0.25 / len(rescaled)) ** 0.5


@pytest.mark.parametrize("kind", SIZES)
def test_a_continuation_begins_after_its_history(kind: type[PointProcess]) -> None:
    model, last = made(kind), torch.tensor([0.5, 2.5, 3.0, 1.0], dtype=torch.float64)
    state = model.observe(None, last, torch.tensor([0, 1, 2, 0]))
    before = [part.clone() for part in _tensors(state)]
    until = torch.tensor([3.0, 3.5, 3.0, 9.0], dtype=torch.float64)
    times, marks, there = model.sample(state, until, seeded(2))
    assert times.shape == marks.shape == there.shape and times.dtype == torch.float64 and marks.dtype == torch.int64
    lengths = there.sum(1)
    assert (
        torch.equal(there, torch.arange(there.shape[1]) < lengths.unsqueeze(1)) and lengths[2] == 0 and lengths[3] > 3
    )
    for row, length in enumerate(lengths.tolist()):
        own = torch.cat([last[row : row + 1], times[row, :length]])
        assert (own.diff() > 0).all() and (own <= until[row]).all()
    assert not times[~there].any() and not marks[~there].any() and (marks[there] < 3).all()
    assert all(map(torch.equal, before, _tensors(state)))
    again = model.sample(state, until, seeded(2))
    assert all(map(torch.equal, again, (times, marks, there)))
    assert not times.requires_grad


def _tensors(state: Any) -> list[Tensor]:
    return [part for each in state for part in (each if isinstance(each, tuple) else (each,))]


def test_no_event_comes_before_a_time_that_is_near() -> None:
    assert [tuple(part.shape) for part in made(CMHP).sample(None, 1e-12)] == [(1, 0)] * 3


def test_wrong_arguments_of_a_continuation_are_named() -> None:
    model = made(CMHP)
    state = model.observe(None, torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
    for until, kind, told in (
        (1.5, ValueError, "until: got a time that is negative, before"),
        (math.inf, ValueError, "until: got a time that is negative, before the one before it, infinite or NaN"),
        (torch.ones(3), ValueError, r"until: got shape \(3,\), expected a number, or \(2,\), the batch of the state"),
        ("soon", TypeError, "until: got a str, expected a number"),
        (None, TypeError, "until: got None, expected a number"),
    ):
        with pytest.raises(kind, match=told):
            model.sample(state, until)
    with pytest.raises(RuntimeError, match="until: got a time before which more than 5 events come"):
        model.sample(state, 1e3, max_events=5)
    with pytest.raises(ValueError, match="max_events: got 0"):
        model.sample(state, 3.0, max_events=0)
    with pytest.raises(TypeError, match="state: got an int"):
        model.sample(3, 3.0)
    model.head.time.bias.data.fill_(math.nan)
    with pytest.raises(RuntimeError, match=r"sample: got a NaN|probability tensor contains"):
        model.sample(state, 3.0)


# ---- own data


def test_a_model_for_events_has_their_scale() -> None:
    """Departures in hours: with the constructor's defaults an untrained model expects the wrong scale of time."""
    found = departures().train
    train = found._replace(times=found.times / 60, end=found.end / 60)
    gaps = train.gaps()[train.there]
    model = CMHP.for_events(train, period=DAY / 60, dim=16, num_latents=4, num_heads=2)
    assert model.num_marks == int(train.marks.max()) + 1 and model.embedding.period == 24.0
    assert model.head.log_gaps.mean == pytest.approx(
        float(gaps.log().mean())
    ) and model.head.log_gaps.std == pytest.approx(float(gaps.log().std()))
    assert CMHP.for_events(train, num_marks=200, dim=8).num_marks == 200
    assert THP.for_events(train, dim=8).embedding.period == pytest.approx(math.exp(float(gaps.log().mean())))
    with pytest.raises(TypeError, match="events: got a list, expected Events"):
        CMHP.for_events([1.0])  # type: ignore[arg-type]  # wrong on purpose


def test_equal_times_do_not_spoil_the_scale() -> None:
    events = Events.pad([[1.0, 1.0, 3.0], []], [[0, 1, 0], []], [4.0, 4.0])
    arguments = THP.for_events(events, dim=8)
    assert arguments.head.log_gaps.mean == pytest.approx(math.log(2) / 2) and arguments.num_marks == 2
    nothing = THP.for_events(Events.pad([[]], [[]], [1.0]), dim=8)
    assert nothing.head.log_gaps == (0.0, 1.0) and nothing.num_marks == 1


@pytest.mark.parametrize("every", [0.1, 6.0, 1 / 3, 86_400.0])
def test_the_ticks_of_a_clock_have_a_scale_of_1(every: float) -> None:
    """Times that are multiples of a number have gaps that differ by rounding."""
    ticks = every * torch.arange(1, 2_000, dtype=torch.float64)
    model = THP.for_events(Events.pad([ticks], [torch.zeros(len(ticks))], [float(ticks[-1])]), dim=8)
    assert model.head.log_gaps == (pytest.approx(math.log(every)), 1.0)


@pytest.mark.parametrize("kind", [CMHP, THP])
def test_a_unit_in_which_gaps_vanish_is_refused(kind: type[CMHP | THP]) -> None:
    times = 1e-9 * torch.arange(1, 9, dtype=torch.float64).square()
    with pytest.raises(ValueError, match=r"log_gap_mean: got -1.+, expected at least -16.1, gaps of 1e-07; use"):
        kind.for_events(Events.pad([times], [torch.zeros(8)], [1e-7]), dim=8)


TABLE = pandas.DataFrame(
    {
        "when": pandas.to_datetime(["2026-01-01 08:00", "2026-01-02 12:30", "2026-01-01 09:00", "2026-01-01 09:00"]),
        "what": ["rain", "sun", "snow", "rain"],
        "where": [7, 3, 3, 7],
        "number": [3.0, 1, 2, 5],
    }
)


ZONED = TABLE.assign(when=(TABLE.when + pandas.Timedelta(100, "D")).dt.tz_localize("Europe/Berlin"))
"""Between the two nights in which the clocks change."""


@pytest.mark.parametrize(
    ("times", "kind", "start"),
    [
        ([1_700_000_000_000_000_001, 1_700_000_000_000_000_004], "int64", 1_699_999_999_999_999_999.0),
        ([1_700_000_000_000_000_001, 1_700_000_000_000_000_004], "int64", 0.5),
        ([1_700_000_000_000_000_001, 1_700_000_000_000_000_004], "int64", None),
        ([2**63 + 1, 2**63 + 4, 2**64 - 1], "uint64", None),
        ([2**63 + 1, 2**63 + 4], "uint64", 2**63),
        ([2**63 + 1, 2**63 + 4], "UInt64", 2.0**63),
        ([-(2**63), 0, 2**63 - 1], "int64", None),
        ([5, 7], "int64", -(2**63)),
        ([0.25, 0.5], "float32", 0.1),
    ],
)
def test_times_are_the_exact_differences_rounded_once(times: list[Any], kind: str, start: Any) -> None:
    found = cmab_models.events_from_frame(pandas.DataFrame({"t": pandas.array(times, dtype=kind)}), "t", start=start)
    first = Fraction(times[0] if start is None else start)
    expected = [float(Fraction(each) - first) for each in times]
    assert found.events.times.tolist() == [expected] and found.events.end.tolist() == [expected[-1]]


@pytest.mark.parametrize("kind", ["int64", "Int64", "boolean", "Float64", "category", "object"])
def test_labels_are_python_s_own(kind: str) -> None:
    """So that JSON holds them."""
    marks = pandas.Series([0, 1, 0, 1]).astype(kind)
    found = cmab_models.events_from_frame(pandas.DataFrame({"t": range(4), "mark": marks}), "t", "mark")
    assert json.loads(json.dumps(found.marks)) == [0, 1] and found.events.marks.tolist() == [[0, 1, 0, 1]]


def test_a_table_becomes_events() -> None:
    found = cmab_models.events_from_frame(TABLE, "when", "what", "where", start="2026-01-01", end="2026-01-03")
    assert found.marks == ("rain", "snow", "sun") and found.sequences == (3, 7) and found.unit == "h"
    assert found.events.times.tolist() == [[9.0, 36.5], [8.0, 9.0]] and found.events.marks.tolist() == [[1, 2], [0, 0]]
    assert found.events.end.tolist() == [48.0, 48.0] and found.start == pandas.Timestamp("2026-01-01")
    zoned = TABLE.assign(when=TABLE.when.dt.tz_localize("Europe/Berlin"))
    here = cmab_models.events_from_frame(zoned, "when", "what", "where", start="2026-01-01", end="2026-01-03")
    assert all(map(torch.equal, here.events, found.events)) and str(here.start.tz) == "Europe/Berlin"
    late = cmab_models.events_from_frame(TABLE.assign(number=[10**18, 10**18 + 1, 10**18 + 5, 10**18 + 9]), "number")
    # A float64 cannot hold the times, but holds the differences.
    assert late.events.times.tolist() == [[0.0, 1.0, 5.0, 9.0]]
    for narrow in ("int8", "int16", "uint8", "float16"):
        times = np.array([5, 100, 120] if narrow == "uint8" else [-100, 0, 100]).astype(narrow)
        few = cmab_models.events_from_frame(pandas.DataFrame({"t": times}), "t", start=-100.5)
        assert few.events.times.tolist() == [(times.astype(float) + 100.5).tolist()], "no difference leaves the range"
    in_minutes = cmab_models.events_from_frame(zoned, "when", unit="m")
    assert in_minutes.events.times.tolist() == [[0.0, 60.0, 60.0, 1710.0]] and in_minutes.marks == ()
    numbers = cmab_models.events_from_frame(TABLE, "number", "what", start=0)
    assert numbers.events.times.tolist() == [[1.0, 2.0, 3.0, 5.0]] and numbers.events.marks.tolist() == [[2, 1, 0, 0]]
    shuffled = cmab_models.events_from_frame(
        TABLE.iloc[::-1], "when", "what", "where", start="2026-01-01", end="2026-01-03"
    )
    assert all(map(torch.equal, shuffled.events, found.events))


def test_other_tables_become_pandas() -> None:
    class Other:
        def to_pandas(self) -> pandas.DataFrame:
            return TABLE

    assert cmab_models.events_from_frame(Other(), "number").events.lengths.tolist() == [4]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"time": "then"}, "time: got 'then', expected one of the columns when, what, where, number"),
        ({"time": "what"}, "time: got a column of (str|object), expected numbers or timestamps"),
        ({"mark": "who"}, "mark: got 'who'"),
        ({"start": "2026-01-02"}, "start: got 2026-01-02 00:00:00"),
        ({"end": "2026-01-02"}, "end: got 2026-01-02 00:00:00"),
        ({"start": "2026-01-01T00:00Z"}, "start: got '2026-01-01T00:00Z', expected a time without a time zone"),
        ({"start": "soon"}, "start: got 'soon'"),
        ({"end": math.nan}, "end: got nan, expected a time"),
        ({"time": "number", "end": "soon"}, "end: got 'soon', expected a finite number"),
        ({"marks": ["rain", "sun", "rain"]}, "marks: got 'rain' more than once, expected different labels"),
        (
            {"frame": ZONED, "start": "2026-03-29 02:30"},
            "start: got 2026-03-29 02:30:00, which is not one time in Europe",
        ),
        ({"frame": ZONED, "end": "2026-10-25 02:30"}, "end: got 2026-10-25 02:30:00, which is not one time in Europe"),
        ({"time": "number", "start": 2**70}, f"start: got {2**70}, expected times from 1.0 to 5.0 inside"),
        ({"unit": "years"}, "unit: got 'years', expected one of D, h, m, s"),
        ({"frame": [1]}, "frame: got a list, expected a pandas.DataFrame"),
        ({"frame": TABLE.iloc[:0]}, "frame: got no row"),
        ({"frame": TABLE.assign(what=["rain", None, None, "sun"])}, "mark: got 2 missing values in 'what'"),
        ({"frame": TABLE.assign(when=TABLE.when.where(TABLE.number > 1))}, "time: got 1 missing values in 'when'"),
    ],
)
def test_wrong_tables_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        cmab_models.events_from_frame(**({"frame": TABLE, "time": "when", "mark": "what"} | given))


# ---- published events as tasks


def _folder(path: Path) -> str:
    numbers = np.random.default_rng(1)
    sequences = []
    for _ in range(10):
        times = numbers.exponential(100.0, 8).cumsum()
        sequences.append(
            {"arrival_times": times, "marks": numbers.integers(3, size=8), "t_start": 0.0, "t_end": float(times[-1])}
        )
    torch.save({"sequences": sequences}, path / "mooc.pkl")
    return str(path)


@pytest.mark.parametrize("system", ["cmhp", "thp"])
def test_published_events_are_a_task(system: str, tmp_path: Path) -> None:
    task: Any = TASKS["mooc"]().changed({"folder": _folder(tmp_path), "batch_size": 3})
    train, test = task.events("train"), task.events("test")
    assert (len(train.lengths), len(test.lengths)) == (6, 2)
    model = task.model(system, dim=8).eval()
    task.loss(model, task.batch(seeded(1))).backward()
    scores = task.evaluate(model)
    with torch.no_grad():
        guess = model.next_events(*test[:3]).time
    error = (guess.median.double() - test.gaps()[test.there]).square().mean().sqrt()
    assert scores["rmse_median"] == pytest.approx(float(error)) and scores["rmse"] > 0 and 0 <= scores["accuracy"] <= 1
    assert set(task.references()) >= {"exponential_time", "last_accuracy"}


def test_a_folder_without_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"folder: got .*, expected a folder with one of reddit\.pkl, reddit\.csv, reddit_actions\.tsv"
    ):
        TASKS["reddit"]().changed({"folder": str(tmp_path)}).sizes("cmhp")
