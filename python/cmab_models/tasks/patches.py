"""Photographs as streams of patches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from ..data import patches
from .base import BySystem
from .streaming import Streams, StreamTask

COLUMNS = 8
"""The number of patches in a row of a band."""


@dataclass(frozen=True)
class Patches(StreamTask):
    """Tell which of 16 photographs a stream of patches comes from, by its newest 64 patches.

    A stream reads a band of a photograph, 8 patches wide, row by row. No held-out band shares a pixel with a training
    band.
    """

    name = "patches"
    of_system: ClassVar[BySystem] = {"continual-transformer": {"steps": 4600}, "nystromformer": {"steps": 4300}}

    steps: int = 2000
    side: int = 4
    """Rows and columns of a patch."""

    @property
    def sequence_len(self) -> int:
        return COLUMNS**2

    def data(self) -> Streams:
        return _data(self.side, 2 * self.sequence_len)


@cache
def _data(side: int, length: int) -> Streams:
    """Return the bands. The held-out bands are cut into streams of `length` patches."""
    train, labels = patches.bands(side, COLUMNS, held_out=False)
    bands, classes = patches.bands(side, COLUMNS, held_out=True)
    pieces = [band[: len(band) // length * length].unflatten(0, (-1, length)) for band in bands]
    counts = torch.tensor([len(piece) for piece in pieces])
    return Streams(train, labels, torch.cat(pieces), classes.repeat_interleave(counts))
