"""Streams of patches of photographs: scikit-image's and scikit-learn's, cut into bands and read in raster order.

In the public domain or CC0: astronaut, brick, camera, cell, chelsea, coffee, coins (no known restrictions), grass,
gravel, hubble, immunohistochemistry, moon, retina, rocket, with sources in `skimage.data`. CC BY 2.0: china (by
danielbuechele) and flower (by vultilion), both from flickr.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from .packages import imported

LARGEST = 512
"""The largest number of rows and columns taken from the middle of a photograph."""
HELD_OUT_EVERY = 4
"""One band in this many is held out."""
FROM_SKIMAGE = (
    "astronaut",
    "brick",
    "camera",
    "cell",
    "chelsea",
    "coffee",
    "coins",
    "grass",
    "gravel",
    "hubble_deep_field",
    "immunohistochemistry",
    "moon",
    "retina",
    "rocket",
)
FROM_SKLEARN = ("china.jpg", "flower.jpg")
NAMES = (*FROM_SKIMAGE, *FROM_SKLEARN)
"""The names of the classes."""


def photographs() -> list[Tensor]:
    """Return the photographs in the order of `NAMES`, in grey, (rows, columns) float32 of mean 0 and variance 1."""
    data, samples = imported("skimage.data", "scikit-image"), imported("sklearn.datasets", "scikit-learn")
    loaded = [getattr(data, name)() for name in FROM_SKIMAGE] + [
        samples.load_sample_image(name) for name in FROM_SKLEARN
    ]
    return [_grey(torch.tensor(image, dtype=torch.float32)) for image in loaded]


def bands(side: int, columns: int, *, held_out: bool) -> tuple[list[Tensor], Tensor]:
    """Return streams of patches, each (T, side^2), and the class of each, (number of streams,) int64.

    A photograph is cut into vertical bands, `columns` patches wide. A band is read row by row from the top. Every
    fourth band is held out: training and evaluation bands are neighbours in each photograph, but share no pixel.
    """
    streams, labels = [], []
    for label, image in enumerate(photographs()):
        for number, band in enumerate(image.split(side * columns, 1)):
            if band.shape[1] == side * columns and (number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out:
                rows = band[: band.shape[0] // side * side].unfold(0, side, side).unfold(1, side, side)
                streams.append(rows.flatten(0, 1).flatten(1))
                labels.append(label)
    if not streams:
        raise ValueError(
            mismatch("side", side, f"a smaller one, as no photograph has bands of {columns} patches so large")
        )
    return streams, torch.tensor(labels)


def _grey(image: Tensor) -> Tensor:
    grey = image if image.dim() == 2 else image @ torch.tensor([0.2125, 0.7154, 0.0721])
    top, left = ((extent - min(extent, LARGEST)) // 2 for extent in grey.shape)
    grey = grey[top : top + LARGEST, left : left + LARGEST]
    return (grey - grey.mean()) / grey.std()
