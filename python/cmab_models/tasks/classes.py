"""Tasks of keys, values and queries over small images: finding the odd one out, and learning classes from a few
examples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmab_kernels.runtime.checks import mismatch

from ..choices import largest
from ..data.glyphs import Glyphs, dejavu, digits, letters, turned
from .base import BySystem, Task, reduction, seeded
from .sets import Question

GLYPHS: dict[str, Callable[[], Glyphs]] = {"digits": digits, "letters": letters, "dejavu": dejavu}
HELD_OUT = 1000
"""The number of held-out questions."""


@dataclass(frozen=True)
class ImageTask(Task):
    """Base class of tasks with questions over images. The score is the share of right answers; an answer is the index
    of the largest score."""

    batch_size: int = 32
    steps: int = 1000
    dim: int = 64

    @abstractmethod
    def drawn(self, generator: torch.Generator, count: int, held_out: bool) -> Question:
        """Return questions; answers are classes (B, M) int64."""

    @abstractmethod
    def scores(self, model: nn.Module, question: Question) -> Tensor:
        """Return the scores (B, M, classes) of a question."""

    def batch(self, generator: torch.Generator) -> Question:
        return self.drawn(generator, self.batch_size, held_out=False)

    def loss(self, model: nn.Module, batch: Question) -> Tensor:
        return F.cross_entropy(
            self.scores(model, batch).flatten(0, 1), batch.answer.flatten(), reduction=reduction(batch.answer)
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        return {"accuracy": self._accuracy(lambda asked: self.scores(model, Question(*(p.to(device) for p in asked))))}

    def held_out(self) -> Iterator[Question]:
        """Yield the held-out questions, the same in every call, in pieces that fit into memory."""
        yield self.drawn(seeded(29), HELD_OUT, held_out=True)

    @torch.no_grad()
    def _accuracy(self, scores: Callable[[Question], Tensor]) -> float:
        """Return the share of held-out questions whose largest score (B, M, classes) is the answer's."""
        right = [largest(scores(question)).cpu() == question.answer for question in self.held_out()]
        return torch.cat(right).double().mean().item()


@dataclass(frozen=True)
class OutlierTask(ImageTask):
    """Base class of tasks that ask for the odd one out among 10 images: the other nine are of the same class."""

    depth: int = 4

    @abstractmethod
    def images(self, held_out: bool) -> tuple[Tensor, Tensor]:
        """Return the images (N, ...) and classes (N,) of a part."""

    @abstractmethod
    def asked(self, images: Tensor, places: Tensor) -> Question:
        """Return the questions of images (B, 10, ...) with the odd ones at places (B, 1)."""

    def drawn(self, generator: torch.Generator, count: int, held_out: bool) -> Question:
        images, labels = self.images(held_out)
        by_class = labels.argsort(stable=True).split(labels.unique(return_counts=True)[1].tolist())
        chosen, places = [], torch.randint(10, (count,), generator=generator)
        for place in places.tolist():
            pair = torch.randperm(len(by_class), generator=generator)[:2]
            usual, odd = (by_class[label] for label in pair.tolist())
            some = usual[torch.randperm(len(usual), generator=generator)[:10]]
            some[place] = odd[torch.randint(len(odd), (), generator=generator)]
            chosen.append(some)
        return self.asked(images[torch.stack(chosen)], places.unsqueeze(1))

    def scores(self, model: nn.Module, question: Question) -> Tensor:
        scores: Tensor = model(question.key, question.key, question.value)  # the queries are the keys
        return scores.mT

    def references(self) -> dict[str, float]:
        """Return how often the image furthest from the mean is the odd one out, and how often a random choice is
        right."""

        def away(question: Question) -> Tensor:
            return (question.key - question.key.mean(1, keepdim=True)).norm(dim=-1).unsqueeze(1)

        return {"furthest": self._accuracy(away), "chance": 0.1}


@dataclass(frozen=True)
class Outlier(OutlierTask):
    """Find the odd one out among 10 images of digits: the other nine show the same digit."""

    name = "outlier"
    systems: ClassVar[tuple[str, ...]] = (
        *("informer", "sigma-informer", "transformer", "lin-transformer", "np-former", "intention", "attention"),
    )

    of_system: ClassVar[BySystem] = {"informer": {"steps": 770}, "sigma-informer": {"steps": 690}}
    learning_rate: float = 1e-3
    """A third of the other tasks' rate. A Transformer has an accuracy of .94 at 1e-3 and at 3e-4, and of .88 at
    3e-3."""

    def sizes(self, system: str) -> dict[str, Any]:
        depth = {} if system in ("intention", "attention") else {"depth": self.depth}
        return {"dim_key": 64, "dim_value": 64, "dim_out": 1, "dim": self.dim, **depth}

    def images(self, held_out: bool) -> tuple[Tensor, Tensor]:
        return digits().part(held_out)

    def asked(self, images: Tensor, places: Tensor) -> Question:
        return Question(images, images, images, places)


@dataclass(frozen=True)
class ClassesTask(ImageTask):
    """Base class of tasks that classify images of classes that were not in the training, from a few examples of each
    class."""

    systems: ClassVar[tuple[str, ...]] = ("few-shot", "intention", "attention")

    estimator: str = "lssvm"
    """One of "lssvm", "scatter", "kernel" and "attention", for the system few-shot: see `cmab_models.FewShot`."""
    ways: int = 4
    shots: int = 5

    @abstractmethod
    def images(self, held_out: bool) -> tuple[Tensor, Tensor]:
        """Return the images (N, ...) and classes (N,) of the held-out classes or of the training classes."""

    @abstractmethod
    def pixels(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return images (..., dim_key) in float32, as questions show them."""

    def sizes(self, system: str) -> dict[str, Any]:
        width = self.images(held_out=True)[0][0].numel()
        sizes = {"dim_key": width, "dim_value": self.ways, "dim": self.dim}
        if system == "maml":
            # Twice as wide as the features, with the rate of MAML's Omniglot and the steps of its miniImageNet.
            return sizes | {"dim": 2 * self.dim, "classes": True, "inner_steps": 5, "inner_rate": 0.4}
        return sizes | ({"estimator": self.estimator} if system == "few-shot" else {"dim_out": self.ways})

    def drawn(self, generator: torch.Generator, count: int, held_out: bool) -> Question:
        """Return questions with one query of each class. Each question has a random order of classes."""
        if self.shots > self.most_shots():
            raise ValueError(
                mismatch("shots", self.shots, f"at most {self.most_shots()}, the examples of a class beside the query")
            )
        most_ways = min(len(self.images(part)[1].unique()) for part in (False, True))  # an error comes before training
        if self.ways > most_ways:
            raise ValueError(mismatch("ways", self.ways, f"at most {most_ways}, the number of classes"))
        images, labels = self.images(held_out)
        classes = labels.unique()
        chosen = torch.stack(
            [classes[torch.randperm(len(classes), generator=generator)[: self.ways]] for _ in range(count)]
        )
        examples = [
            torch.stack([_some(labels == label, self.shots + 1, generator) for label in row]) for row in chosen.tolist()
        ]
        sets = self.pixels(images[torch.stack(examples)], generator)
        values = torch.eye(self.ways).repeat_interleave(self.shots, 0).expand(count, -1, -1)
        return Question(sets[:, :, 0], sets[:, :, 1:].flatten(1, 2), values, torch.arange(self.ways).expand(count, -1))

    def scores(self, model: nn.Module, question: Question) -> Tensor:
        scores: Tensor = model(*question[:3])
        return scores

    def references(self) -> dict[str, float]:
        """Return the accuracy of the nearest mean of the pixels, and of a random choice."""

        def nearness(question: Question) -> Tensor:
            means = question.key.unflatten(1, (self.ways, self.shots)).mean(2)
            return -torch.cdist(question.query, means)

        return {"nearest mean": self._accuracy(nearness), "chance": 1 / self.ways}

    def most_shots(self) -> int:
        """Return how many examples of every held-out class a question can have, besides the query."""
        return int(self.images(held_out=True)[1].unique(return_counts=True)[1].min()) - 1


@dataclass(frozen=True)
class FewShotTask(ClassesTask):
    """Classify images of classes that were not in the training, from a few examples of each class."""

    name = "few-shot"
    systems: ClassVar[tuple[str, ...]] = (*ClassesTask.systems, "maml")

    steps: int = 400
    glyphs: str = "digits"
    """The images: "digits"; "letters", which needs fonts; or "dejavu", letters that come with matplotlib. See
    `cmab_models.data.glyphs`."""
    turn: float = 0.0
    """The largest angle in degrees by which an image is rotated, to either side. Every image of a question has its own
    angle."""
    dim: int = 32

    def images(self, held_out: bool) -> tuple[Tensor, Tensor]:
        if self.glyphs not in GLYPHS:
            raise ValueError(mismatch("glyphs", repr(self.glyphs), f"one of {', '.join(GLYPHS)}"))
        return _of_classes(self.glyphs, held_out)

    def pixels(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return turned(images, self.turn, generator) if self.turn else images


@cache
def _of_classes(glyphs: str, held_out: bool) -> tuple[Tensor, Tensor]:
    return GLYPHS[glyphs]().of_classes(held_out)


def _some(which: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the indices of `count` different True elements."""
    places = which.nonzero().flatten()
    return places[torch.randperm(len(places), generator=generator)[:count]]
