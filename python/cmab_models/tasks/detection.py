"""The common part of tasks of streams whose tokens have classes: tell those of the newest token of a stream."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..choices import largest
from ..streams import StreamClassifier
from .streaming import WindowTask

AT_ONCE = 32
"""The number of streams that are read at the same time."""


class Labelled(NamedTuple):
    """Streams whose tokens have classes."""

    tokens: tuple[Tensor, ...]
    """(T, C) each"""
    labels: tuple[Tensor, ...]
    """(T, classes) float32 each: the shares of the classes in a token, or zeros for a token that does not count"""


@dataclass(frozen=True)
class DetectionTask(WindowTask):
    """Base class of tasks that tell the classes of each token of a stream, from the first full window on."""

    @abstractmethod
    def streams(self, part: str) -> Labelled:
        """Return the streams of "train", or of another part, none shorter than a window. They are the same objects in
        every call."""

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.pieces("train", generator)

    def pieces(self, part: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return pieces (B, T, C) of streams of a part, and the labels (B, T - n + 1, classes) of their steps. All
        classes have equal chances to be that of the last token that counts. Usually this ends the piece. If it comes
        before the end of the first piece of its stream, the later tokens of this piece do not count."""
        tokens, labels = self.streams(part)
        length, found = self.piece_len(tokens), []
        of_class = _ends(labels, self.sequence_len)
        for number in torch.randint(len(of_class), (self.batch_size,), generator=generator).tolist():
            places = of_class[number]
            stream, end = places[torch.randint(len(places), (), generator=generator)].tolist()
            stop = max(end, length)
            of_steps = labels[stream][stop - length + self.sequence_len - 1 : end]
            found.append((tokens[stream][stop - length : stop], F.pad(of_steps, (0, 0, 0, stop - end))))
        pieces, of_steps = zip(*found, strict=True)
        return torch.stack(pieces), torch.stack(of_steps)

    @torch.no_grad()
    def predictions(self, model: nn.Module, part: str) -> tuple[Tensor, Tensor]:
        """Return the probabilities (N, classes) of all tokens of a part that end a full window and count, read token by
        token, and their labels (N, classes)."""
        assert isinstance(model, StreamClassifier)
        tokens, labels = self.streams(part)
        order = sorted(range(len(tokens)), key=lambda number: len(tokens[number]))
        found, truth = [], []
        for first in range(0, len(order), AT_ONCE):
            some = order[first : first + AT_ONCE]
            model.clean_state()
            padded = nn.utils.rnn.pad_sequence([tokens[number] for number in some], batch_first=True)
            steps = [model.forward_step(token) for token in padded.to(model.head.weight).unbind(1)]
            scores = torch.stack([each for each in steps if each is not None], 1).softmax(-1).cpu()
            for of_stream, number in zip(scores, some, strict=True):
                label = labels[number][self.sequence_len - 1 :]
                counts = label.sum(1) > 0
                found.append(of_stream[: len(label)][counts])
                truth.append(label[counts])
        model.clean_state()
        return torch.cat(found), torch.cat(truth)

    @torch.no_grad()
    def stream(self, model: nn.Module) -> Iterator[dict[str, float]]:
        """Yield for each full window of the first test stream: whether the most likely class is one of the newest
        token, the probability of its classes, and the time of the step."""
        assert isinstance(model, StreamClassifier)
        tokens, labels = (part[0].to(model.head.weight) for part in self.streams("test"))
        model.clean_state()
        for position, (token, label) in enumerate(zip(tokens, labels, strict=True), start=1):
            before = time.perf_counter()
            scores = model.forward_step(token[None])
            spent = time.perf_counter() - before
            if scores is not None:
                shown, likely = label > 0, scores[0].softmax(-1)
                found, probability = float(shown[largest(likely)]), likely[shown].sum().item()
                yield {"token": position, "found": found, "probability": probability, "milliseconds": 1000 * spent}
        model.clean_state()


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """Return the share of tokens of which the most likely class is one of theirs."""
    return float((labels.gather(1, largest(probabilities).clamp(min=0).unsqueeze(1)) > 0).double().mean())


@lru_cache(maxsize=4)
def _ends(labels: tuple[Tensor, ...], window: int) -> list[Tensor]:
    """Return for each class of a token that ends a window the numbers (N, 2) of the streams, and the ends of these
    windows."""
    places, last = [], []
    for number, label in enumerate(labels):
        ends = torch.arange(window, len(label) + 1)
        places.append(torch.stack([torch.full_like(ends, number), ends], 1))
        last.append(label[window - 1 :])
    has = torch.cat(last) > 0
    return [torch.cat(places)[each] for each in has.unbind(1) if each.any()]
