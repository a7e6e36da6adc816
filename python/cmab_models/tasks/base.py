"""The definition of a task: data, a model's size for it, a loss and scores."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from cmab_kernels.runtime.checks import check_count, kind_of, mismatch

from ..pretrained import python_value
from ..systems import SYSTEMS

if TYPE_CHECKING:
    from typing import Self

BySystem: TypeAlias = "Mapping[str, Mapping[str, Any]]"
"""System -> the settings of a task that differ for it."""
OPTIMIZERS = ("adam", "adamw")
SCHEDULES = ("cosine", "constant")
VALIDATED = 16
"""The number of batches of `Task.validation`, unless a task has its own."""
TASKS: dict[str, type[Task]] = {}
"""The tasks that the command line knows, by name."""


@dataclass(frozen=True)
class Task(ABC):
    """Base class of tasks. A task is a frozen dataclass: its fields are the settings that `--set` changes.

    All random numbers come from generators that are passed as arguments, so a seed gives the same numbers on every run.
    """

    name: ClassVar[str]
    """The name on the command line."""
    systems: ClassVar[tuple[str, ...]]
    """The names, in `systems.SYSTEMS`, of the models that can learn the task."""
    of_system: ClassVar[BySystem] = {}
    """System -> settings that differ from the defaults, such as more `steps` if the same time allows for more."""
    drawn_anywhere: ClassVar[bool] = False
    """Whether `batch` draws all its numbers on torch's default device, if the generator is there too. A training on a
    GPU then draws its batches there. Else they are made on the CPU, and moved."""

    steps: int = 1000
    """Steps of the optimiser."""
    learning_rate: float = 3e-3
    clip: float = 1.0
    """The largest norm of a gradient."""
    weight_decay: float = 0.0
    """With "adam", the multiple of each weight that is added to its gradient; with "adamw", the share of a weight by
    which it decays, times the learning rate."""
    optimizer: str = OPTIMIZERS[0]
    """One of "adam" and "adamw"."""
    schedule: str = SCHEDULES[0]
    """The course of the learning rate: "cosine", down to 0 after the last step, or "constant"."""
    patience: int = 0
    """The number of checks in a row without a lower loss of the `validation` batches, after which a training stops. The
    model then gets the weights with the lowest loss. 0: there are no checks."""
    check_every: int = 100
    """Steps between two checks."""

    def __post_init__(self) -> None:
        """Raise an error for an unknown word, and for a number of steps or checks that cannot be. Numbers of NumPy
        become Python's."""
        for each in fields(self):
            object.__setattr__(self, each.name, python_value(getattr(self, each.name)))
        for name, least in (("steps", 1), ("check_every", 1), ("patience", 0)):
            check_count(name, getattr(self, name), least)
        self._check_word("optimizer", OPTIMIZERS)
        self._check_word("schedule", SCHEDULES)

    def _check_word(self, name: str, words: Sequence[str]) -> None:
        if getattr(self, name) not in words:
            raise ValueError(mismatch(name, repr(getattr(self, name)), f"one of {', '.join(words)}"))

    @classmethod
    def for_system(cls, system: str) -> Self:
        """Return the task with the settings that a training of this system uses by default."""
        return cls(**cls.of_system.get(system, {}))

    def __init_subclass__(cls, *, listed: bool = True) -> None:
        """Enter a task with a name into `TASKS`, unless it is not `listed`: a task of a caller's arrays cannot be made
        from a command."""
        super().__init_subclass__()
        if listed and "name" in cls.__dict__:
            TASKS[cls.name] = cls

    @abstractmethod
    def sizes(self, system: str) -> dict[str, Any]:
        """Return the arguments of the system's constructor that suit this task."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Any:
        """Return a training batch."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, a scalar. For an empty batch it is 0, with gradients of 0."""

    def validation(self) -> Iterator[Any]:
        """Yield the batches whose mean loss stops a training with `patience`. They are the same in every call.

        By default they are drawn as the training batches are, with other random numbers. This suits tasks that draw
        endless data. Where `batch` chooses from data of a fixed size, override this with data that `batch` leaves out:
        otherwise the loss shows when a training has converged, but not when it overfits.
        """
        return (self.batch(seeded_check(number)) for number in range(VALIDATED))

    def before_step(self, model: nn.Module, step: int) -> None:  # noqa: B027 - most tasks change nothing
        """Change the model before step `step` of the optimiser, counted from 0. The parameters stay the same
        objects."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the model's scores on held-out data. This data is the same in every call."""

    def references(self) -> dict[str, float]:
        """Return scores that need no model, on the data of `evaluate`: an upper bound, if one is known, and a trivial
        prediction."""
        return {}

    def stream(self, model: nn.Module) -> Iterator[dict[str, float]]:
        """Yield the known values, such as scores, after each new point, event or token of one held-out stream."""
        raise NotImplementedError(f"task: {self.name} has no stream; choose another task")

    def settings(self) -> dict[str, Any]:
        """Return the values of all settings. A field with `repr=False` holds data, and is not a setting."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defaults of all settings that have one."""
        found = {}
        for each in (each for each in fields(cls) if each.repr):
            if each.default is not MISSING:
                found[each.name] = each.default
            elif each.default_factory is not MISSING:
                found[each.name] = each.default_factory()
        return found

    def arguments(self, system: str) -> dict[str, Any]:
        """Return the arguments of the system's constructor for this task: its defaults, and the sizes that suit the
        task."""
        parameters = inspect.signature(SYSTEMS[system].__init__).parameters.values()
        defaults = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
        return defaults | self.sizes(system)

    def model(self, system: str, **changes: Any) -> nn.Module:
        """Return a new model of the size that suits this task, with `changes` to the arguments of its constructor.

        Raises a `ValueError` for a system that cannot learn the task, for changes that the constructor does not accept,
        and for a change of an argument without a default: such arguments are the sizes of the task's data.
        """
        if system not in self.systems:
            raise ValueError(mismatch("system", system, f"one of {', '.join(self.systems)} for {self.name}"))
        kind, sizes = SYSTEMS[system], self.sizes(system)
        known = dict(list(inspect.signature(kind.__init__).parameters.items())[1:])
        for name, value in changes.items():
            if name not in known:
                raise ValueError(mismatch(name, f"an unknown argument of {system}", f"one of {', '.join(known)}"))
            if known[name].default is inspect.Parameter.empty and value != sizes.get(name, value):
                raise ValueError(mismatch(name, repr(value), f"{sizes[name]}, a size of the data of {self.name}"))
        try:
            return kind(**(sizes | changes))
        except RuntimeError as error:  # the model does not fit into memory
            if not changes:
                raise
            raise ValueError(
                mismatch(system, f"{changes}, with which it cannot be made ({error})", "sizes that fit into memory")
            ) from error

    def changed(self, settings: Mapping[str, Any]) -> Task:
        """Return the task with other settings.

        Raises a `ValueError` for an unknown name, a value of another type, and a number that is not positive and
        finite. A number may also be 0 if that is its default.
        """
        known = self.settings() | self.defaults()
        for name, value in settings.items():
            if name not in known:
                raise ValueError(mismatch(name, f"an unknown setting of {self.name}", f"one of {', '.join(known)}"))
            default = known[name]
            kinds = (float, int) if type(default) is float else (type(default),)
            if type(value) not in kinds:
                raise ValueError(mismatch(name, repr(value), f"{kind_of(default)}, such as {default!r}"))
            if type(value) in (int, float) and not (0 < value <= sys.float_info.max or value == default):
                raise ValueError(mismatch(name, repr(value), f"a finite number {'> 0' if default else '>= 0'}"))
        return replace(self, **settings)


def every_tenth(count: int) -> Tensor:
    """Return which of so many sequences or images are left out of a training with `patience` (count,) bool: a tenth;
    none of fewer than ten."""
    return torch.arange(count) % 10 == 9


def reduction(answers: Tensor) -> str:
    """Return the reduction of torch's losses over all answers: "mean", or "sum" without answers, because the mean would
    then be NaN."""
    return "mean" if answers.numel() else "sum"


def seeded(*seeds: int) -> torch.Generator:
    """Return a generator whose numbers follow from the seeds alone."""
    state = 0
    for seed in seeds:
        state = (state * 1_000_003 + seed + 1) % (1 << 63)
    return torch.Generator().manual_seed(state)


def seeded_check(number: int) -> torch.Generator:
    """Return the generator of a validation batch. A training draws its batches with two seeds, so it has no such
    generator."""
    return seeded(19, 0, number)
