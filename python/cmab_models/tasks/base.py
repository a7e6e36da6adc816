"""What a task is: data, a model's size for it, a loss and scores."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from ..systems import SYSTEMS

if TYPE_CHECKING:
    from typing import Self

BySystem: TypeAlias = "Mapping[str, Mapping[str, Any]]"
"""Settings of a task for each system that has its own."""
TASKS: dict[str, type[Task]] = {}
"""The tasks that the command line knows, by name."""


@dataclass(frozen=True)
class Task(ABC):
    """Base class of tasks. A task is a frozen dataclass: its fields are the settings that `--set` changes.

    Randomness comes from the generators that are passed, so that a seed gives the same numbers on every run.
    """

    name: ClassVar[str]
    """What the command line calls it."""
    systems: ClassVar[tuple[str, ...]]
    """The names of the models that can learn it, in `systems.SYSTEMS`."""
    of_system: ClassVar[BySystem] = {}
    """Settings by system that differ from the defaults, such as `steps` where the same time allows for more."""

    steps: int = 1000
    """Steps of the optimiser."""
    learning_rate: float = 3e-3
    clip: float = 1.0
    """The largest norm of a gradient."""

    @classmethod
    def for_system(cls, system: str) -> Self:
        """Return the task as the system is trained on it unless other settings are given."""
        return cls(**cls.of_system.get(system, {}))

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            TASKS[cls.name] = cls

    @abstractmethod
    def sizes(self, system: str) -> dict[str, Any]:
        """Return the arguments of the system's constructor that suit this task."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Any:
        """Return a training batch."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, a scalar: 0, with gradients of 0, of a batch of nothing."""

    def before_step(self, model: nn.Module, step: int) -> None:  # noqa: B027 - most tasks change nothing
        """Change the model before step `step` of the optimiser, counted from 0; its parameters stay the same objects."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the model's scores on held-out data, the same data on every call."""

    def references(self) -> dict[str, float]:
        """Return scores that need no model, on the data of `evaluate`: a ceiling, if it is known, and a trivial prediction."""
        return {}

    def stream(self, model: nn.Module) -> Iterator[dict[str, float]]:
        """Yield what is known after each new point, event or token of one held-out stream."""
        raise NotImplementedError(f"{self.name} has no stream")

    def model(self, system: str, **changes: Any) -> nn.Module:
        """Return a new model of the size that suits this task, with `changes` to the arguments of its constructor.

        `ValueError` for a system that cannot learn the task, and for changes that it cannot be made with.
        """
        if system not in self.systems:
            raise ValueError(f"{system} cannot learn {self.name}; {', '.join(self.systems)} can")
        kind, sizes = SYSTEMS[system], self.sizes(system)
        _, *known = inspect.signature(kind.__init__).parameters
        for name in changes.keys() - known:
            raise ValueError(f"{system} has no argument {name!r}; it has {', '.join(known)}")
        try:
            return kind(**(sizes | changes))
        except RuntimeError as error:  # more than fits into memory
            if not changes:
                raise
            raise ValueError(f"{system} cannot be made with {changes}: {error}") from error

    def changed(self, settings: Mapping[str, Any]) -> Task:
        """Return the task with other settings.

        `ValueError` for a name that it does not have, a value of another type, and a number that is not positive and finite; it may be 0
        where that is the default.
        """
        known = {field.name: field.default for field in fields(self)}
        for name, value in settings.items():
            if name not in known:
                raise ValueError(f"{self.name} has no setting {name!r}; it has {', '.join(known)}")
            default = known[name]
            kinds = (float, int) if type(default) is float else (type(default),)
            if type(value) not in kinds:
                raise ValueError(f"{name} is {value!r}; it must be of the kind of {default!r}")
            if type(value) in (int, float) and not (0 < value <= sys.float_info.max or value == default):
                raise ValueError(f"{name} is {value!r}; it must be positive{'' if default else ', or 0'}, and finite")
        return replace(self, **settings)


def reduction(answers: Tensor) -> str:
    """Return what torch's losses are to take of all answers: the mean, which is NaN where there are none; the sum is 0 there."""
    return "mean" if answers.numel() else "sum"


def seeded(*seeds: int) -> torch.Generator:
    """Return a generator whose numbers follow from the seeds alone."""
    state = 0
    for seed in seeds:
        state = (state * 1_000_003 + seed + 1) % (1 << 63)
    return torch.Generator().manual_seed(state)
