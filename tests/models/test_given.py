"""Inputs of systems: half types have finite likelihoods; a missing input, a non-tensor or a wrong dtype is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cmab_models.neural_processes import CNP, NeuralProcess
from cmab_models.point_processes import Events, LogNormalMixture, PointProcess
from cmab_models.streams.base import StreamClassifier
from cmab_models.systems import SYSTEMS
from torch import Tensor

from .cases import MARKS, TIMES, answer, inputs, made

HALF = [torch.bfloat16, torch.float16]
PROCESSES = [name for name in SYSTEMS if issubclass(SYSTEMS[name], NeuralProcess)]
OF_EVENTS = [name for name in SYSTEMS if issubclass(SYSTEMS[name], PointProcess)]
STREAMS = [name for name in SYSTEMS if issubclass(SYSTEMS[name], StreamClassifier)]


# ---- half types


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("system", SYSTEMS)
def test_answers_in_half_types_are_finite_and_right(system: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = made(system)
    expected = answer(model, inputs(system))
    found = answer(model.to(dtype), inputs(system, dtype))
    has_likelihoods = system in PROCESSES + OF_EVENTS
    assert found.dtype == (torch.float32 if has_likelihoods else dtype)
    rounding = 16 * torch.finfo(dtype).eps * (1 + expected.abs())
    assert ((found - expected).abs() <= rounding).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("system", PROCESSES + OF_EVENTS)
def test_likelihoods_under_autocast_are_finite_and_learn(system: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = made(system)
    with torch.autocast("cpu", dtype):
        found = answer(model, inputs(system))
    assert found.dtype == torch.float32 and found.isfinite().all()
    found.sum().backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert gradients and all(bool(each.isfinite().all()) for each in gradients)


@torch.no_grad()
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("system", PROCESSES)
def test_a_neural_process_in_half_types_predicts_each_prefix_and_samples(system: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, given = made(system).to(dtype), inputs(system, dtype)
    x, y, target_x, _ = given.values()
    found = (
        model.log_prob(**given, block_size=2),
        model.prefix_log_prob(x, y),
        model.sample(x, y, target_x, block_size=2),
    )
    assert all(part.isfinite().all() for part in found)
    assert found[0].dtype == found[1].dtype == torch.float32 and found[2].dtype == dtype


@torch.no_grad()
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("system", OF_EVENTS)
def test_events_at_the_same_time_have_a_likelihood(system: str, dtype: torch.dtype) -> None:
    """Inputs come at once, one by one, or until an end, also with times in half types."""
    torch.manual_seed(0)
    model = made(system, dim=32, period=24.0).to(dtype)
    for times in (TIMES, TIMES.to(dtype)):
        found = model.log_prob(times, MARKS, end=times[:, -1] + 0.5)
        state, last = None, torch.zeros(2, dtype=times.dtype)
        for i in range(3):
            predicted = model.next_event(state)
            for mine, other in (
                (predicted.time.log_prob(times[:, i] - last), found.time[:, i]),
                (predicted.mark.log_prob(MARKS[:, i]), found.mark[:, i]),
            ):
                torch.testing.assert_close(
                    mine, other, rtol=32 * torch.finfo(dtype).eps, atol=32 * torch.finfo(dtype).eps, check_dtype=False
                )
            state, last = model.observe(state, times[:, i], MARKS[:, i]), times[:, i]
        at = torch.tensor([0.5, 1.5, 2.0, 99.0]).to(dtype)
        parts = (*found[:3], model.intensity(times[0], MARKS[0], at))
        assert all(
            part.isfinite().all() and part.dtype == (dtype if dtype == torch.float64 else torch.float32)
            for part in parts
        )


@pytest.mark.parametrize("dtype", HALF)
def test_a_mixture_of_half_types_is_float32(dtype: torch.dtype) -> None:
    parameters = torch.randn(3, 4, 5), torch.randn(4, 5), torch.rand(4, 5) + 0.1
    mixture = LogNormalMixture(*(part.to(dtype) for part in (parameters[0][0], *parameters[1:])))
    for gap in (torch.tensor(0.0, dtype=dtype), torch.tensor(2.0, dtype=dtype)):
        for part in (mixture.log_prob(gap), mixture.log_survival(gap), mixture.intensity(gap)):
            assert part.dtype == torch.float32 and part.isfinite().all()


@torch.no_grad()
def test_a_cnp_in_half_types_counts_its_points() -> None:
    torch.manual_seed(0)
    model, x = CNP(1, 1, dim=8), torch.randn(1, 70_000, 1)
    expected = model.predict(model.condition(x, x), x[:, :3]).mean
    state = model.half().condition(x.half(), x.half())
    assert int(state.points) == 70_000
    torch.testing.assert_close(model.predict(state, x[:, :3].half()).mean, expected, rtol=1e-2, atol=1e-2)


# ---- missing inputs


@torch.no_grad()
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_value_that_is_missing_is_named(system: str, bad: float) -> None:
    model, given = made(system), inputs(system)
    for name, part in given.items():
        if not part.is_floating_point():
            continue
        broken = part.clone()
        broken[1, -1] = bad
        if name == "target_y" and bad != bad:  # an output of a target may be missing
            assert answer(model, given | {name: broken}).isfinite().all()
            continue
        with pytest.raises(ValueError, match=rf"^{name}: got .*NaN"):
            answer(model, given | {name: broken})
    assert answer(model, given).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("system", PROCESSES)
def test_a_missing_value_is_named_by_every_method(system: str) -> None:
    model, (x, y, target_x, _) = made(system), inputs(system).values()
    broken, mask = x.clone(), torch.zeros(x.shape[:2], dtype=torch.bool)
    broken[0, 2] = torch.nan
    state = model.condition(x, y)
    calls: list[Callable[[], Any]] = [
        lambda: model.condition(broken, y),
        lambda: model.condition(broken, y, mask=mask),
        lambda: model.prefix_log_prob(x, broken),
        lambda: model.sample(broken, y, target_x),
        lambda: model(x, broken, target_x),
        lambda: model.predict(state, broken),
    ]
    if system != "inctnp":
        calls.append(lambda: model.forget(state, broken, y))
    for call in calls:
        with pytest.raises(ValueError, match=r"^(\w+_)?[xy]: got a NaN"):
            call()
    mask[0, 2] = True
    assert model.predict(model.condition(broken, y, mask=mask), target_x).mean.isfinite().all()


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name not in OF_EVENTS])  # these look for padding
def test_values_are_not_read_where_there_are_none(system: str) -> None:
    """Checks of values must not fail on the meta device. There, results have the same shapes as on other devices."""
    model, given = made(system).to("meta"), {name: part.to("meta") for name, part in inputs(system).items()}
    assert answer(model, given).is_meta


@torch.no_grad()
@pytest.mark.parametrize("system", OF_EVENTS)
def test_missing_times_and_wrong_marks_are_named(system: str) -> None:
    model, nan = made(system), torch.tensor([0.5, torch.nan])
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("time", lambda: model.observe(None, nan, MARKS[:, 0])),
        ("end", lambda: model.log_prob(TIMES, MARKS, end=nan)),
        ("times", lambda: model.intensity(nan, MARKS[:, 0], nan)),
        ("at", lambda: model.intensity(TIMES[0], MARKS[0], nan)),
        ("mark", lambda: model.observe(None, TIMES[:, 0], MARKS[:, 0] + 3)),
        ("marks", lambda: model.intensity(TIMES[0], MARKS[0] - 1, TIMES[0])),
        ("marks", lambda: model.log_prob(TIMES, TIMES * torch.nan)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=rf"^{name}: "):
            call()


# ---- memory of the caller


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("system", PROCESSES)
def test_points_in_one_buffer(system: str, masked: bool) -> None:
    """Inputs may be overwritten afterwards: a state keeps copies."""
    model, x, y = made(system), torch.randn(3, 2, 4, 1), torch.randn(3, 2, 4, 1)
    ignored = torch.zeros(3, 2, 4, dtype=torch.bool)
    ignored[:, :, 1] = masked
    buffers = torch.empty(2, 2, 4, 1)
    answers = []
    for own_memory in (False, True):
        state, mask = None, torch.empty(2, 4, dtype=torch.bool)
        for xs, ys, off in zip(x, y, ignored, strict=True):
            given = (xs.clone(), ys.clone()) if own_memory else (buffers[0].copy_(xs), buffers[1].copy_(ys))
            mask.copy_(off)
            state = model.condition(*given, state, mask=(mask.clone() if own_memory else mask) if masked else None)
            buffers.fill_(7.0)
            mask.fill_(False)
        answers.append(model.predict(state, x[0]).mean)
    assert torch.equal(*answers)


@torch.no_grad()
@pytest.mark.parametrize("system", OF_EVENTS)
def test_a_clock_that_goes_on_in_place(system: str) -> None:
    model, now, states = made(system), torch.zeros(1, dtype=torch.float64), [None, None]
    for gap in (0.5, 0.7, 0.2):
        now += gap
        states = [
            model.observe(state, time, torch.tensor([1]))
            for state, time in zip(states, (now, now.clone()), strict=True)
        ]
    assert torch.equal(*(model.next_event(state).time.mean for state in states))


# ---- inputs that are not tensors, or have another dtype


@torch.no_grad()
@pytest.mark.parametrize("system", PROCESSES)
def test_values_that_are_none_are_named(system: str) -> None:
    model, given = made(system), inputs(system)
    for name in ("context_y", "target_y"):
        with pytest.raises(TypeError, match=rf"^{name}: got None"):
            answer(model, given | {name: None})
    with pytest.raises(TypeError, match=r"^y: got None"):
        model.condition(given["context_x"], None)


@torch.no_grad()
@pytest.mark.parametrize("other", [lambda part: part.numpy(), lambda part: part.tolist()], ids=["array", "list"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_no_tensor_is_named(system: str, other: Callable[[Tensor], Any]) -> None:
    model, given = made(system), inputs(system)
    for name, part in given.items():
        with pytest.raises(TypeError, match=rf"^{name}: got an? (ndarray|list), expected a torch\.Tensor"):
            answer(model, given | {name: other(part)})


@torch.no_grad()
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name not in OF_EVENTS])
def test_another_dtype_is_named(system: str) -> None:
    model, given = made(system), inputs(system)
    for name, part in given.items():
        if (system, name) == ("few-shot", "value"):  # any dtype: it only tells classes
            continue
        with pytest.raises(
            TypeError, match=rf"^{name}: got torch\.float64, expected torch\.float32 as the module has; cast them alike"
        ):
            answer(model, given | {name: part.double()})


@torch.no_grad()
@pytest.mark.parametrize("system", PROCESSES + OF_EVENTS + STREAMS)
def test_other_arguments_that_are_no_tensors_and_states_of_another_kind_are_named(system: str) -> None:
    model, given = made(system), inputs(system)
    calls: dict[str, list[Callable[[], Any]]] = {}
    if system in PROCESSES:
        x, y, target_x, _ = given.values()
        calls["state"] = [lambda: model.predict([x], target_x), lambda: model.predict(None, target_x)]
        calls["mask"] = [lambda: model.condition(x, y, mask=[[False] * 6] * 2)]
        calls["target_x"] = [lambda: model.loss((x, y, target_x.numpy(), y))]
        if system != "inctnp":
            calls["state"].append(lambda: model.forget((x, y), x, y))
    elif system in OF_EVENTS:
        calls["state"] = [lambda: model.next_event([1]), lambda: model.observe({}, TIMES[:, 0], MARKS[:, 0])]
        calls["lengths"] = [lambda: model.log_prob(TIMES, MARKS, [3, 3])]
        calls["end"] = [lambda: model.log_prob(TIMES, MARKS, end=[3.0, 3.0])]
        calls["time"] = [lambda: model.observe(None, np.ones(2), MARKS[:, 0])]
        calls["at"] = [lambda: model.intensity(TIMES[0], MARKS[0], 3.0)]
    else:
        calls["state"] = [lambda: model.set_state([1])]
        calls["token"] = [lambda: model.forward_step(given["tokens"][:, 0].numpy())]
    for name, each in calls.items():
        for call in each:
            with pytest.raises(TypeError, match=rf"^{name}: got "):
                call()


def test_a_few_shot_takes_classes_of_any_dtype() -> None:
    model, (query, key, value) = made("few-shot", dim_value=2), inputs("few-shot").values()
    classes = (value > 0).expand(-1, -1, 2) != torch.tensor([True, False])
    assert torch.equal(model(query, key, classes), model(query, key, classes.float()))


def test_events_may_come_as_arrays_and_lists() -> None:
    expected = Events.pad(
        [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [torch.tensor([0, 1]), torch.tensor([2])], [2.0, 3.0]
    )
    for ours in (
        Events.pad([np.array([1.0, 2.0]), [3.0]], [[0, 1], np.array([2])], np.array([2.0, 3.0])),
        Events.pad(([1, 2], [3]), ([0, 1], [2]), torch.tensor([2.0, 3.0])),
    ):
        assert all(torch.equal(mine, other) for mine, other in zip(ours, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.uint8, torch.int8, torch.bfloat16])
def test_events_may_have_any_real_dtype(dtype: torch.dtype) -> None:
    expected = Events.pad([[1.0, 2.0]], [[0, 3]], [4.0])
    ours = Events.pad([torch.tensor([1, 2]).to(dtype)], [torch.tensor([0, 3]).to(dtype)], torch.tensor([4]).to(dtype))
    assert all(torch.equal(mine, other) for mine, other in zip(ours, expected, strict=True))


TWO = [[1.0, 2.0], [3.0]]
NO_NUMBERS = {
    "None": None,
    "a complex array": np.array([1j, 2]),
    "a sparse tensor": torch.tensor([1.0, 2.0]).to_sparse(),
    "a tensor without values": torch.zeros(2, device="meta"),
    "an int beyond floats": [10**400, 1],
}
"""Values that are not a sequence of numbers."""


@pytest.mark.parametrize("given", NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize("at", ["times", "marks", "end"])
def test_what_is_no_sequence_of_numbers_is_named(at: str, given: Any) -> None:
    sound: dict[str, Any] = {"times": [[1.0, 2.0]], "marks": [[0, 1]], "end": [4.0]}
    with pytest.raises(
        ValueError, match=r"^end: got .*, expected" if at == "end" else rf"^{at}\[0\]: got .*, expected"
    ):
        Events.pad(**sound | {at: given if at == "end" else [given]})
    with pytest.raises(ValueError, match=f"^{at}: got .*, expected"):
        Events.pad(**sound | {at: 3})


@pytest.mark.parametrize("rows", [0, torch.tensor(1), 2, 1.5, True, None, torch.tensor([5]), torch.tensor([[0, 1]])])
def test_rows_that_are_no_vector_of_ints_are_named(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"^rows: got .*, expected \(R,\) int64 below 2"):
        Events.pad(TWO, [[0, 1], [2]], [4.0, 4.0]).take(rows)


@pytest.mark.parametrize(
    ("times", "marks", "end", "said"),
    [
        (TWO[1:], [[0]], [4.0, 5.0, 6.0], r"end: got shape \(3,\), expected \(1,\), a number for each sequence"),
        (TWO, [[0, 1], [2]], [4.0], r"end: got shape \(1,\), expected \(2,\)"),
        (TWO, [[0, 1], [2]], 4.0, r"end: got shape \(\), expected \(2,\)"),
        (TWO, [[0, 1], [2]], [4.0, torch.inf], "end: got inf, expected finite numbers"),
        (TWO, [[0, 1], [2]], [torch.nan, 4.0], "end: got nan, expected finite numbers"),
        (TWO, [[0, 1], [2]], ["four", 4.0], r"end: got \['four', 4.0\], expected numbers"),
        (TWO, [[0, 1]], [4.0, 4.0], "marks: got 1 sequences, expected 2"),
        (TWO, [[0, 1], [2], [0]], [4.0, 4.0], "marks: got 3 sequences, expected 2"),
        (TWO, [[0, 0.7], [2]], [4.0, 4.0], r"marks\[0\]: got \[0.0, 0.69.*\], expected whole numbers from 0 on"),
        (TWO, [[0, 1], [torch.nan]], [4.0, 4.0], r"marks\[1\]: got \[nan\], expected whole numbers"),
        (TWO, [[0, 1], [1e30]], [4.0, 4.0], r"marks\[1\]: got \[1.0.*e\+30\], expected whole numbers"),
        (TWO, [[0, -1], [2]], [4.0, 4.0], r"marks\[0\]: got \[0, -1\], expected whole numbers"),
        (TWO, [["JFK", "LGA"], [2]], [4.0, 4.0], r"marks\[0\]: got \['JFK', 'LGA'\], expected numbers"),
        (
            [[1.0, torch.inf], [3.0]],
            [[0, 1], [2]],
            [4.0, 4.0],
            r"times\[0\]: got a NaN or an infinity, expected finite numbers",
        ),
        ([[1.0, 2.0], [torch.nan]], [[0, 1], [2]], [4.0, 4.0], r"times\[1\]: got a NaN"),
    ],
)
def test_events_that_do_not_fit_are_named(times: Any, marks: Any, end: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        Events.pad(times, marks, end)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # torch announces the successor of its dynamic quantisation
@pytest.mark.parametrize("system", SYSTEMS)
def test_dynamic_quantisation(system: str) -> None:
    """Quantised layers have no parameters, so torch's fused encoder layer, which reads them, must not run."""
    model, given = made(system), inputs(system)
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert answer(quantised, given).isfinite().all()
