"""Trainings that stop when a validation loss no longer falls: the best weights are kept, and a resumption is exact."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models import cli
from cmab_models.point_processes import Events
from cmab_models.tasks import TASKS, Task, seeded
from cmab_models.tasks.base import VALIDATED
from cmab_models.tasks.events import HawkesTask
from cmab_models.tasks.images import Digits
from cmab_models.tasks.series import Series
from cmab_models.tasks.sets import Sine
from cmab_models.training import BadCheckpoint, Diverged, Interrupted, Run, train
from torch import Tensor, nn

from .test_lightning import At, run, weights

SMALL = Sine(steps=8, batch_size=8, dim=8, check_every=2, patience=1)


@dataclass(frozen=True)
class Falling(Sine, listed=False):
    """A task whose validation loss after each check is given: it falls until check `best`, and then rises."""

    best: int = 2

    def validation(self) -> Iterator[Any]:
        yield "check"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if batch != "check":
            return super().loss(model, batch)
        assert not model.training
        torch.rand(3)  # does not change the random numbers of the training
        model.checks = getattr(model, "checks", 0) + 1
        return torch.tensor(float(abs(model.checks - self.best)))


def falling(**changes: Any) -> Falling:
    return Falling(steps=8, batch_size=8, dim=8, check_every=1, **changes)


def test_no_seed_trains_on_the_batches_of_a_check() -> None:
    """A training draws its batches with its seed and a number."""
    checked = [batch.key for batch in SMALL.validation()]
    for seed in (0, 19, 20, *range(100)):
        assert not any(torch.equal(SMALL.batch(seeded(seed, number)).key, each) for number, each in enumerate(checked))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_best_weights_are_kept(accumulate: int, tmp_path: Path) -> None:
    """The schedule is that of all steps, so the weights are those of a longer run at the best step."""
    kept, told = train(run(tmp_path / "a", falling(patience=3), accumulate=accumulate))
    assert told["best_step"] == 2 and kept.checks == 5 and not kept.training

    class Weights(At):
        def on_train_batch_end(self, trainer: Any, training: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                self.seen = weights(training.model)

    watched = Weights(-1, RuntimeError())
    train(run(tmp_path / "b", falling(), accumulate=accumulate), callbacks=[watched])
    assert torch.equal(weights(kept), watched.seen)


def test_a_training_that_never_stops_early_ends_with_its_best_weights(tmp_path: Path) -> None:
    _, told = train(run(tmp_path / "a", falling(patience=9, best=3)))
    assert told["best_step"] == 3
    whole, told = train(run(tmp_path / "b", falling(patience=9, best=99)))
    assert told["best_step"] == 8
    assert torch.equal(weights(whole), weights(train(run(tmp_path / "c", falling()))[0]))
    assert "best_step" not in train(run(tmp_path / "d", falling()))[1]


@pytest.mark.parametrize("before_end", [2, 1, 0])
def test_stopped_and_resumed_it_stops_at_the_same_step(before_end: int, tmp_path: Path) -> None:
    """Also if the signal comes in the step that would have been the last."""
    task = replace(SMALL, learning_rate=0.5, patience=2, check_every=1)  # the loss soon goes up
    whole, told = train(run(tmp_path / "whole", task))
    ended = torch.load(tmp_path / "whole" / "checkpoint.pt")["global_step"]
    parts = run(tmp_path / "parts", task)
    with pytest.raises(Interrupted):
        train(parts, callbacks=[At(ended - before_end, signal.SIGTERM)])
    resumed, again = train(parts, resume=True)
    assert torch.equal(weights(whole), weights(resumed)) and again["best_step"] == told["best_step"]
    assert torch.load(parts.checkpoint)["global_step"] == ended == told["best_step"] + 2 < 8


def test_a_training_that_has_ended_does_not_go_on(tmp_path: Path) -> None:
    task = falling(patience=2)
    first, told = train(run(tmp_path, task))
    before = torch.load(tmp_path / "checkpoint.pt")
    again, same = train(run(tmp_path, task), resume=True)
    assert torch.equal(weights(first), weights(again)) and same["best_step"] == told["best_step"] == 2
    assert torch.load(tmp_path / "checkpoint.pt")["global_step"] == before["global_step"] == 4


def test_validation_batches_are_new_and_the_same_in_every_call() -> None:
    first, again = (list(SMALL.validation()) for _ in range(2))
    assert len(first) == VALIDATED
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(first[0][0], SMALL.batch(seeded(0, number))[0]) for number in range(9))


def test_a_validation_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"^validation: got \[inf\] after step 1, expected batches with finite losses"):
        train(run(tmp_path, falling(patience=1, best=float("inf"))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda best: best.pop("step"), "step: got None, expected a int"),
        (lambda best: best.update(loss="x"), "loss: got a str, expected a float"),
        (lambda best: best["weights"].popitem(), "weights: got"),
        (lambda best: best["weights"].update({next(iter(best["weights"])): torch.zeros(1)}), "weights, "),
    ],
)
def test_a_wrong_entry_of_the_best_weights_is_named(change: Any, message: str, tmp_path: Path) -> None:
    train(run(tmp_path, falling(patience=2)))
    entries = torch.load(tmp_path / "checkpoint.pt")
    change(entries["callbacks"]["EarlyStop"])
    torch.save(entries, tmp_path / "checkpoint.pt")
    with pytest.raises(BadCheckpoint) as caught:
        train(run(tmp_path, falling(patience=2)), resume=True)
    assert f"callbacks, EarlyStop, {message}" in str(caught.value)


def test_a_record_without_patience_is_one_of_a_training_without_checks(tmp_path: Path) -> None:
    plain = replace(SMALL, patience=0, check_every=Task.check_every)
    train(run(tmp_path, plain))
    entries = torch.load(tmp_path / "checkpoint.pt")
    for name in ("patience", "check_every"):
        del entries["run"][name]
    del entries["callbacks"]["EarlyStop"]
    torch.save(entries, tmp_path / "checkpoint.pt")
    train(run(tmp_path, plain), resume=True)
    with pytest.raises(BadCheckpoint, match=r"^patience: got 1, expected 0, as .* was trained with$"):
        train(run(tmp_path, replace(plain, patience=1)), resume=True)


def test_patience_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TASKS, "sine", falling().__class__)
    monkeypatch.chdir(tmp_path)
    told = ["attention", "--task", "sine", "--preset", "smoke", "--set", "check_every=1", "--folder", "run"]
    cli.main(["train", *told, "--patience", "2"])
    assert "; best after 2 steps" in capsys.readouterr().out
    record = json.loads((tmp_path / "run" / "results.jsonl").read_text().splitlines()[-1])
    assert (record["patience"], record["check_every"], record["best_step"]) == (2, 1, 2)
    assert "validation_loss" in next((tmp_path / "run" / "csv").rglob("metrics.csv")).read_text()
    with pytest.raises(SystemExit):
        cli.main(["train", *told, "--patience", "0"])
    assert "--patience: got '0', expected an int >= 1" in capsys.readouterr().err


def test_a_run_of_an_unlisted_task_is_described(tmp_path: Path) -> None:
    assert "sine" in TASKS and TASKS["sine"] is Sine
    assert Run("attention", falling(), tmp_path).described()["best"] == 2


def parts(task: Task) -> tuple[list[Any], list[Any]]:
    """Some training batches, and the validation batches."""
    return [task.batch(seeded(0, number)) for number in range(60)], list(task.validation())


@pytest.mark.parametrize("patience", [0, 3])
def test_series_that_are_checked_are_in_no_batch(patience: int) -> None:
    train, checked = parts(Series(dataset="JapaneseVowels", patience=patience))
    ends = [{tuple(row) for pieces, _ in batches for row in pieces[:, :, 0].tolist()} for batches in (train, checked)]
    assert bool(ends[0] & ends[1]) == (patience == 0)
    assert len(torch.cat([labels for _, labels in checked]).unique()) == 9


class NumberedImages(Digits, listed=False):
    def images(self) -> Any:
        """The value of all pixels of an image is its number."""
        return {"train": torch.arange(30, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 28, 28, 1)}


@pytest.mark.parametrize("patience", [0, 3])
def test_images_that_are_checked_are_in_no_batch(patience: int) -> None:
    train, checked = (
        {int(value) for batch in batches for value in (batch.context_y[:, 0, 0] * 255 + 127.6)}
        for batches in parts(NumberedImages(patience=patience))
    )
    assert train == set(range(30)) - ({9, 19, 29} if patience else set())
    assert checked == {9, 19, 29} or not patience


def test_sequences_that_are_checked_are_in_no_batch() -> None:
    class Numbered(HawkesTask, listed=False):
        def events(self, part: str) -> Events:
            return Events.pad([[i + 1.0] for i in range(25)], [[0]] * 25, [30.0] * 25)

    train, checked = parts(Numbered(patience=3))
    seen = [{int(time) for batch in batches for time in batch.times[:, 0]} for batches in (train, checked)]
    assert seen[1] == {10, 20} and seen[0] == set(range(1, 26)) - seen[1]
    few = Numbered()
    assert sum(len(batch.lengths) for batch in few.validation()) == 25
