"""Few-shot classification of miniImageNet, and odd ones out of CIFAR-100. `cmab_models.data.published_classes`
describes the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..data.published_classes import cifar100, mini_imagenet
from .base import seeded
from .classes import ClassesTask, OutlierTask
from .sets import Question

PIECE = 20
"""The number of questions that are evaluated at once."""


@dataclass(frozen=True)
class MiniImageNet(ClassesTask):
    """Classify images of miniImageNet of classes that were not in the training, from a few examples of each class."""

    name = "mini-imagenet"

    steps: int = 200
    learning_rate: float = 1e-3
    batch_size: int = 4
    ways: int = 5
    folder: str = ""
    """The folder with the three published files."""
    part: str = "test"
    """The part whose classes are held out: "test", or "val" to choose settings with."""
    network: str = "conv4"
    """What makes features of images: "conv4" or "perceptron"; see `cmab_models.FewShot`."""
    evaluation_questions: int = 600

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_word("part", ("test", "val"))

    def sizes(self, system: str) -> dict[str, Any]:
        return super().sizes(system) | {"network": self.network}

    def images(self, held_out: bool) -> tuple[Tensor, Tensor]:
        return mini_imagenet(self.folder, self.part if held_out else "train")

    def pixels(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return rows(images)

    def held_out(self) -> Iterator[Question]:
        yield from (self.drawn(seeded(29, i), count, held_out=True) for i, count in _pieces(self.evaluation_questions))


@dataclass(frozen=True)
class CIFAR100Outlier(OutlierTask):
    """Find the odd one out among 10 images of CIFAR-100: the other nine are of the same class. Training and held-out
    images are of all 100 classes."""

    name = "cifar-outlier"
    systems: ClassVar[tuple[str, ...]] = ("informer", "sigma-informer", "transformer", "lin-transformer", "np-former")

    steps: int = 1000
    learning_rate: float = 1e-3
    batch_size: int = 8
    folder: str = ""
    """The folder with the published archive, or with what it unpacks to."""
    network: str = "conv4"
    """What makes features of images: "conv4" or "perceptron"; see `cmab_models.Informer`."""
    evaluation_questions: int = 1000

    def sizes(self, system: str) -> dict[str, Any]:
        width = self.images(held_out=True)[0][0].numel()
        widths = {"dim_key": width, "dim_value": 1, "dim_out": 1, "dim": self.dim}
        return widths | {"depth": self.depth, "network": self.network}

    def images(self, held_out: bool) -> tuple[Tensor, Tensor]:
        return cifar100(self.folder, "test" if held_out else "train")

    def asked(self, images: Tensor, places: Tensor) -> Question:
        """Return questions whose keys are the images. Their values are 0, because the keys tell everything."""
        keys = rows(images)
        return Question(keys, keys, keys.new_zeros(*keys.shape[:2], 1), places)

    def held_out(self) -> Iterator[Question]:
        yield from (self.drawn(seeded(29, i), count, held_out=True) for i, count in _pieces(self.evaluation_questions))


def rows(images: Tensor) -> Tensor:
    """Return images (..., side, side, 3) uint8 as rows (..., pixels) of numbers from 0 to 1, colour by colour."""
    return images.movedim(-1, -3).flatten(-3).float() / 255


def _pieces(questions: int) -> Iterator[tuple[int, int]]:
    """Yield the number of each piece, and how many questions it has."""
    for first in range(0, questions, PIECE):
        yield first // PIECE, min(PIECE, questions - first)
