"""An empty batch has losses of 0 with gradients of 0, so a training continues as if there were no such batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cmab_models.data.hawkes import Hawkes
from cmab_models.neural_processes import Batch, NeuralProcess
from cmab_models.point_processes import Events, PointProcess
from cmab_models.streams import StreamClassifier
from cmab_models.systems import SYSTEMS
from cmab_models.tasks import TASKS
from cmab_models.tasks.classes import OutlierTask
from cmab_models.tasks.functions import streamed
from cmab_models.tasks.sets import Question, SetTask
from torch import Tensor, nn

from .cases import MARKS, TIMES, answer, inputs, made

PROCESSES = [name for name, kind in SYSTEMS.items() if issubclass(kind, NeuralProcess)]
OF_SETS = ("query", "target_x", "target_y", "times", "marks")
"""The empty inputs, in each possible place."""


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss by the names of the parameters that have one."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def all_zero(model: nn.Module, of_nothing: Tensor, of_some: Tensor) -> None:
    """Check that the first loss is 0, with gradients of 0 for the parameters of which the other has gradients."""
    known = gradients(model, of_some)
    found = gradients(model, of_nothing)
    assert known and found.keys() == known.keys()
    assert of_nothing == 0 and not any(each.any() for each in found.values())


def no_functions(part: Tensor) -> Tensor:
    return part[:0]


def no_places(part: Tensor) -> Tensor:
    return part[:, :0]


def cut(given: dict[str, Tensor], how: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: how(part) if how is no_functions or name in OF_SETS else part for name, part in given.items()}


CUTS = [(system, no_functions) for system in SYSTEMS]
# A window has tokens.
CUTS += [(system, no_places) for system, kind in SYSTEMS.items() if not issubclass(kind, StreamClassifier)]


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize(("system", "how"), CUTS)
def test_an_answer_to_nothing(system: str, how: Callable[[Tensor], Tensor], training: bool) -> None:
    model, given = made(system).train(training), inputs(system)
    of_nothing = cut(given, how)
    all_zero(model, answer(model, of_nothing).sum(), answer(model, given).sum())
    with torch.no_grad():
        assert not answer(model, of_nothing).any()


@pytest.mark.parametrize("block_size", [1, 2, 1000])
@pytest.mark.parametrize("system", PROCESSES)
def test_likelihoods_of_nothing_in_blocks(system: str, block_size: int) -> None:
    model, given = made(system), inputs(system)
    for how, shape in ((no_functions, (0,)), (no_places, (2,))):
        found = model.log_prob(**cut(given, how), block_size=block_size)
        assert found.shape == shape
        all_zero(model, found.sum(), model.log_prob(**given, block_size=block_size).sum())


@pytest.mark.parametrize("system", PROCESSES)
def test_likelihoods_of_no_points_after_those_before(system: str) -> None:
    model, (x, y, *_) = made(system), inputs(system).values()
    for some in ((x[:, :1], y[:, :1]), (x[:, :0], y[:, :0]), (x[:0], y[:0]), (x[:0, :0], y[:0, :0])):
        found = model.prefix_log_prob(*some)
        assert found.shape == (len(some[0]), max(some[0].shape[1] - 1, 0))
        all_zero(model, found.sum(), model.prefix_log_prob(x, y).sum())


@pytest.mark.parametrize("system", PROCESSES)
def test_gradients_of_what_is_given_are_0_as_well(system: str) -> None:
    model, given = made(system), inputs(system)
    leaves = {name: part.requires_grad_() for name, part in given.items()}
    model.log_prob(**cut(leaves, no_places)).sum().backward()
    assert all(part.grad is not None and not part.grad.any() for part in leaves.values())


def batch(model: Any, task: Any, given: dict[str, Tensor], how: Callable[[Tensor], Tensor] | None) -> Any:
    """Return an empty slice of a batch of a task."""
    some = given if how is None else cut(given, how)
    if isinstance(model, NeuralProcess):
        return Batch(**some)
    if isinstance(model, PointProcess):
        lengths = torch.full((len(some["times"]),), some["times"].shape[1])
        return Events(some["times"], some["marks"], lengths, torch.full((len(lengths),), 3.0, dtype=torch.float64))
    if isinstance(model, StreamClassifier):
        return some["tokens"], torch.zeros(len(some["tokens"]), dtype=torch.int64)
    answers = some["query"]
    return Question(
        *some.values(), answers if isinstance(task, SetTask) else torch.zeros(answers.shape[:2], dtype=torch.int64)
    )


LOSSES = {(task.loss, system): name for name, task in TASKS.items() for system in task.systems}
"""A task for each way to compute a loss, and each system."""


@pytest.mark.parametrize(("name", "system"), [(name, system) for (_, system), name in LOSSES.items()])
def test_the_loss_of_a_batch_of_nothing(name: str, system: str) -> None:
    task, model, given = TASKS[name](), made(system), inputs(system)
    if isinstance(task, OutlierTask):  # a set has one answer: a position in the set
        given["query"] = given["query"][:, :1]
    all_zero(
        model,
        task.loss(model, batch(model, task, given, no_functions)),
        task.loss(model, batch(model, task, given, None)),
    )


@pytest.mark.parametrize("system", PROCESSES)
def test_the_loss_of_no_targets(system: str) -> None:
    model, given = made(system), inputs(system)
    all_zero(model, model.loss(Batch(**cut(given, no_places))), model.loss(Batch(**given)))
    scores = streamed(model, Batch(*(part[:1] for part in cut(given, no_places).values())))
    assert [step["log_likelihood"] for step in scores] == [0.0] * 6


def test_the_loss_of_no_events_is_that_of_none_having_come() -> None:
    for system in ("cmhp", "thp"):
        model = made(system)
        nothing = Events(
            TIMES[:, :0], MARKS[:, :0], torch.zeros(2, dtype=torch.int64), torch.tensor([2.0, 3.0], dtype=torch.float64)
        )
        loss = TASKS["hawkes"]().loss(model, nothing)
        assert loss > 0 and all(each.isfinite().all() for each in gradients(model, loss).values())


def test_events_of_no_rows() -> None:
    events = Events.pad([[1.0, 2.0], [3.0]], [[0, 1], [2]], [4.0, 4.0])
    none = events.take(torch.zeros(0, dtype=torch.int64))
    assert [part.shape for part in none] == [(0, 0), (0, 0), (0,), (0,)]
    assert [part.dtype for part in none] == [part.dtype for part in events]
    assert none.take(none.lengths).gaps().shape == none.there.shape == (0, 0)
    for system in ("cmhp", "thp"):
        model = made(system)
        all_zero(model, TASKS["hawkes"]().loss(model, none), TASKS["hawkes"]().loss(model, events))


def test_exact_likelihoods_of_no_events() -> None:
    """Exact likelihoods of no sequences have the right shapes. A sequence without events does not depend on its
    batch."""
    some = Events.pad([[], [1.0]], [[], [2]], [4.0, 4.0])
    assert [part.shape for part in Hawkes().log_prob(some.take(torch.tensor([], dtype=torch.int64)))] == 3 * [
        (0, 0)
    ] + [(0,), (0, 0)]
    alone, beside = Hawkes().log_prob(some.take(torch.tensor([0]))), Hawkes().log_prob(some)
    assert torch.equal(alone.survival, beside.survival[:1]) and alone.time.shape == (1, 0)
    with pytest.raises(ValueError, match="sequences: got 0, expected an int >= 1"):
        Hawkes().simulate(0, 1.0, torch.Generator())
