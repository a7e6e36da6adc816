"""The common part of tasks of streams of tokens: pieces of streams for training, and held-out streams that are scored
at every step."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmab_kernels.intention.variants import lda

from ..choices import largest
from ..streams import ContinualNystromformer, Nystromformer, StreamClassifier
from .base import VALIDATED, Task, reduction, seeded, seeded_check

EVERY = 5
"""Every fifth window of a held-out stream is scored. 5 divides no segment's length, so windows end at all places of
segments."""
CLUSTERED = 16
"""The number of batches of windows to which landmarks are fitted."""
LANDMARKS = ("continual", "fixed")
"""The kinds of landmarks of the system continual-nystromformer."""


class Streams(NamedTuple):
    """Streams of tokens, each of one class throughout."""

    train: list[Tensor]
    """(T, C) each, with T at least the length of a window"""
    train_labels: Tensor
    """(len(train),) int64"""
    held_out: Tensor
    """(K, S, C)"""
    held_out_labels: Tensor
    """(K,) int64"""


@dataclass(frozen=True)
class WindowTask(Task):
    """Base class of tasks that, at every token of a stream, tell a class from the newest n tokens."""

    systems: ClassVar[tuple[str, ...]] = ("continual-nystromformer", "continual-transformer", "nystromformer")

    batch_size: int = 64
    num_landmarks: int = 4
    landmarks: str = "continual"
    """One of `LANDMARKS`. Only the system continual-nystromformer reads this."""
    dim: int = 32
    depth: int = 1

    def __post_init__(self) -> None:
        """Raise an error for an unknown word here, because other systems never read it."""
        super().__post_init__()
        self._check_word("landmarks", LANDMARKS)

    @property
    @abstractmethod
    def sequence_len(self) -> int:
        """n, the number of tokens of a window."""

    def sizes_for(self, system: str, dim_in: int, num_classes: int) -> dict[str, Any]:
        """Return the arguments of the system's constructor for tokens of `dim_in` columns."""
        sizes = {"dim_in": dim_in, "num_classes": num_classes, "sequence_len": self.sequence_len}
        sizes |= {"dim": self.dim, "depth": self.depth}
        sizes |= {} if system == "continual-transformer" else {"num_landmarks": self.num_landmarks}
        return sizes | ({"landmarks": self.landmarks} if system == "continual-nystromformer" else {})

    def piece_len(self, streams: Iterable[Tensor]) -> int:
        """Return the length of the pieces of streams (T, C) in a batch: a window and n / m - 1 more tokens, because a
        stream's landmarks can lag behind the window by that number. It is less if a stream is shorter."""
        return min(self.sequence_len + math.ceil(self.sequence_len / self.num_landmarks) - 1, *map(len, streams))

    def windows(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the newest window of each piece of a batch, (B, n, C), and the classes."""
        pieces, labels = self.batch(generator)
        return pieces[:, -self.sequence_len :], labels

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of every step over the pieces (B, T, C), with classes (B,), or with the shares of classes (B,
        T - n + 1, classes) of each step. For a model that would read the whole window at every step, use the last step
        that counts only."""
        assert isinstance(model, StreamClassifier)
        pieces, labels = batch
        if isinstance(model, Nystromformer):
            pieces, labels = self._newest(pieces, labels)
        scores = model.forward_stream(pieces)
        if labels.dim() == 1:
            labels = labels.unsqueeze(1).expand(-1, scores.shape[1])
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(0, 1), reduction=reduction(labels))

    def _newest(self, pieces: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the window (B, n, C) of each piece whose newest token is the last that counts, and its labels."""
        if labels.dim() == 1:
            return pieces[:, -self.sequence_len :], labels
        rows, steps = (torch.arange(extent, device=labels.device) for extent in labels.shape[:2])
        last = torch.where(labels.sum(-1) > 0, steps, 0).amax(1)
        return pieces.unfold(1, self.sequence_len, 1).mT[rows, last], labels[rows, last].unsqueeze(1)

    def before_step(self, model: nn.Module, step: int) -> None:
        """Fit fixed landmarks: first the landmarks of all layers, then layer by layer, with an equal part of the
        training after each."""
        if not isinstance(model, ContinualNystromformer) or not model.fixed:
            return
        parts = len(model.layers) + 1
        begun = [self.steps * part // parts for part in range(parts)]
        if step in begun:
            windows = torch.cat([self.windows(seeded(17, number))[0] for number in range(CLUSTERED)])
            model.fit_landmarks(windows.to(model.head.weight), begun.index(step) - 1 if step else None)


@dataclass(frozen=True)
class StreamTask(WindowTask):
    """Base class of tasks whose streams have one class each."""

    @abstractmethod
    def data(self) -> Streams:
        """Return the streams. They are the same in every call."""

    def sizes(self, system: str) -> dict[str, Any]:
        data = self.data()
        return self.sizes_for(system, data.held_out.shape[-1], int(data.train_labels.max()) + 1)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return pieces (B, T, C) at random places of training streams, with equal chances for all classes, and their
        classes (B,)."""
        return self._pieces(generator, self._rows(checked=False))

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of training streams that no batch has; of all of them if classes have few."""
        rows = self._rows(checked=True)
        return (self._pieces(seeded_check(number), rows) for number in range(VALIDATED))

    def _rows(self, checked: bool) -> Tensor:
        """Return which training streams batches are drawn from, or those that are checked: every tenth of a class."""
        labels = self.data().train_labels
        out = ((labels.unsqueeze(1) == labels).tril().sum(1) % 10) == 0
        return out == checked if self.patience and out.any() else torch.ones_like(out)

    def _pieces(self, generator: torch.Generator, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch of pieces of these training streams."""

        def below(bound: int) -> int:
            return int(torch.randint(bound, (), generator=generator))

        data, pieces = self.data(), []
        length = self.piece_len(data.train)
        classes = data.train_labels[rows].unique()
        of_class = {
            label: ((data.train_labels == label) & rows).nonzero().flatten().tolist() for label in classes.tolist()
        }
        labels = classes[torch.randint(len(classes), (self.batch_size,), generator=generator)]
        for label in labels.tolist():
            stream = data.train[of_class[label][below(len(of_class[label]))]]
            first = below(len(stream) - length + 1)
            pieces.append(stream[first : first + length])
        return torch.stack(pieces), labels

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the accuracy over separate windows of held-out streams, and the accuracy when the streams are read
        token by token."""
        assert isinstance(model, StreamClassifier)
        data = self.data()
        tokens, labels = data.held_out.to(model.head.weight), data.held_out_labels.to(model.head.weight.device)
        model.clean_state()
        ends = range(self.sequence_len, tokens.shape[1] + 1, EVERY)
        whole = [largest(model(tokens[:, end - self.sequence_len : end])) for end in ends]
        streamed = [model.forward_step(token) for token in tokens.unbind(1)]
        model.clean_state()
        at_ends = [largest(scores) for end in ends if (scores := streamed[end - 1]) is not None]
        found = {"whole": whole, "streamed": at_ends}
        return {name: (torch.stack(each, 1) == labels[:, None]).double().mean().item() for name, each in found.items()}

    def references(self) -> dict[str, float]:
        """Return the accuracy of the most frequent class, and of linear discriminant analysis on means and deviations
        over the window."""
        data, n = self.data(), self.sequence_len
        held_out = data.held_out.unfold(1, n, EVERY).transpose(2, 3)
        labels = data.held_out_labels[:, None].expand(held_out.shape[:2])
        most = data.held_out_labels.bincount().max() / len(data.held_out_labels)
        windows, classes = zip(*(self.windows(seeded(18, number)) for number in range(CLUSTERED)), strict=True)
        train = _moments(torch.cat(windows))[None, None]
        classifier = lda(train, torch.cat(classes)[None], int(data.train_labels.max()) + 1, shrinkage=0.01)
        found = classifier.predict(_moments(held_out.flatten(0, 1))[None, None])[0, 0]
        return {"most frequent": most.item(), "discriminant": (found == labels.flatten()).double().mean().item()}

    @torch.no_grad()
    def stream(self, model: nn.Module) -> Iterator[dict[str, float]]:
        """Yield for each full window of a held-out stream: whether its class was found, its probability, and the time
        of the step."""
        assert isinstance(model, StreamClassifier)
        data = self.data()
        model.clean_state()
        for position, token in enumerate(data.held_out[:1].to(model.head.weight).unbind(1), start=1):
            before = time.perf_counter()
            scores = model.forward_step(token)
            spent = time.perf_counter() - before
            if scores is not None:
                label = int(data.held_out_labels[0])
                found, probability = float(largest(scores[0]) == label), scores.softmax(-1)[0, label].item()
                yield {"token": position, "found": found, "probability": probability, "milliseconds": 1000 * spent}
        model.clean_state()


def _moments(windows: Tensor) -> Tensor:
    """Return the mean and the standard deviation of each column of windows (W, n, C), as (W, 2 C)."""
    return torch.cat([windows.mean(1), windows.std(1)], -1)
