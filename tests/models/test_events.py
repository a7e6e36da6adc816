"""Point processes: streaming equals batch, nothing leaks, distributions are normalised,
and the exact process is exact."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models.data.hawkes import Hawkes
from cmab_models.pictures import draw
from cmab_models.pictures.intensity import figure
from cmab_models.point_processes import CMHP, THP, Events, LogNormalMixture, PointProcess
from cmab_models.tasks.base import seeded
from cmab_models.tasks.events import HawkesTask
from torch import Tensor

SIZES: dict[type[PointProcess], dict[str, Any]] = {
    CMHP: {"dim": 12, "num_latents": 3, "output_latents": 2, "num_heads": 3, "depth": 2},
    THP: {"dim": 12, "num_heads": 3, "depth": 2},
}
FLOATS = (torch.float32, torch.float64)
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
LENGTHS = torch.tensor([13, 9, 1])
SMALL = HawkesTask(sequences=20, end=10.0, batch_size=4)


def made(kind: type[PointProcess], **changes: Any) -> PointProcess:
    torch.manual_seed(1)
    return kind(4, log_gap_mean=-0.5, log_gap_std=1.3, **(SIZES[kind] | changes)).double().eval()


def some_events() -> tuple[Tensor, Tensor]:
    times = torch.rand(3, 13, dtype=torch.float64, generator=seeded(5)).cumsum(1)
    return times, torch.randint(4, (3, 13), generator=seeded(6))


@pytest.mark.parametrize(("kind", "changes"), [(CMHP, {}), (CMHP, {"queries": "latents"}), (THP, {})])
def test_events_one_by_one_get_the_predictions_of_all_at_once(
    kind: type[PointProcess], changes: dict[str, Any]
) -> None:
    model, (times, marks) = made(kind, **changes), some_events()
    end = times[torch.arange(3), LENGTHS - 1] + 0.3
    padding = torch.arange(13) >= LENGTHS.unsqueeze(1)
    with torch.no_grad():
        at_once = model.log_prob(times.masked_fill(padding, torch.nan), marks.masked_fill(padding, -7), LENGTHS, end)
        for row, length in enumerate(LENGTHS.tolist()):
            state, last = None, torch.zeros(1, dtype=torch.float64)
            for i in range(length):
                time, mark = times[row : row + 1, i], marks[row : row + 1, i]
                predicted = model.next_event(state)
                torch.testing.assert_close(predicted.time.log_prob(time - last)[0], at_once.time[row, i], **TIGHT)
                torch.testing.assert_close(predicted.mark.log_prob(mark)[0], at_once.mark[row, i], **TIGHT)
                assert (predicted.mark.probs.argmax() == mark) == at_once.correct[row, i]
                state, last = model.observe(state, time, mark), time
            survival = model.next_event(state).time.log_survival(end[row] - last)
            torch.testing.assert_close(survival[0], at_once.survival[row], **TIGHT)
    for part in at_once[:2]:
        assert torch.equal(part == 0, padding)


@pytest.mark.parametrize("kind", SIZES)
def test_sequences_without_events_have_the_likelihood_of_none(kind: type[PointProcess]) -> None:
    model, end = made(kind), torch.tensor([1.0, 2.0], dtype=torch.float64)
    with torch.no_grad():
        found = model.log_prob(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64), end=end)
        torch.testing.assert_close(found.survival, model.next_event(None).time.log_survival(end), **TIGHT)


@pytest.mark.parametrize("kind", SIZES)
def test_the_intensity_between_events_is_that_of_the_stream(kind: type[PointProcess]) -> None:
    model, (times, marks) = made(kind), some_events()
    at = torch.tensor([0.1, 2.0, 50.0], dtype=torch.float64)
    with torch.no_grad():
        curve, state, last = model.intensity(times[0], marks[0], at), None, 0.0
        for i, t in enumerate(at):
            for time, mark in zip(times[0], marks[0], strict=True):
                if last < time < t:
                    state, last = model.observe(state, time.view(1), mark.view(1)), time
            torch.testing.assert_close(model.next_event(state).time.intensity(t - last)[0], curve[i], **TIGHT)


def test_the_state_of_a_cmhp_has_a_constant_size() -> None:
    model, (times, marks) = made(CMHP), some_events()
    sizes, state = set(), None
    with torch.no_grad():
        for time, mark in zip(times.T, marks.T, strict=True):
            state = model.observe(state, time, mark)
            sizes.add(tuple(part.shape for part in (*state.attention, state.time)))
    assert len(sizes) == 1


@pytest.mark.parametrize("queries", ["newest", "latents"])
def test_queries_of_a_cmhp_hold_the_newest_event_or_not(queries: str) -> None:
    model, (times, marks) = SMALL.changed({"queries": queries}).model("cmhp"), some_events()
    with torch.no_grad():
        state = model.observe(None, times[:, 0], marks[:, 0].clamp(max=2))
        found, other = (model.next_event(each).mark.probs for each in (state, state._replace(newest=state.newest + 1)))
    assert torch.equal(found, other) == (queries == "latents")


def test_a_cmhp_that_was_saved_without_a_word_on_queries_holds_the_newest_event(tmp_path: Path) -> None:
    model = CMHP(2, dim=8, num_latents=2, num_heads=1).eval()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("queries") == "newest"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert CMHP.from_pretrained(tmp_path).queries == "newest"


@pytest.mark.parametrize("made", [lambda: CMHP(2, queries="both"), lambda: SMALL.changed({"queries": "both"})])
def test_other_queries_are_refused(made: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"^queries: got 'both', expected one of newest, latents"):
        made()


@pytest.mark.parametrize("kind", SIZES)
def test_a_prediction_does_not_see_its_event(kind: type[PointProcess]) -> None:
    model, (times, marks) = made(kind), some_events()
    seen: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, found: Any) -> None:
        seen.append(
            torch.cat([found.time.cdf(torch.ones(1)).unsqueeze(-1), found.mark.probs], -1).unflatten(0, times.shape)
        )

    model.head.register_forward_hook(keep)
    later, other = times.clone(), marks.clone()
    later[:, 6:] += 0.4
    other[:, 6] = (other[:, 6] + 1) % 4
    with torch.no_grad():
        for changed in ((times, marks), (later, marks), (times, other)):
            model.log_prob(*changed)
    whole, *rest = seen
    for found in rest:
        torch.testing.assert_close(found[:, :7], whole[:, :7], **TIGHT)
        assert not torch.isclose(found[:, 7:], whole[:, 7:]).all(-1).any()


def test_the_mixture_is_a_distribution_with_a_closed_mean() -> None:
    generator = seeded(2)
    logits, loc = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator)
    mixture = LogNormalMixture(logits, loc, torch.rand(3, 5, dtype=torch.float64, generator=generator) * 0.5 + 0.2)
    log_t = torch.linspace(-12, 12, 20_001, dtype=torch.float64).unsqueeze(1)
    t = log_t.exp()
    density = mixture.log_prob(t).exp() * t  # the density of log t
    torch.testing.assert_close(torch.trapezoid(density, log_t, dim=0), torch.ones(3, dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(torch.trapezoid(density * t, log_t, dim=0), mixture.mean, **TIGHT)
    torch.testing.assert_close(
        torch.cumulative_trapezoid(density, log_t, dim=0)[-5000],
        -torch.expm1(mixture.log_survival(t[-5000])),
        rtol=1e-7,
        atol=0,
    )
    torch.testing.assert_close(
        mixture.intensity(t[9000]), mixture.log_prob(t[9000]).exp() / (1 - mixture.cdf(t[9000])), rtol=1e-9, atol=0
    )
    assert mixture.log_survival(torch.tensor(1e9)).isfinite().all()


def test_the_mean_is_finite_where_its_parts_are_not() -> None:
    logits, scale = torch.tensor([[0.0, -40.0], [0.0, -110.0]]), torch.tensor([[1.0, 14.0], [1.0, 14.0]])
    mean, right = (LogNormalMixture(logits.to(to), torch.zeros(2, 2, dtype=to), scale.to(to)).mean for to in FLOATS)
    torch.testing.assert_close(mean.double(), right, rtol=1e-6, atol=0)


def test_times_are_standardised_and_scales_bounded() -> None:
    head = made(CMHP).head
    with torch.no_grad():
        head.time.weight.zero_()
        head.time.bias.copy_(torch.tensor([0.0, 1.0, 99.0]).repeat_interleave(16))
        wide = head(torch.randn(2, 24, dtype=torch.float64)).time.component_distribution
        head.time.bias[32:] = -99.0
        narrow = head(torch.randn(2, 24, dtype=torch.float64)).time.component_distribution
    for found, scale in ((wide, math.exp(3.0)), (narrow, math.exp(-5.0))):
        torch.testing.assert_close(found.loc, torch.full((2, 16), -0.5 + 1.3, dtype=torch.float64), **TIGHT)
        torch.testing.assert_close(found.scale, torch.full((2, 16), 1.3 * scale, dtype=torch.float64), **TIGHT)


@pytest.mark.parametrize("kind", SIZES)
def test_what_is_saved_comes_back(kind: type[PointProcess], tmp_path: Path) -> None:
    model, (times, marks) = made(kind, period=24.0), some_events()
    model.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path).double().eval()
    for mine, other in zip(model.log_prob(times, marks), again.log_prob(times, marks), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", SIZES)
def test_wrong_arguments_are_named(kind: type[PointProcess]) -> None:
    model, (times, marks) = made(kind), some_events()
    state = model.observe(None, times[:, 1], marks[:, 1])
    for call, said in (
        (lambda: model.log_prob(times.flip(1), marks), "^times: got .* before the one before it"),
        (lambda: model.log_prob(times, marks, end=times[:, 4]), "^end: got .* before the one before it"),
        (lambda: model.observe(state, times[:, 0], marks[:, 0]), "^time: got .* before the one before it"),
        (lambda: model.log_prob(times, marks + 1), "^marks: got .* from 1 to 4"),
        (lambda: model.log_prob(times, marks.double()), "^marks: got torch.float64"),
        (lambda: model.log_prob(times, marks[:, 1:]), "^times, marks: got shapes"),
        (lambda: model.observe(None, times, marks), "^time, mark: got shapes"),
        (lambda: model.observe(state, times[:1, 2], marks[:1, 2]), "^time: got batch 1, expected batch 3"),
        (lambda: model.log_prob(times, marks, LENGTHS + 1), r"^lengths: got torch.int64 \(3,\) from 2 to 14"),
        (lambda: model.log_prob(times, marks, LENGTHS - 2), "^lengths: got .* from -1 to 11"),
        (lambda: model.log_prob(times, marks, LENGTHS[:2]), r"^lengths: got torch.int64 \(2,\)"),
        (lambda: model.log_prob(times, marks, LENGTHS.double()), "^lengths: got torch.float64"),
        (
            lambda: model.log_prob(times, marks, end=times[:, -1:] + 1),
            r"^end: got shape \(3, 1\), expected \(batch,\) = \(3,\)",
        ),
        (lambda: model.log_prob(times[:, :0], marks[:, :0].float()), "^marks: got torch.float32, expected torch.int64"),
        (
            lambda: model.log_prob(times.masked_fill(times == times[:, -1:], torch.inf), marks),
            "^times: got .* infinite",
        ),
        (lambda: model.observe(None, times[:, 0] * torch.inf, marks[:, 0]), "^time: got .* infinite"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


# ---- the exact process


@pytest.mark.parametrize("gap", [5.0, 100.0, 1e4, 1e8])
def test_an_intensity_far_out_has_its_digits(gap: float) -> None:
    """An intensity far out is a quotient of two numbers whose logarithms are near -1e6."""
    parts = torch.zeros(1, 2), torch.tensor([[-1.0, 0.5]]), torch.full((1, 2), math.exp(-5))
    single, wide = (LogNormalMixture(*(part.to(dtype) for part in parts)) for dtype in (torch.float32, torch.float64))
    found, right = single.intensity(torch.tensor([gap])), wide.intensity(torch.tensor([gap], dtype=torch.float64))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), right, rtol=2e-5, atol=0)


def test_the_likelihood_of_a_hawkes_process_is_that_of_its_intensity() -> None:
    process = Hawkes()
    events = process.simulate(4, 6.0, seeded(3))
    exact = process.log_prob(events)
    grid = torch.linspace(0, 6.0, 60_001, dtype=torch.float64)
    for row, length in enumerate(events.lengths.tolist()):
        times, marks = events.times[row, :length], events.marks[row, :length]
        chosen = process.intensity(times, marks, times)[torch.arange(length), marks]
        integral = torch.trapezoid(process.intensity(times, marks, grid).sum(1), grid)
        total = exact.time[row].sum() + exact.mark[row].sum() + exact.survival[row]
        torch.testing.assert_close(total, chosen.log().sum() - integral, rtol=1e-3, atol=1e-3)


def test_a_mark_without_its_time_is_a_mean_over_times() -> None:
    """The probability of each mark of the second event equals the one computed from the intensities on a fine grid of
    times."""
    process = Hawkes()
    gap = torch.linspace(0, 60, 600_001, dtype=torch.float64)
    intensity = process.intensity(torch.tensor([1.0]), torch.tensor([2]), 1.0 + gap.clamp(min=1e-9))
    survived = torch.cat([torch.ones(1), (-torch.cumulative_trapezoid(intensity.sum(1), gap)).exp()])
    expected = torch.trapezoid(intensity * survived.unsqueeze(1), gap, dim=0)
    two, times = torch.full((3,), 2), torch.tensor([[1.0, 2.0]]).double().expand(3, -1)
    second = Events(times, torch.tensor([[2, 0], [2, 1], [2, 2]]), two, two.double())
    torch.testing.assert_close(process.log_prob(second).mark_alone[:, 1].exp(), expected, rtol=1e-4, atol=0)


def test_simulated_events_follow_the_intensity() -> None:
    """Integrals of the intensity from event to event are exponential with mean 1,
    and the number of events agrees with the theory."""
    process, end = Hawkes(), 100.0
    events = process.simulate(400, end, seeded(4))
    rate = sum(process.base) / (1 - 1.2 / process.decay)
    assert abs(float(events.lengths.double().mean()) / (rate * end) - 1) < 0.03
    integrals = process.log_prob(events).compensator[events.there]
    assert abs(float(integrals.mean()) - 1) < 0.02
    assert abs(float((integrals < math.log(2)).double().mean()) - 0.5) < 0.01


def test_exact_is_the_ceiling_of_the_task() -> None:
    known = SMALL.references()
    assert known["exact_time"] > known["exponential_time"]
    assert known["exact_mark"] > known["exact_mark_alone"] > known["last_mark"] > known["frequency_mark"]


@pytest.mark.parametrize("system", SMALL.systems)
def test_a_task_trains_scores_and_streams(system: str) -> None:
    torch.manual_seed(0)
    model = SMALL.model(system, dim=16)
    before, optimizer = SMALL.evaluate(model), torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(15):
        optimizer.zero_grad()
        SMALL.loss(model, SMALL.batch(seeded(step))).backward()
        optimizer.step()
    after = SMALL.evaluate(model)
    assert after["time"] + after["mark"] > before["time"] + before["mark"]
    rows = list(SMALL.stream(model))
    times, marks = SMALL.shown()
    assert [row["time"] for row in rows] == times.tolist()
    at_once = model.log_prob(times.unsqueeze(0), marks.unsqueeze(0))
    torch.testing.assert_close(
        torch.tensor([row["mark_log_prob"] for row in rows]), at_once.mark[0].detach(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("system", SMALL.systems)
def test_a_batch_without_events_has_the_loss_of_none(system: str) -> None:
    torch.manual_seed(0)
    model, none = SMALL.model(system, dim=16), torch.zeros(2, dtype=torch.int64)
    batch = Events(
        torch.zeros(2, 0).double(), torch.zeros(2, 0, dtype=torch.int64), none, torch.tensor([0.5, 1.0]).double()
    )
    loss = SMALL.loss(model, batch)
    torch.testing.assert_close(loss, -model.next_event(None).time.log_survival(batch.end.float()).sum())
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert gradients
    assert all(bool(each.isfinite().all()) for each in gradients)


def test_the_picture_shows_the_exact_intensity(tmp_path: Path) -> None:
    models = {system: SMALL.model(system, dim=16) for system in SMALL.systems}
    above, below = figure(SMALL, models).axes
    assert [line.get_label() for line in above.lines[:3]] == ["exact", *models]
    times, marks = SMALL.shown()
    at, exact = (torch.as_tensor(part).double() for part in above.lines[0].get_data())
    torch.testing.assert_close(exact, Hawkes().intensity(times, marks, at).sum(1))
    given = (
        models["thp"].log_prob(times.unsqueeze(0), marks.unsqueeze(0)).mark.exp()[0, -len(below.lines[1].get_ydata()) :]
    )
    torch.testing.assert_close(torch.as_tensor(below.lines[1].get_ydata()), given.detach(), rtol=1e-4, atol=1e-4)
    draw(SMALL, models, tmp_path / "hawkes.png")
