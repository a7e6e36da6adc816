"""The training loop: Adam with a cosine schedule, the same for all systems."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from cmab_kernels.runtime.checks import mismatch

from ..systems import SYSTEMS
from ..tasks import Task, seeded
from . import checkpoint
from .code import digest


class Interrupted(Exception):
    """The user stopped the training; the message names the checkpoint from which to continue."""


class Diverged(ArithmeticError):
    """A loss is not finite, or the loss or the weights after the last step are not finite; the message names the
    step."""


@dataclass(frozen=True)
class Run:
    """A system, a task, a seed, and the folder of the training run."""

    system: str
    task: Task
    folder: Path
    seed: int = 0
    device: str = "cpu"
    model_settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the system's constructor that differ from the task's."""

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def described(self) -> dict[str, Any]:
        """Return everything that the result depends on, except the device and the code, as numbers and strings."""
        model = {f"model.{name}": value for name, value in self.model_settings.items()}
        return {"system": self.system, "task": self.task.name, "seed": self.seed, **asdict(self.task), **model}

    def defaults(self) -> dict[str, Any]:
        """Return the values of all `model.` entries that `described` leaves out."""
        return {f"model.{name}": value for name, value in self.task.arguments(self.system).items()}

    def recorded(self) -> dict[str, Any]:
        """Return the entries of `described`, and `code`, a digest of the code of the system, the task and the
        training."""
        return self.described() | {
            "code": digest(SYSTEMS[self.system].__module__, type(self.task).__module__, __name__)
        }

    def model(self) -> nn.Module:
        """Return the untrained model; it follows from the seed."""
        torch.manual_seed(self.seed)
        return self.task.model(self.system, **self.model_settings).to(self.device)


def train(
    run: Run, *, resume: bool = False, report: Callable[[int, float], None] | None = None
) -> tuple[nn.Module, dict[str, float]]:
    """Train; return the model and the seconds of the training, `cpu_seconds` and `wall_seconds`, including those before
    a resumption.

    `report(steps_done, loss)` is called after each step. The checkpoint in `run.folder` is written at the end and on an
    interruption. An interruption waits until the step, or the checkpoint, is finished, and then raises `Interrupted`.
    With `resume`, training continues from the checkpoint. On the same machine and with the same number of threads, it
    gives the same numbers as a run that was not interrupted.
    """
    model, task = run.model(), run.task
    optimizer = torch.optim.Adam(model.parameters(), lr=task.learning_rate, fused=True)
    done, cpu, wall = 0, time.process_time(), time.perf_counter()
    if resume:
        defaults = run.defaults()
        last = checkpoint.resumed(run.checkpoint, defaults | run.described(), defaults, model, optimizer)
        done, cpu, wall = last.step, cpu - last.cpu_seconds, wall - last.wall_seconds

    def seconds() -> dict[str, float]:
        return {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}

    def save() -> None:
        spent = seconds()
        state = (
            run.recorded(),
            done,
            spent["cpu_seconds"],
            spent["wall_seconds"],
            model.state_dict(),
            optimizer.state_dict(),
        )
        checkpoint.save(run.checkpoint, checkpoint.Checkpoint(*state))

    model.train()
    try:
        while done < task.steps:
            with _uninterrupted():
                loss = _step(model, optimizer, run, done)
                done += 1
                if done == task.steps:
                    _check_last(model, run)
                    save()
            if report is not None:
                report(done, loss)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt), _uninterrupted():
            save()
        raise Interrupted(
            f"training: it stopped after {done} of {task.steps} steps; go on with --resume from {run.checkpoint}"
        ) from None
    model.eval()
    return model, seconds()


def first_losses(run: Run, steps: int) -> tuple[nn.Module, list[float]]:
    """Return the model after the first steps of a run, and their losses."""
    model = run.model().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=run.task.learning_rate, fused=True)
    return model, [_step(model, optimizer, run, done) for done in range(steps)]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block: an optimiser that is stopped half-way would have updated only some of
    the weights."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # only the main thread gets interrupts, and only it may change how they are handled
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *interruption: waiting.append(interruption))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    for interruption in waiting:
        handler(*interruption)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, done: int) -> float:
    """Take one step. All its random numbers follow from the seed and the number of the step, so training can be
    resumed."""
    task, generator = run.task, _generator(run, done)
    task.before_step(model, done)
    (group,) = optimizer.param_groups
    group["lr"] = task.learning_rate * 0.5 * (1 + math.cos(math.pi * done / task.steps))
    optimizer.zero_grad(set_to_none=True)
    loss = _loss(model, run, generator)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(group["params"], task.clip)
    value = float(loss.detach())
    if not math.isfinite(value) or not math.isfinite(float(norm)):
        hint = (
            "try a smaller learning_rate" if done else "the model has not learned yet: check its options and the data"
        )
        given = f"{value} in step {done + 1}, with a gradient of norm {float(norm)}"
        raise Diverged(mismatch("loss", given, f"finite numbers; {hint}"))
    optimizer.step()
    return value


@torch.no_grad()
def _check_last(model: nn.Module, run: Run) -> None:
    """Raise `Diverged` if the last step diverged. A loss shows only the effect of earlier steps, so the last step needs
    a check of its own.

    Weights of 1e30 are finite, but results computed from them are not. A ReLU can hide infinite weights. So both the
    loss and the weights are checked.
    """
    loss = float(_loss(model, run, _generator(run, run.task.steps)))
    largest = float(nn.utils.parameters_to_vector(model.parameters()).abs().max())
    if not math.isfinite(loss) or not math.isfinite(largest):
        raise Diverged(
            mismatch(
                "loss",
                f"{loss} after the last step, with a largest weight of {largest}",
                "finite numbers; try a smaller learning_rate",
            )
        )


def _generator(run: Run, done: int) -> torch.Generator:
    """Return the generator of the step after `done` steps, and seed torch's global generator in the same way."""
    generator = seeded(run.seed, done)
    torch.manual_seed(generator.initial_seed())
    return generator


def _loss(model: nn.Module, run: Run, generator: torch.Generator) -> torch.Tensor:
    """Return the loss of a batch drawn from the generator."""
    batch = tree_map(
        lambda entry: entry.to(run.device) if isinstance(entry, torch.Tensor) else entry, run.task.batch(generator)
    )
    return run.task.loss(model, batch)
