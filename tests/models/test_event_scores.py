"""Scores of events and trivial scores follow their definitions, and a user's own data gets a sound scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cmab_models
import numpy as np
import pandas
import pytest
import torch
from cmab_models.point_processes import CMHP, THP, Events, LogNormalMixture, PointProcess
from cmab_models.tasks import TASKS
from cmab_models.tasks.base import seeded

SIZES: dict[type[PointProcess], dict[str, Any]] = {CMHP: {"num_latents": 3, "num_heads": 2}, THP: {"num_heads": 2}}


def some_events(seed: int, sequences: int = 5, mean: float = 0.12) -> Events:
    """A Poisson process with three marks, of which the last is rare."""
    numbers = np.random.default_rng(seed)
    times = [numbers.exponential(mean, 20 + i).cumsum() for i in range(sequences)]
    marks = [numbers.choice(3, len(each), p=[0.5, 0.4, 0.1]) for each in times]
    return Events.pad(times, marks, [each[-1] + 0.5 * mean for each in times])


TRAIN, TEST = some_events(1), some_events(2)


@pytest.mark.parametrize("kind", SIZES)
def test_scores_are_those_of_single_predictions(kind: type[PointProcess]) -> None:
    torch.manual_seed(0)
    model = kind.for_events(TRAIN, dim=8, **SIZES[kind]).double().eval()
    found, longest = cmab_models.event_scores(model, TRAIN, TEST), TRAIN.gaps().max()
    sums: dict[str, float] = dict.fromkeys(found, 0.0)
    for row, length in enumerate(TEST.lengths.tolist()):
        state, last = None, torch.zeros(1, dtype=torch.float64)
        for time, mark in zip(TEST.times[row, :length, None], TEST.marks[row, :length, None], strict=True):
            waiting, which = model.next_event(state)
            sums["time"] += float(waiting.log_prob(time - last).detach())
            sums["mark"] += float(which.log_prob(mark).detach())
            sums["accuracy"] += float(which.probs.argmax() == mark)
            for name, guess in (
                ("rmse", waiting.mean),
                ("rmse_limited", waiting.limited_mean(longest)),
                ("rmse_median", waiting.median),
            ):
                sums[name] += float((guess - (time - last)).detach()) ** 2
            state, last = model.observe(state, time, mark), time
        sums["time"] += float(model.next_event(state).time.log_survival(TEST.end[row] - last).detach())
    for name, total in sums.items():
        mean = total / int(TEST.lengths.sum())
        assert found[name] == pytest.approx(mean**0.5 if name.startswith("rmse") else mean, rel=1e-9)


def test_trivial_scores_are_those_of_counts() -> None:
    found = cmab_models.trivial_event_scores(TRAIN, TEST)
    (known, came), marks = (part.gaps()[part.there] for part in (TRAIN, TEST)), TEST.marks[TEST.there]
    rate = len(known) / float(TRAIN.end.sum())
    assert found["exponential_time"] == pytest.approx(math.log(rate) - rate * float(TEST.end.sum()) / len(came))
    assert found["mean_gap_rmse"] == pytest.approx(float(((came - known.mean()) ** 2).mean().sqrt()))
    assert found["mean_gap_rmse_limited"] == found["mean_gap_rmse"]
    assert found["median_gap_rmse_median"] == pytest.approx(float(((came - known.median()) ** 2).mean().sqrt()))
    counts = TRAIN.marks[TRAIN.there].bincount().double()
    assert found["frequency_accuracy"] == pytest.approx(float((marks == counts.argmax()).double().mean()))
    assert found["frequency_mark"] == pytest.approx(float(((counts + 1) / (counts.sum() + 3))[marks].log().mean()))


def test_every_score_of_a_model_has_a_trivial_one() -> None:
    scores = cmab_models.event_scores(CMHP.for_events(TRAIN, dim=8), TRAIN, TEST)
    trivial = cmab_models.trivial_event_scores(TRAIN, TEST)
    assert all(any(name.endswith(f"_{score}") for name in trivial) for score in scores)


@pytest.mark.parametrize("spike", [False, True], ids=["smooth", "with equal times"])
def test_renewal_time_is_the_likelihood_of_the_gaps_alone(spike: bool) -> None:
    """Gaps of a known distribution get nearly its likelihood, and no history can add to it."""
    parts = [
        part.double() for part in (torch.tensor([0.3, 0.7]).log(), torch.tensor([-2.0, 1.0]), torch.tensor([0.5, 0.3]))
    ]
    of_gaps, end = LogNormalMixture(*(part.expand(500, 40, 2) for part in parts)), torch.full((500,), 12.0)

    def drawn(seed: int) -> Events:
        times = (of_gaps.draw(seeded(seed)) * (torch.arange(40) % 4 > 0 if spike else 1)).cumsum(1)
        rows = [row[row <= 12] for row in times]
        return Events.pad(rows, [torch.zeros(len(row)) for row in rows], end)

    train, test = drawn(1), drawn(2)
    found = cmab_models.trivial_event_scores(train, test)
    if spike:  # a Poisson process has no density for events at equal times that is comparable with that of a mixture
        assert found["renewal_time"] > found["exponential_time"] + 4
    else:
        exact, last = LogNormalMixture(*parts), test.times.amax(1)
        total = exact.log_prob(test.gaps()[test.there]).sum() + exact.log_survival(end.double() - last).sum()
        assert found["renewal_time"] == pytest.approx(float(total / test.lengths.sum()), abs=0.02)
        assert found["renewal_time"] > found["exponential_time"] + 0.2


@pytest.mark.parametrize("score", [cmab_models.trivial_event_scores, lambda *a: cmab_models.event_scores(None, *a)])
def test_what_cannot_be_scored_is_named(score: Any) -> None:
    none = Events.pad([[]], [[]], [1.0])
    for given, kind, told in (
        ((none, TEST), ValueError, "train: got no event, or events observed for no time, expected events"),
        ((TRAIN, none), ValueError, "test: got no event"),
        ((Events.pad([[0.0]], [[0]], [0.0]), TEST), ValueError, "train: got no event, or events observed for no time"),
        ((TRAIN, [1.0]), TypeError, "test: got a list, expected Events"),
    ):
        with pytest.raises(kind, match=told):
            score(*given)


# ---- a model with the scale of its data


def test_a_model_of_short_gaps_is_near_a_poisson_process_from_the_start() -> None:
    """Gaps of 0.12 on average: the constructor's defaults expect gaps near 1."""
    train, test = some_events(3, sequences=40), some_events(4, sequences=40)
    poisson = cmab_models.trivial_event_scores(train, test)["exponential_time"]
    scores, medians = {}, {}
    for name, make in (
        ("fitted", lambda: CMHP.for_events(train, dim=16, num_latents=4, num_heads=2)),
        ("default", lambda: CMHP(num_marks=3, dim=16, num_latents=4, num_heads=2)),
    ):
        torch.manual_seed(0)
        model = make().eval()
        scores[name] = cmab_models.event_scores(model, train, test)["time"]
        with torch.no_grad():
            medians[name] = model.next_events(*test[:3]).time.median
    assert poisson - 0.3 < scores["fitted"] < poisson and scores["default"] < poisson - 1.5
    assert 0.03 < medians["fitted"].min() <= medians["fitted"].max() < 0.3 and medians["default"].median() > 0.3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", SIZES)
def test_a_model_in_another_unit_is_warned_of_in_training(kind: type[PointProcess]) -> None:
    days = TRAIN._replace(times=TRAIN.times / 24, end=TRAIN.end / 24)
    with pytest.warns(
        RuntimeWarning, match=r"log_gap_mean, log_gap_std: got 0, 1, far from .* as `for_events` finds"
    ) as told:
        kind(3, dim=8, **SIZES[kind]).log_prob(*days)
    assert told[0].filename == __file__
    kind(3, dim=8, **SIZES[kind]).eval().log_prob(*days)
    fitted = kind.for_events(days, dim=8, **SIZES[kind])
    fitted.log_prob(*days)
    fitted.log_prob(torch.zeros(1, 5).double(), torch.zeros(1, 5).long())  # equal times tell nothing about the unit
    fitted.log_prob(torch.zeros(1, 0).double(), torch.zeros(1, 0).long())


# ---- tables


TABLE = pandas.DataFrame({"when": [1, 2, 2, 4], "what": ["sun", "rain", "sun", "snow"], "user": [0, 0, 1, 1]})


def test_a_later_table_has_the_numbers_of_the_first() -> None:
    known = ("hail", "rain", "snow", "sun")
    found = cmab_models.events_from_frame(TABLE, "when", "what", "user", start=0, marks=known)
    assert found.marks == known and found.events.marks.tolist() == [[3, 1], [3, 2]]
    first = cmab_models.events_from_frame(TABLE, "when", "what", "user", start=0)
    later = cmab_models.events_from_frame(TABLE.iloc[:1], "when", "what", start=0, marks=first.marks)
    assert later.events.marks.tolist() == [[first.marks.index("sun")]] and later.marks == first.marks
    with pytest.raises(
        ValueError, match=r"mark: got 2 labels that `marks` lacks, such as 'snow', expected only 'rain'"
    ):
        cmab_models.events_from_frame(TABLE, "when", "what", marks=["rain"])
    with pytest.raises(ValueError, match="mark: got None, expected the column of the labels `marks`"):
        cmab_models.events_from_frame(TABLE, "when", marks=known)


def test_a_coarse_clock_has_no_equal_times() -> None:
    given = {"frame": TABLE, "time": "when", "mark": "what", "sequence": "user"}
    coarse = cmab_models.events_from_frame(**given, start=0, end=4).events
    found = cmab_models.events_from_frame(**given, start=0, end=4, resolution=1).events
    assert ((found.times >= coarse.times) & (found.times < coarse.times + 1)).all()
    assert found.end.tolist() == [float(found.times.max())] * 2 and torch.equal(found.marks, coarse.marks)
    again = cmab_models.events_from_frame(**given, start=0, end=9, resolution=1).events
    assert torch.equal(again.times, found.times) and again.end.tolist() == [9.0, 9.0]
    tied = cmab_models.events_from_frame(pandas.DataFrame({"t": [0.0] * 200}), "t", resolution=0.1).events
    assert (tied.gaps()[0, 1:] > 0).all() and 0.09 < tied.times.max() < 0.1
    for wrong in (-1.0, math.nan, math.inf, "h"):
        with pytest.raises(ValueError, match=r"resolution: got .*, expected a finite number >= 0"):
            cmab_models.events_from_frame(TABLE, "when", resolution=wrong)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"frame": pandas.DataFrame([[1, "a", "b"]], columns=["when", "what", "what"])},
            "mark: got 'what', the name of 2",
        ),
        (
            {"frame": pandas.DataFrame([[1, 2, "b"]], columns=["when", "when", "what"])},
            "time: got 'when', the name of 2",
        ),
        (
            {"frame": TABLE.assign(what=[[1], [2], [1], [2]])},
            "mark: got a column of labels with unhashable type: 'list'",
        ),
        (
            {"sequence": "user", "frame": TABLE.assign(user=[{}] * 4)},
            "sequence: got a column of labels with unhashable",
        ),
        ({"time": ["when"]}, r"time: got \['when'\], expected one of the columns when, what, user"),
        ({"frame": TABLE.assign(when=[1.0, 2.0, np.inf, 3.0])}, "time: got an infinity, expected finite numbers"),
    ],
)
def test_what_a_table_cannot_hold_is_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        cmab_models.events_from_frame(**({"frame": TABLE, "time": "when", "mark": "what"} | given))


# ---- published interactions as tasks


def _interactions(path: Path, users: int) -> str:
    """Write a file in JODIE's format, in which each user has items of its own."""
    numbers, rows = np.random.default_rng(1), []
    for user in range(users):
        for time in numbers.exponential(4000.0, 150).cumsum():
            rows.append((time, f"{user},{2 * user + numbers.integers(2)},{time:.1f},0,0.5,0.25"))
    lines = [
        "user_id,item_id,timestamp,state_label,comma_separated_list_of_features",
        *(row for _, row in sorted(rows)),
    ]
    (path / "reddit.csv").write_text("\n".join(lines) + "\n")
    return str(path)


def test_users_are_in_one_part_only(tmp_path: Path) -> None:
    task: Any = TASKS["reddit"]().changed({"folder": _interactions(tmp_path, 10), "batch_size": 3})
    train, test = task.events("train"), task.events("test")
    assert (len(train.lengths), len(test.lengths)) == (12, 4) and set(train.lengths.tolist()) == {128, 22}
    of_train, of_test = (set((part.marks[part.there] // 2).tolist()) for part in (train, test))
    assert (len(of_train), len(of_test)) == (6, 2) and not of_train & of_test
    assert task.num_marks > max(int(train.marks.max()), int(test.marks.max()))
    model = task.model("cmhp", dim=8).eval()
    task.loss(model, task.batch(seeded(1))).backward()
    scores, trivial = task.evaluate(model), task.references()
    assert all(any(name.endswith(f"_{score}") for name in trivial) for score in scores)
    assert len(list(task.stream(model))) == int(test.lengths.max())


def test_too_few_users_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder: got '.*', with 4 sequences, expected at least 5"):
        TASKS["reddit"]().changed({"folder": _interactions(tmp_path, 4)}).sizes("cmhp")


@pytest.mark.parametrize("unit", [1.0, 1e-6])
def test_a_sequence_that_ends_with_its_last_event_surely_survives(unit: float) -> None:
    times = unit * torch.arange(1, 6, dtype=torch.float64).square()[None]
    events = Events.pad(times, torch.zeros(1, 5), times[:, -1])
    assert CMHP.for_events(events, dim=8).log_prob(*events).survival.item() == 0
