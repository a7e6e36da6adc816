"""Small series of sensors and outlines as streams."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..data.series import series
from .streaming import Streams, StreamTask

TOKENS = {"OSULeaf": (6, 64), "ACSF1": (20, 64), "BasicMotions": (1, 64), "JapaneseVowels": (1, 16)}
"""Data set -> values of each channel in a token, and tokens in a window."""


@dataclass(frozen=True)
class Series(StreamTask):
    """Tell the class of a series from its newest tokens, which are pieces of it."""

    name = "series"

    steps: int = 500
    dataset: str = "BasicMotions"
    """One of "BasicMotions", "OSULeaf", "ACSF1" and "JapaneseVowels"; see `cmab_models.data.series`."""

    @property
    def sequence_len(self) -> int:
        return TOKENS[self.dataset][1]

    def data(self) -> Streams:
        return _data(self.dataset)


@cache
def _data(dataset: str) -> Streams:
    train, train_labels, test, test_labels = series(dataset)
    values = TOKENS[dataset][0]
    train, test = (
        each[:, : each.shape[1] // values * values].unflatten(1, (-1, values)).flatten(2) for each in (train, test)
    )
    return Streams(list(train), train_labels, test, test_labels)
