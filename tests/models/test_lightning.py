"""The features that Lightning adds to a training, each compared with the plain run: checkpoints in between, signals,
accumulated gradients, several processes, other precisions, and logs."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cmab_models import cli
from cmab_models.tasks import TASKS, Task, seeded
from cmab_models.tasks.base import SCHEDULES
from cmab_models.tasks.sets import Question, Sine
from cmab_models.training import Diverged, Interrupted, Run, first_losses, train
from cmab_models.training.module import Training
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._device import _device_constructors

SMALL = Sine(steps=6, batch_size=8, dim=8)


class At(Callback):
    """Raises a signal, or an error, within a batch."""

    def __init__(self, batch: int, what: signal.Signals | Exception) -> None:
        self.batch, self.what = batch, what

    def on_before_zero_grad(self, *_: Any) -> None: ...

    def on_after_backward(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            if isinstance(self.what, Exception):
                raise self.what
            signal.raise_signal(self.what)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(folder: Path, task: Task = SMALL, system: str = "attention", **how: Any) -> Run:
    return Run(system, task, folder, **how)


def test_numbers_of_numpy_are_settings(tmp_path: Path) -> None:
    """A checkpoint holds Python's own numbers only."""
    task = replace(SMALL, steps=np.int64(4), learning_rate=np.float32(0.5), dim=np.int16(8))
    given = Run("attention", task, tmp_path, np.int64(3), model_settings={"num_heads": np.int64(2)})
    train(given)
    resumed, _ = train(given, resume=True)
    expected = replace(
        given, task=replace(SMALL, steps=4, learning_rate=0.5, dim=8), folder=tmp_path / "python", seed=3
    )
    assert torch.equal(weights(resumed), weights(train(expected)[0]))


@pytest.mark.parametrize("every", [0.0, 60.0])
def test_a_killed_training_goes_on_from_its_last_checkpoint(every: float, tmp_path: Path) -> None:
    whole, _ = train(run(tmp_path / "whole"))
    parts = run(tmp_path / "parts")
    with pytest.raises(RuntimeError, match="the machine is gone"):
        train(parts, save_every=every, callbacks=[At(5, RuntimeError("the machine is gone"))])
    assert parts.checkpoint.exists() == (every == 0)
    if every == 0:
        assert torch.load(parts.checkpoint)["global_step"] == 4
        resumed, _ = train(parts, resume=True)
        assert torch.equal(weights(whole), weights(resumed))


class Stop(Callback):
    """Ends a training after a number of batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.fit_loop.total_batch_idx + 1 == self.batches


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_that_a_callback_stops_goes_on(accumulate: int, tmp_path: Path) -> None:
    whole, _ = train(run(tmp_path / "whole", accumulate=accumulate))
    parts = run(tmp_path / "parts", accumulate=accumulate)
    with pytest.raises(Interrupted, match=r"^training: it stopped after \d of 6 steps; go on with --resume"):
        train(parts, callbacks=[Stop(3)])
    resumed, _ = train(parts, resume=True)
    assert torch.equal(weights(whole), weights(resumed))


class Never(Callback):
    """Stops a training before its first step."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.stop)

    def stop(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_a_callback_may_stop_a_training_before_its_first_step(hook: str, tmp_path: Path) -> None:
    """A Timer does so in a resumption, if its time was used up before."""
    parts = run(tmp_path)
    with pytest.raises(Interrupted, match=r"^training: it stopped after 0 of 6 steps$"):
        train(parts, callbacks=[Never(hook)])
    with pytest.raises(Interrupted, match="after 3 of 6"):
        train(parts, callbacks=[Stop(3)])
    with pytest.raises(Interrupted, match=r"^training: it stopped after 3 of 6 steps; go on with --resume"):
        train(parts, callbacks=[Never(hook)], resume=True)
    assert torch.equal(weights(train(parts, resume=True)[0]), weights(train(run(tmp_path / "whole"))[0]))


def test_averages_of_weights(tmp_path: Path) -> None:
    """A training that was stopped and resumed, and one that has ended, have the average of the whole run."""
    parts, plain = run(tmp_path / "parts"), train(run(tmp_path / "plain"))[0]
    whole, seconds = train(run(tmp_path / "whole"), callbacks=[EMAWeightAveraging(decay=0.5)])
    with pytest.raises(Interrupted):
        train(parts, callbacks=[EMAWeightAveraging(decay=0.5), Stop(3)])
    resumed, _ = train(parts, callbacks=[EMAWeightAveraging(decay=0.5)], resume=True)
    ended, same = train(run(tmp_path / "whole"), callbacks=[EMAWeightAveraging(decay=0.5)], resume=True)
    assert torch.equal(weights(whole), weights(resumed)) and torch.equal(weights(whole), weights(ended))
    assert not torch.equal(weights(whole), weights(plain))
    assert same.keys() == seconds.keys() and not ended.training
    with pytest.raises(ValueError, match=r"^callbacks: got an average of weights with patience=2, expected patience=0"):
        train(run(tmp_path / "c", replace(SMALL, patience=2)), callbacks=[EMAWeightAveraging()])


@dataclass(frozen=True)
class WithExtra(Sine, listed=False):
    """A task with a setting of any type."""

    extra: Any = None


@pytest.mark.parametrize(
    "extra", [Path("data"), date(2026, 1, 1), frozenset([1]), float("nan"), np.arange(3), torch.ones(2)]
)
def test_a_setting_that_no_checkpoint_holds_is_refused_at_once(extra: Any, tmp_path: Path) -> None:
    """Otherwise a checkpoint would be written from which nobody can resume."""
    with pytest.raises(ValueError, match=r"(?s)^extra: got an? .*, expected a number but NaN, a string, None"):
        train(run(tmp_path / "a", WithExtra(steps=6, batch_size=8, dim=8, extra=extra)))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("extra", [None, True, 2, 0.5, "a", (1, 2), [1.5, None], {"a": (1, "b")}, float("inf")])
def test_a_setting_of_plain_values_is_kept(extra: Any, tmp_path: Path) -> None:
    parts = run(tmp_path, WithExtra(steps=4, batch_size=8, dim=8, extra=extra))
    with pytest.raises(Interrupted):
        train(parts, callbacks=[Stop(2)])
    train(parts, resume=True)


def test_a_callback_whose_state_no_checkpoint_holds_is_refused_at_once(tmp_path: Path) -> None:
    class Remembers(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"folder": tmp_path}

    with pytest.raises(ValueError, match=r"^callbacks: got a Remembers with the state .*, expected a state of numbers"):
        train(run(tmp_path / "a"), callbacks=[Remembers()])
    assert not (tmp_path / "a" / "checkpoint.pt").exists()


def test_a_callback_whose_state_changes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    class Late(Callback):
        best: Any = None

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.best = Path("best") if trainer.global_step == 4 else 0.5

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.best}

    with pytest.raises(
        ValueError, match=r"^callbacks: got a Late with the state .*Path.*, expected a state of numbers"
    ):
        train(run(tmp_path / "a"), callbacks=[Late()], save_every=0.0)
    resumed, _ = train(run(tmp_path / "a"), resume=True)
    assert torch.equal(weights(resumed), weights(train(run(tmp_path / "b"))[0]))


def test_the_checkpoint_of_another_training_is_not_offered(tmp_path: Path) -> None:
    train(run(tmp_path, seed=1))
    with pytest.raises(Interrupted, match=r"^training: it stopped after 0 of 6 steps$"):
        train(run(tmp_path), callbacks=[Never("on_train_start")])


def test_another_accumulation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^callbacks: got a GradientAccumulationScheduler, expected `accumulate`"):
        train(run(tmp_path), callbacks=[GradientAccumulationScheduler({0: 2})])


@pytest.mark.parametrize("batch", [4, 5, 12])
def test_a_signal_waits_for_all_batches_of_a_step(batch: int, tmp_path: Path) -> None:
    """To continue from between two batches of a step would lose the gradients of the first."""
    whole, _ = train(run(tmp_path / "whole", accumulate=2))
    parts = run(tmp_path / "parts", accumulate=2)
    with pytest.raises(Interrupted, match=rf"stopped after {(batch + 1) // 2} of 6 steps; go on with --resume from"):
        train(parts, callbacks=[At(batch, signal.SIGTERM)])
    resumed, _ = train(parts, resume=True)
    assert torch.equal(weights(whole), weights(resumed))


def test_handlers_of_signals_come_back(tmp_path: Path) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    train(run(tmp_path / "a"))
    with pytest.raises(Interrupted):
        train(run(tmp_path / "b"), callbacks=[At(2, signal.SIGINT)])
    with pytest.raises(Diverged):
        train(run(tmp_path / "c", Sine(steps=3, batch_size=4, dim=8, learning_rate=1e30)))
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@dataclass(frozen=True)
class Double(Sine):
    """A batch is two batches of the plain task."""

    name: ClassVar[str] = "double"

    def batch(self, generator: torch.Generator) -> Question:
        step = next(step for step in range(10) if seeded(0, step).initial_seed() == generator.initial_seed())
        first, second = (super(Double, self).batch(seeded(0, 2 * step + part)) for part in range(2))
        return Question(*(torch.cat(parts) for parts in zip(first, second, strict=True)))


TASKS.pop("double")


def test_accumulated_gradients_are_those_of_one_larger_batch(tmp_path: Path) -> None:
    small = {"steps": 3, "batch_size": 8}
    double, _ = train(run(tmp_path / "double", Double(**small), "mlp"))
    accumulated, _ = train(run(tmp_path / "two", Sine(**small), "mlp", accumulate=2))
    torch.testing.assert_close(weights(accumulated), weights(double), rtol=0, atol=2e-6)
    one, _ = train(run(tmp_path / "one", Sine(**small), "mlp"))
    assert (weights(one) - weights(double)).abs().max() > 1e-3


def command(*arguments: str, system: str = "attention") -> list[str]:
    return [sys.executable, "-m", "cmab_models", "train", system, "--task", "sine", *arguments]


SETTINGS = ("--set", "dim=8", "--set", "batch_size=8")


@pytest.mark.thorough
def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path) -> None:
    for folder, how in (("two", "--devices"), ("one", "--accumulate")):
        asked = command(*SETTINGS, "--set", "steps=3", "--folder", folder, how, "2", system="mlp")
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    two, one = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    for name, values in one.items():
        torch.testing.assert_close(two[name], values, rtol=0, atol=2e-6)
    assert len((tmp_path / "two" / "results.jsonl").read_text().splitlines()) == 1
    double, _ = train(run(tmp_path / "double", Double(steps=3, batch_size=8), "mlp"))
    for name, values in double.state_dict().items():
        torch.testing.assert_close(two[name], values, rtol=0, atol=2e-6)


@pytest.mark.thorough
def test_a_process_that_is_told_to_end_goes_on(tmp_path: Path) -> None:
    asked = command(*SETTINGS, "--set", "steps=2000", "--folder", "parts")
    table = tmp_path / "parts" / "csv" / "version_0" / "metrics.csv"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(asked, cwd=tmp_path, stdout=log, stderr=log)
        while process.poll() is None and not table.exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 130
    assert "of 2000 steps; go on with --resume from parts/checkpoint.pt" in (tmp_path / "log").read_text()
    # SLURM starts a job again with the same command.
    again = {**os.environ, "SLURM_RESTART_COUNT": "1"}
    assert subprocess.run(asked, cwd=tmp_path, capture_output=True, env=again, check=False).returncode == 0
    asked = command(*SETTINGS, "--set", "steps=2000", "--folder", "whole")
    assert subprocess.run(asked, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    parts, whole = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("parts", "whole"))
    assert all(torch.equal(parts[name], values) for name, values in whole.items())


@pytest.mark.parametrize("tasks", [{}, {"NTASKS_PER_NODE": "4"}])
def test_trainings_side_by_side_are_tasks_of_one_job(
    tasks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has one device, and is a training of its own, with its own logs."""
    job = {"NTASKS": "4", "JOB_NAME": "train", "JOB_ID": "7", "PROCID": "2", "LOCALID": "2", "NODEID": "0"}
    for name, value in (job | tasks).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(rank_zero_only, "rank", 2)
    cli.main(["train", "attention", "--task", "sine", *SETTINGS, "--set", "steps=2", "--folder", str(tmp_path / "run")])
    assert (tmp_path / "run" / "csv" / "version_0" / "metrics.csv").exists()
    assert list((tmp_path / "run" / "tensorboard").rglob("events*"))


def test_slurm_takes_a_job_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    parts = run(tmp_path / "parts")

    def requeue(told: list[str]) -> None:
        asked.append(told)
        shutil.copy(parts.checkpoint, tmp_path / "at_signal")

    monkeypatch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", requeue)
    for name, value in {
        "NTASKS": "1",
        "JOB_NAME": "train",
        "JOB_ID": "7",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
        "NNODES": "1",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    whole, _ = train(run(tmp_path / "whole"))
    train(parts, callbacks=[At(3, signal.SIGUSR1)])
    assert asked == [["scontrol", "requeue", "7"]]
    again, _ = train(parts)  # from the beginning, not from a checkpoint of Lightning's
    assert torch.equal(weights(whole), weights(again))
    assert torch.load(tmp_path / "at_signal")["global_step"] == 3
    shutil.copy(tmp_path / "at_signal", parts.checkpoint)  # as if the job had ended then
    resumed, _ = train(parts, resume=True)
    assert torch.equal(weights(whole), weights(resumed))


@pytest.mark.parametrize(("system", "task"), [("attention", "sine"), ("cmanp", "gp-rbf"), ("cmhp", "hawkes")])
def test_bfloat16_trains(system: str, task: str, tmp_path: Path) -> None:
    small = {"sequences": 8, "end": 5.0} if task == "hawkes" else {}
    made: Any = TASKS[task]().changed({"steps": 100, **small})
    kept, exact = (first_losses(run(tmp_path, made, system, precision=how), 3) for how in ("bf16-mixed", "32-true"))
    assert all(p.dtype == torch.float32 for p in kept[0].parameters())
    assert kept[1] != exact[1] and kept[1] == pytest.approx(exact[1], rel=0.05, abs=0.05)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_losses_and_scores_are_written(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = ("--set", "steps=20", "--set", f"schedule={schedule}", "--set", "learning_rate=0.01")
    cli.main([*command(*SETTINGS, *told, "--folder", "run")[3:]])
    rows = list(csv.DictReader((tmp_path / "run" / "csv" / "version_0" / "metrics.csv").open()))
    assert [row["step"] for row in rows] == ["1", "10", "20", "20"]
    rates = [float(row["learning_rate"]) for row in rows[:3]]
    half = (
        0.5 * (1 + torch.cos(torch.tensor([0.0, 9.0, 19.0]) * torch.pi / 20)) if schedule == "cosine" else torch.ones(3)
    )
    assert rates == pytest.approx((0.01 * half).tolist(), rel=1e-5)
    _, losses = first_losses(
        run(tmp_path, Sine(steps=20, batch_size=8, dim=8, learning_rate=0.01, schedule=schedule)), 10
    )
    assert [float(row["loss"]) for row in rows[:2]] == [losses[0], losses[9]]
    assert float(rows[3]["mse"]) > 0


def test_weights_decay(tmp_path: Path) -> None:
    """A loss of 0 leaves only the decay, which is decoupled from the gradients."""

    @dataclass(frozen=True)
    class Still(Sine):
        def loss(self, model: nn.Module, batch: Question) -> Tensor:
            return 0 * sum(p.sum() for p in model.parameters())

    task = Still(steps=1, batch_size=2, dim=8, weight_decay=0.5, optimizer="adamw", learning_rate=0.1)
    start = weights(run(tmp_path, task).model())
    model, _ = train(run(tmp_path, task))
    torch.testing.assert_close(weights(model), start * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("task", [name for name in sorted(TASKS) if TASKS[name].drawn_anywhere])
def test_batches_that_can_be_drawn_on_a_gpu_are(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device meta stands for a GPU, but has no generators, so the numbers come from the default one."""
    _device_constructors()  # torch remembers the functions that it finds in the first call
    for name in ("rand", "randn"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, generator=None, plain=plain, **how: plain(*size, **how))
    with torch.device("meta"):
        batch: Any = TASKS[task]().batch(seeded(0))
    assert all(part.device.type == "meta" for part in batch)


def test_a_batch_follows_from_its_number(tmp_path: Path) -> None:
    training = Training(run(tmp_path, seed=3))
    for number in (0, 5):
        for drawn, expected in zip(training.drawn(number), SMALL.batch(seeded(3, number)), strict=True):
            assert torch.equal(drawn, expected)
        assert torch.initial_seed() == seeded(3, number, 0).initial_seed()  # of the noise
