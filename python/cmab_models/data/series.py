"""Small classified series that come with sktime, of the archives of www.timeseriesclassification.com (free to use with
attribution).

- OSULeaf (A. Gandhi): outlines of leaves of 6 kinds, 427 values each.
- ACSF1 (C. Gisler et al.): the power of devices of 10 kinds, 1,460 values each.
- BasicMotions (J. Clements): a smart watch's 6 sensors during 4 activities, 100 values each.
- JapaneseVowels (M. Kudo, J. Toyama, M. Shimbo): 12 cepstral coefficients of 9 speakers who say one vowel, 7 to 29
values each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from .packages import imported

LOADERS = {
    "OSULeaf": "load_osuleaf",
    "ACSF1": "load_acsf1",
    "BasicMotions": "load_basic_motions",
    "JapaneseVowels": "load_japanese_vowels",
}
LONGEST_VOWEL = 29


@cache
def series(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the training series (N, T, channels) and their classes (N,), then those of the test part: float32 and
    int64.

    Channels have mean 0 and variance 1 over the training series. Vowels are resampled linearly to the length of the
    longest series.
    """
    if name not in LOADERS:
        raise ValueError(mismatch("name", repr(name), f"one of {', '.join(LOADERS)}"))
    load = getattr(imported("sktime.datasets", "sktime"), LOADERS[name])
    (train, train_labels), (test, test_labels) = (
        load(split=part, return_X_y=True, return_type="nested_univ") for part in ("train", "test")
    )
    train, test = _values(train, name), _values(test, name)
    mean, deviation = train.mean((0, 1)), train.std((0, 1))
    classes = sorted(set(train_labels))
    first, second = (torch.tensor([classes.index(label) for label in labels]) for labels in (train_labels, test_labels))
    return (train - mean) / deviation, first, (test - mean) / deviation, second


def _values(table: Any, name: str) -> Tensor:
    """Return a table whose cells are series as a tensor (N, T, channels)."""
    rows = [torch.tensor([list(channel) for channel in row], dtype=torch.float32) for row in table.to_numpy().tolist()]
    if name == "JapaneseVowels":
        rows = [F.interpolate(row[None], LONGEST_VOWEL, mode="linear", align_corners=True)[0] for row in rows]
    return torch.stack(rows).mT
