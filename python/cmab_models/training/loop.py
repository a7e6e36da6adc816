"""Training with Lightning: Adam with a schedule, the same for all systems.

Lightning takes seconds to import, so it is imported when a training begins.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module where there is one

from cmab_kernels.runtime.checks import mismatch

from ..precision import in_own_modes
from ..pretrained import python_value
from ..systems import SYSTEMS
from ..tasks import Task
from . import checkpoint
from .code import digest
from .errors import Interrupted

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.loggers import Logger

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
"""Lightning's names of the types in which models are trained. The weights are float32 in all of them."""
SAVE_EVERY = 10.0
"""The minutes between two checkpoints."""


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
    precision: str = PRECISIONS[0]
    devices: int = 1
    """The number of processes, each with a device and batches of its own, that train one model."""
    accumulate: int = 1
    """The number of batches of each process in a step of the optimiser."""

    def __post_init__(self) -> None:
        for name in ("seed", "devices", "accumulate"):
            object.__setattr__(self, name, python_value(getattr(self, name)))
        object.__setattr__(self, "folder", Path(self.folder))
        object.__setattr__(
            self, "model_settings", {name: python_value(each) for name, each in self.model_settings.items()}
        )
        if self.precision not in PRECISIONS:
            raise ValueError(mismatch("precision", repr(self.precision), f"one of {', '.join(PRECISIONS)}"))
        if self.precision == "16-mixed" and self.device == "cpu":
            raise ValueError(mismatch("precision", "'16-mixed' on a CPU", "'bf16-mixed' or '32-true' there"))
        if taken := {"system", "task", "seed", *HOW} & self.task.settings().keys():
            raise ValueError(mismatch("task", f"a setting named {min(taken)}", "other names than those of Run"))
        for name, count in (("devices", self.devices), ("accumulate", self.accumulate)):
            if type(count) is not int or count < 1:
                raise ValueError(mismatch(name, repr(count), "an int >= 1"))
        if self.devices > 1 and ":" in self.device:
            raise ValueError(mismatch("devices", f"{self.devices} with {self.device}", "1, or the device cpu or cuda"))

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def described(self) -> dict[str, Any]:
        """Return everything that the result depends on, except the device and the code, as numbers and strings."""
        model = {f"model.{name}": value for name, value in self.model_settings.items()}
        how = {name: getattr(self, name) for name in HOW}
        return {
            "system": self.system,
            "task": self.task.name,
            "seed": self.seed,
            **how,
            **self.task.settings(),
            **model,
        }

    def defaults(self) -> dict[str, Any]:
        """Return the values of all `model.` entries that `described` leaves out, and of the settings that older records
        lack."""
        return {
            **self.task.defaults(),
            **{f"model.{name}": value for name, value in self.task.arguments(self.system).items()},
        }

    def recorded(self) -> dict[str, Any]:
        """Return the entries of `described`, and `code`, a digest of the code of the system, the task and the
        training, as far as this package has it."""
        return self.described() | {
            "code": digest(
                SYSTEMS[self.system].__module__, *(kind.__module__ for kind in type(self.task).__mro__), __name__
            )
        }

    def model(self) -> nn.Module:
        """Return the untrained model; it follows from the seed."""
        with _own_numbers(self.device):
            torch.manual_seed(self.seed)
            return self.task.model(self.system, **self.model_settings).to(self.device)


HOW = ("precision", "devices", "accumulate")
"""The settings of a run that belong neither to its task nor to its model."""


@in_own_modes  # Lightning leaves gradients on
def train(
    run: Run,
    *,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
    loggers: Iterable[Logger] = (),
    save_every: float = SAVE_EVERY,
) -> tuple[nn.Module, dict[str, float]]:
    """Train; return the model and the seconds of the training, `cpu_seconds` and `wall_seconds`, including those before
    a resumption. With the `patience` of a task, the model has its best weights, and `best_step` is the step that led to
    them.

    The checkpoint in `run.folder` is written every `save_every` minutes, at the end, and on Ctrl-C, SIGTERM and the
    signal with which SLURM requeues a job. A signal waits until the step of the optimiser, or the checkpoint, is
    finished; Ctrl-C and SIGTERM then raise `Interrupted`, as does a callback that stops the training early. With
    `resume`, training continues from the checkpoint. On the same machine and with the same number of threads, it gives
    the same numbers as a run that was not interrupted. Trainings in threads share torch's generators, so seeds decide
    only in processes of their own.
    """
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, WeightAveraging

    from .callbacks import Checkpoints, EarlyStop
    from .module import Training

    callbacks, early = list(callbacks), EarlyStop(run)
    if any(isinstance(each, GradientAccumulationScheduler) for each in callbacks):
        raise ValueError(mismatch("callbacks", "a GradientAccumulationScheduler", "`accumulate` of the run"))
    if run.task.patience and any(isinstance(each, WeightAveraging) for each in callbacks):
        given = f"an average of weights with patience={run.task.patience}"
        raise ValueError(mismatch("callbacks", given, "patience=0, as the weights of one step are kept otherwise"))
    checkpoint.check_settings(run.described())
    with _quiet(), _own_numbers(run.device):
        training, saves = Training(run), Checkpoints(run, save_every, early, resume)
        if resume:
            found = checkpoint.resumed(run.checkpoint, run.described(), run.defaults(), training.model)
            if run.task.patience:
                early.load_state_dict(found.callbacks["EarlyStop"])
            if found.step == run.task.steps or early.ended:
                return early.best(training.model).eval(), found.seconds | early.told()
        trainer = _trainer(run, run.task.steps, [*callbacks, early, saves], loggers)
        with _alone(run.folder) if trainer.is_global_zero else nullcontext():
            try:
                trainer.fit(training, ckpt_path=run.checkpoint if resume else None, weights_only=True)
            except Interrupted as stop:
                raise stop from None  # not from within Lightning
        saves.check_end(trainer.global_step)
    return early.best(training.model).to(run.device).eval(), training.seconds() | early.told()


def fitted(
    system: str, task: Task, folder: str | Path | None, seed: int, device: str, model: Mapping[str, Any] | None
) -> nn.Module:
    """Return a model that is trained on a caller's data, or goes on from the checkpoint in `folder`. The task holds the
    data. Without `folder`, an interrupted training is lost."""
    if system not in task.systems:
        raise ValueError(mismatch("system", repr(system), f"one of {', '.join(task.systems)}"))
    with nullcontext(folder) if folder else TemporaryDirectory() as place:
        run = Run(system, task, Path(place), seed, str(device), dict(model or {}))
        try:
            return train(run, resume=run.checkpoint.exists())[0]
        except Interrupted as stop:
            done, _, _ = str(stop).partition(";")
            goes_on = f"the same call goes on from {run.checkpoint}"
            hint = goes_on if folder else "with folder=..., a next call would go on"
            raise Interrupted(f"{done}; {hint}") from None


def _own_numbers(device: str) -> AbstractContextManager[None]:
    """Leave torch's global generators as they are: a training seeds them for each batch."""
    kind, _, number = device.partition(":")
    return torch.random.fork_rng(devices=[int(number or 0)] if kind == "cuda" else [])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Raise an `OSError` if another process trains in the folder, as both would write the same checkpoint.

    The lock is on the folder itself, and ends with the process. Windows has no such lock.
    """
    if fcntl is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{folder}: another training writes there; choose another folder") from None
        yield
    finally:
        os.close(held)


def first_losses(run: Run, steps: int) -> tuple[nn.Module, list[float]]:
    """Return the model after the first steps of a run, and their losses."""
    from .callbacks import Losses
    from .module import Training

    losses = Losses()
    with _quiet(), _own_numbers(run.device):
        training = Training(run)
        _trainer(run, steps, [losses], ()).fit(training)
    return training.model.to(run.device), losses.seen


def _trainer(run: Run, steps: int, callbacks: list[Callback], loggers: Iterable[Logger]) -> Trainer:
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ProgressBar

    from .callbacks import WholeFiles

    kind, _, number = run.device.partition(":")
    # The tasks of a SLURM job are the processes of one training only if the training has several.
    is_one_of_several = run.devices == 1 and os.environ.get("SLURM_NTASKS", "1") != "1"
    return Trainer(
        accelerator=kind,
        devices=[int(number)] if number else run.devices,
        # The loss of some systems does not depend on all of their parameters.
        strategy="ddp_find_unused_parameters_true" if run.devices > 1 else "auto",
        precision=run.precision,  # type: ignore[arg-type]  # a str; Lightning lists its literals
        max_steps=steps,
        accumulate_grad_batches=run.accumulate,
        callbacks=callbacks,
        plugins=[WholeFiles(), *([LightningEnvironment()] if is_one_of_several else [])],
        logger=list(loggers),
        default_root_dir=run.folder,
        enable_checkpointing=False,  # `Checkpoints` writes them, between steps of the optimiser
        enable_progress_bar=any(isinstance(each, ProgressBar) for each in callbacks),
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's general messages about devices, tips and data loaders."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        logger.setLevel(level)
