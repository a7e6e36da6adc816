"""What a training does besides its steps: checkpoints, signals, and a progress bar."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor, nn

from .checkpoint import BEST, check_states
from .errors import Interrupted

if TYPE_CHECKING:
    from .loop import Run


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint through a second file next to it, so that the end of the process leaves the previous
    checkpoint unchanged. Lightning's own writer uses the folder of temporary files, which may be on another disk.

    The copy that Lightning makes when SLURM takes a job back is not written: `Checkpoints` has just written the same,
    and under SLURM any later training in the folder would start from the copy."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None) -> None:
        path = Path(path)
        if path.name.startswith("hpc_ckpt_"):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        try:
            torch.save(checkpoint, beside)
            os.replace(beside, path)
        except (OSError, RuntimeError) as error:  # torch raises a RuntimeError if the disk is full
            reason = getattr(error, "strerror", None) or shorten(str(error), 100)
            raise OSError(f"{path} cannot be written; the one before it is as it was: {reason}") from error


class EarlyStop(Callback):
    """Keeps the weights with the lowest validation loss, and ends a training after `patience` checks without a lower
    one. What it knows is part of the checkpoint, so a training that is resumed stops at the same step."""

    def __init__(self, run: Run) -> None:
        self.run, self.loss, self.step, self.waited = run, math.inf, 0, 0
        self.weights: dict[str, Tensor] = {}

    @property
    def ended(self) -> bool:
        """Whether the training is complete, although it has had fewer than all steps."""
        return 0 < self.run.task.patience <= self.waited

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop |= self.ended  # in a resumption of a training that has ended

    def on_train_batch_end(self, trainer: Trainer, training: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        task, done = self.run.task, trainer.global_step
        due = done % task.check_every == 0 or done == task.steps
        if not task.patience or (batch_idx + 1) % self.run.accumulate or not due:
            return
        # All processes decide the same.
        loss = trainer.strategy.broadcast(training.validation_loss())
        for logger in trainer.loggers:
            logger.log_metrics({"validation_loss": loss}, step=done)
        if loss < self.loss:
            self.loss, self.step, self.waited = loss, done, 0
            self.weights = {name: each.detach().cpu().clone() for name, each in training.model.state_dict().items()}
        else:
            self.waited += 1
            trainer.should_stop |= self.ended

    def best(self, model: nn.Module) -> nn.Module:
        """Return the model with the best weights; unchanged if there were no checks."""
        if self.weights:
            model.load_state_dict(self.weights)
        return model

    def told(self) -> dict[str, float]:
        return {"best_step": self.step} if self.weights else {}

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "step": self.step, "waited": self.waited, "weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loss, self.step, self.waited, self.weights = (state_dict[name] for name in BEST)


class Checkpoints(Callback):
    """Writes the checkpoint every so many minutes, at the end, and on a signal.

    It acts between steps of the optimiser only. Lightning's own callbacks may act between two batches of one step, or,
    for a signal, within a step: a training could then not be resumed to the same numbers.
    """

    def __init__(self, run: Run, minutes: float, early: EarlyStop, resumed: bool) -> None:
        self.run, self.seconds, self.early, self.kept = run, 60 * minutes, early, resumed
        self._waiting: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Any] = {}
        self._stops = False  # whether another callback has stopped the training between two batches of a step

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._check_states(trainer)
        self._saved, self._saved_step = time.monotonic(), trainer.global_step
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread gets signals, and only it may change how they are handled
        requeue = [signal.SIGUSR1] if SLURMEnvironment.detect() else []
        for each in (signal.SIGINT, signal.SIGTERM, *requeue):
            self._handlers[each] = signal.signal(each, lambda *given: self._waiting.append(given))

    def on_train_batch_end(self, trainer: Trainer, training: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.run.accumulate:
            self._stops |= trainer.should_stop
            trainer.should_stop = False
            return
        trainer.should_stop |= self._stops
        done, now = trainer.global_step, time.monotonic()
        if last := done == self.run.task.steps:
            training.check_last()
        # All processes stop, or write, at the same step.
        stops = bool(self._waiting) or trainer.should_stop
        due = trainer.strategy.reduce_boolean_decision(stops or now - self._saved >= self.seconds, False)
        if last or due:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, False)
            self._save(trainer)
            self._answer(trainer, done)

    def _save(self, trainer: Trainer) -> None:
        self._check_states(trainer)  # the file before stays if it cannot be written
        trainer.save_checkpoint(self.run.checkpoint)
        self._saved, self._saved_step, self.kept = time.monotonic(), trainer.global_step, True

    def _check_states(self, trainer: Trainer) -> None:
        check_states(trainer.callbacks)  # type: ignore[attr-defined]  # a list, which Lightning sets elsewhere

    def _answer(self, trainer: Trainer, done: int) -> None:
        """Handle the signals that came before the checkpoint was written, or during the write."""
        stop = False
        for number, frame in self._waiting:
            if number in (signal.SIGINT, signal.SIGTERM):
                stop = True
            elif callable(handler := self._handlers[number]):
                handler(number, frame)  # Lightning's, which puts the job back into the queue
        self._waiting.clear()
        if trainer.strategy.reduce_boolean_decision(stop, False):
            raise self._interrupted(done)

    def _interrupted(self, done: int) -> Interrupted:
        hint = f"; go on with --resume from {self.run.checkpoint}" if self.kept else ""
        return Interrupted(f"training: it stopped after {done} of {self.run.task.steps} steps{hint}")

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self._restore()
        if trainer.global_step != self._saved_step:  # a callback has stopped the training between two batches
            self._save(trainer)

    def check_end(self, done: int) -> None:
        """Raise `Interrupted` if a callback has stopped the training, before its first step or after any other."""
        if done < self.run.task.steps and not self.early.ended:
            raise self._interrupted(done)

    def on_exception(self, *_: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()


class Losses(Callback):
    """Keeps the losses of all steps."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, training: Any, *_: Any) -> None:
        self.seen.append(training.loss)


class Bar(TQDMProgressBar):
    """A progress bar that is drawn twice a second, however long a step takes."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self._drawn = 0.0

    def on_train_batch_end(self, trainer: Trainer, training: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        if now - self._drawn >= 0.5 or trainer.global_step == trainer.max_steps:
            self._drawn = now
            super().on_train_batch_end(trainer, training, outputs, batch, batch_idx)

    def on_exception(self, *_: Any) -> None:
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()  # so that nothing is drawn after the message of an interruption

    def get_metrics(self, trainer: Trainer, training: Any) -> dict[str, Any]:
        return {"loss": f"{training.loss:.3f}"}
