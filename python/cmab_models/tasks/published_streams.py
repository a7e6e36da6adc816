"""Streams of features that must be downloaded: music, and actions in videos. `cmab_models.data.features` describes the
files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from ..data.features import PIECES, Video, gtzan, thumos
from .streaming import EVERY, Streams, StreamTask


@dataclass(frozen=True)
class GTZAN(StreamTask):
    """Tell the genre of a track of music from its ten pieces of three seconds. Every fifth track of a genre is held
    out.

    A genre with only one track is left out. The other genres are the classes, in alphabetical order.
    """

    name: ClassVar[str] = "gtzan"

    num_landmarks: int = 5
    folder: str = ""
    """The folder of `features_3_sec.csv`."""

    @property
    def sequence_len(self) -> int:
        return PIECES

    def data(self) -> Streams:
        return _tracks(self.folder)


@dataclass(frozen=True)
class THUMOS(StreamTask):
    """Tell which action a video of THUMOS14 shows, by its newest 16 frames of features.

    Streams are runs of frames that show exactly one action. Held-out streams come from the published test part, in
    pieces of two windows. The published task is another one: it finds actions among frames without actions.
    """

    name: ClassVar[str] = "thumos"

    folder: str = ""
    """The folder of `data_info.json` and of the folders of arrays."""

    @property
    def sequence_len(self) -> int:
        return 16

    def data(self) -> Streams:
        return _actions(self.folder, self.sequence_len)


@cache
def _tracks(folder: str) -> Streams:
    tracks = gtzan(Path(folder) / "features_3_sec.csv")
    # A genre's only track would be held out, so no model could learn it.
    several = tracks.labels.bincount()[tracks.labels] > 1
    if not several.any():
        raise ValueError(
            mismatch(
                "folder",
                f"{folder!r}, without a genre of two tracks with all of {PIECES} pieces",
                "one track to learn from, and one to hold out",
            )
        )
    tokens, labels = tracks.tokens[several], tracks.labels[several].unique(return_inverse=True)[1]
    number = (labels.unsqueeze(1) == labels).tril().sum(1) - 1  # the number of the track within its genre
    held_out = number % 5 == 0
    std, mean = torch.std_mean(tokens[~held_out], (0, 1))
    tokens = (tokens - mean) / std.clamp(min=1e-6)
    return Streams(list(tokens[~held_out]), labels[~held_out], tokens[held_out], labels[held_out])


@cache
def _actions(folder: str, window: int) -> Streams:
    train, test = (list(_runs(thumos(folder, part))) for part in ("train", "test"))
    seen = [(tokens, action) for tokens, action in train if len(tokens) >= window]
    if not seen:
        raise ValueError(
            mismatch(
                "folder", f"{folder!r}, whose training part has no run of {window} frames of one action", "at least one"
            )
        )
    actions = sorted({action for _, action in seen})
    pieces = [
        (piece, actions.index(action))
        for tokens, action in test
        for piece in tokens.split(window + EVERY)
        if len(piece) == window + EVERY and action in actions
    ]
    if not pieces:
        raise ValueError(
            mismatch(
                "folder",
                f"{folder!r}, whose test part has no run of {window + EVERY} frames of one of these actions",
                "at least one",
            )
        )
    held_out, labels = zip(*pieces, strict=True)
    return Streams(
        [tokens for tokens, _ in seen],
        torch.tensor([actions.index(action) for _, action in seen]),
        torch.stack(held_out),
        torch.tensor(labels),
    )


def _runs(videos: Mapping[str, Video]) -> Iterator[tuple[Tensor, int]]:
    """Yield all runs of frames that show exactly one action, with its column. The first column (no action) and the last
    (doubtful) are skipped."""
    for tokens, labels in videos.values():
        shown = labels.argmax(1).where(labels.sum(1) == 1, 0)
        actions, lengths = shown.unique_consecutive(return_counts=True)
        for run, action in zip(tokens.split(lengths.tolist()), actions.tolist(), strict=True):
            if 0 < action < labels.shape[1] - 1:
                yield run, action
