"""A system that learns a task, as a module of Lightning, and the batches of each step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from cmab_kernels.runtime.checks import mismatch

from ..tasks import seeded
from .checkpoint import FORMAT
from .errors import Diverged

if TYPE_CHECKING:
    from .loop import Run

LOG_EVERY = 10
"""The number of steps between two losses that are logged."""


class Training(LightningModule):
    """The training of one run. All random numbers of a batch follow from the seed and the number of the batch, so
    training can be resumed."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model, self.run = run.model().train(), run
        self.loss, self.rate = math.nan, run.task.learning_rate
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the training so far, including those before a resumption."""
        return {"cpu_seconds": time.process_time() - self._cpu, "wall_seconds": time.perf_counter() - self._wall}

    def configure_optimizers(self) -> Any:
        task = self.run.task
        optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[task.optimizer](
            self.model.parameters(),
            lr=task.learning_rate,
            weight_decay=task.weight_decay,
            fused=self.run.precision != "16-mixed",  # gradients that a fused step unscales cannot be clipped
        )
        return [optimizer], [
            {"scheduler": LambdaLR(optimizer, _schedule(task.schedule, task.steps)), "interval": "step"}
        ]

    def train_dataloader(self) -> Batches:
        return Batches(self)

    def drawn(self, number: int) -> Any:
        """Return the batch with this number, drawn on the device if the task can, and seed torch's global generators,
        from which models draw their noise.

        The noise has a seed of its own: from the seed of the batch it would be the numbers of the batch again.
        """
        task, generator = self.run.task, seeded(self.run.seed, number)
        noise = seeded(self.run.seed, number, 0).initial_seed()
        # torch.manual_seed would also format a stack for each device that is not in use, and keep it.
        torch.default_generator.manual_seed(noise)
        if self.device.type == "cpu":
            return task.batch(generator)
        torch.cuda.manual_seed(noise)
        if not task.drawn_anywhere:
            return task.batch(generator)
        with self.device:
            return task.batch(torch.Generator(self.device).manual_seed(generator.initial_seed()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.run.accumulate == 0:
            self.run.task.before_step(self.model, self.trainer.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.run.task.loss(self.model, batch)
        self._last = loss.detach()
        return loss

    def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        """Clip the gradients, and raise `Diverged` before the weights change if they or the loss are not finite."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.run.task.clip)
        self.loss, done = float(self._last), self.trainer.global_step
        self.rate = optimizer.param_groups[0]["lr"]
        # In float16, gradients overflow at times. The scaler then leaves the step out.
        if math.isfinite(self.loss) and (self.run.precision == "16-mixed" or math.isfinite(float(norm))):
            return
        hint = (
            "try a smaller learning_rate" if done else "the model has not learned yet: check its options and the data"
        )
        given = f"{self.loss} in step {done + 1}, with a gradient of norm {float(norm)}"
        raise Diverged(mismatch("loss", given, f"finite numbers; {hint}"))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.run.accumulate or not self.trainer.loggers:
            return
        done = self.trainer.global_step
        if done % LOG_EVERY == 0 or done in (1, self.run.task.steps):
            for logger in self.trainer.loggers:
                logger.log_metrics({"loss": self.loss, "learning_rate": self.rate}, step=done)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss of the task's `validation` batches. The random numbers of the training stay as they
        are."""
        losses = []
        self.model.eval()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            for batch in self.run.task.validation():
                losses.append(float(self.run.task.loss(self.model, self.trainer.strategy.batch_to_device(batch))))
        self.model.train()
        if not losses or not math.isfinite(mean := math.fsum(losses) / len(losses)):
            given = f"{losses[:3]} after step {self.trainer.global_step}" if losses else "no batch"
            raise Diverged(mismatch("validation", given, "batches with finite losses; try a smaller learning_rate"))
        return mean

    @torch.no_grad()
    def check_last(self) -> None:
        """Raise `Diverged` if the last step diverged. A loss shows only the effect of earlier steps, so the last step
        needs a check of its own.

        Weights of 1e30 are finite, but results computed from them are not. A ReLU can hide infinite weights. So both
        the loss and the weights are checked.
        """
        batch = self.trainer.strategy.batch_to_device(self.drawn(len(Batches(self))))
        loss = float(self.run.task.loss(self.model, batch))
        largest = float(nn.utils.parameters_to_vector(self.model.parameters()).abs().max())
        if not math.isfinite(loss) or not math.isfinite(largest):
            given = f"{loss} after the last step, with a largest weight of {largest}"
            raise Diverged(mismatch("loss", given, "finite numbers; try a smaller learning_rate"))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"format": FORMAT, "run": self.run.recorded(), **self.seconds()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._cpu -= checkpoint["cpu_seconds"]
        self._wall -= checkpoint["wall_seconds"]


class Batches:
    """The batches of a process, from its next step on. With several processes, they take turns."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def __len__(self) -> int:
        return self.training.run.task.steps * self.training.run.accumulate

    def __iter__(self) -> Iterator[Any]:
        trainer = self.training.trainer
        for number in range(trainer.global_step * self.training.run.accumulate, len(self)):
            yield self.training.drawn(number * trainer.world_size + trainer.global_rank)


def _schedule(name: str, steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate after a number of steps."""
    if name == "constant":
        return lambda done: 1.0
    return lambda done: 0.5 * (1 + math.cos(math.pi * done / steps))
