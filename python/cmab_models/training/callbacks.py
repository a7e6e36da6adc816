"""What a training does besides its steps: checkpoints, signals, and a progress bar."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from .errors import Interrupted

if TYPE_CHECKING:
    from .loop import Run


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint through a second file next to it, so that the end of the process leaves the previous
    checkpoint unchanged. Lightning's own writer uses the folder of temporary files, which may be on another disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        torch.save(checkpoint, beside)
        os.replace(beside, path)


class Checkpoints(Callback):
    """Writes the checkpoint every so many minutes, at the end, and on a signal.

    It acts between steps of the optimiser only. Lightning's own callbacks may act between two batches of one step, or,
    for a signal, within a step: a training could then not be resumed to the same numbers.
    """

    def __init__(self, run: Run, minutes: float) -> None:
        self.run, self.seconds = run, 60 * minutes
        self._waiting: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Any] = {}
        self._stops = False  # whether another callback has stopped the training between two batches of a step

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._saved = time.monotonic()
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
        due = trainer.strategy.reduce_boolean_decision(bool(self._waiting) or now - self._saved >= self.seconds, False)
        if last or due:
            trainer.save_checkpoint(self.run.checkpoint)
            self._saved = time.monotonic()
            self._answer(trainer, done)

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
        return Interrupted(
            f"training: it stopped after {done} of {self.run.task.steps} steps; go on with --resume from "
            f"{self.run.checkpoint}"
        )

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self._restore()
        if trainer.global_step < self.run.task.steps:  # another callback has stopped the training
            trainer.save_checkpoint(self.run.checkpoint)
            raise self._interrupted(trainer.global_step)

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
