"""Streams of features that must be downloaded: music, and actions in videos. `cmab_models.data.features` describes the
files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmab_kernels import intention
from cmab_kernels.runtime.checks import mismatch

from ..data.features import PIECES, TOKENS, gtzan, gtzan_vggish, thumos
from .base import seeded
from .detection import DetectionTask, Labelled
from .streaming import Streams, StreamTask

FEATURES = ("pieces", "vggish")
"""The features of GTZAN's tracks."""
BACKGROUND = 0
"""The class of frames without an action."""
FRAMES = 20_000
"""The number of training frames of the reference `frame`."""


@dataclass(frozen=True)
class GTZAN(StreamTask):
    """Tell the genre of a track of music from features of its parts. Every fifth track of a genre is held out.

    With `features` "pieces", a track has ten tokens, its pieces of three seconds, from a published table. With
    "vggish", it has 120 tokens, as in the paper, from an archive (`data.features`). A genre with only one track is left
    out. The other genres are the classes, in alphabetical order.
    """

    name: ClassVar[str] = "gtzan"

    num_landmarks: int = 5
    features: str = FEATURES[0]
    """One of `FEATURES`."""
    folder: str = ""
    """The folder of `features_3_sec.csv`, or of `gtzan_vggish.npz`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_word("features", FEATURES)

    @property
    def sequence_len(self) -> int:
        return PIECES if self.features == "pieces" else TOKENS

    def data(self) -> Streams:
        return _tracks(self.folder, self.features)


@dataclass(frozen=True)
class THUMOS(DetectionTask):
    """Tell from the newest frames of features which of 20 actions a video of THUMOS14 shows now, if any.

    The first class, `BACKGROUND`, is that of frames without an action. Frames that are marked as doubtful do not count,
    and a frame may show two actions. The published training and test parts are used. Frames before the first full
    window are not scored, as in OadTR (Wang et al., 2021).

    Scores are the mean over the actions of two precisions over all frames, ranked by the probability of the action:
    `mAP`, the average precision (Shou et al., 2017), and `mcAP`, in which the frames without the action weigh as much
    as the frames with it (De Geest et al., 2016). References: `chance`, random numbers, and `frame`, a ridge regression
    of the actions on the newest frame alone.
    """

    name: ClassVar[str] = "thumos"

    window: int = 64
    folder: str = ""
    """The folder of `data_info.json` and of the folders of arrays."""

    @property
    def sequence_len(self) -> int:
        return self.window

    def sizes(self, system: str) -> dict[str, Any]:
        tokens, labels = self.streams("train")
        return self.sizes_for(system, tokens[0].shape[1], labels[0].shape[1])

    def streams(self, part: str) -> Labelled:
        return _videos(self.folder, part, self.window)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return mean_precisions(*self.predictions(model, "test"))

    def references(self) -> dict[str, float]:
        tokens, labels = _frames(self.streams("train"), 1)
        test, truth = _frames(self.streams("test"), self.window)
        some = torch.randperm(len(tokens), generator=seeded(18))[:FRAMES]
        # A column of ones gives the regression a constant.
        query, key = (F.pad(part, (0, 1), value=1.0)[None, None] for part in (test, tokens[some]))
        guesses = {
            "chance": torch.rand(truth.shape, generator=seeded(1)),
            "frame": intention(query, key, labels[some][None, None], alpha=len(some) / 100)[0, 0],
        }
        return {
            f"{name}_{score}": value
            for name, guess in guesses.items()
            for score, value in mean_precisions(guess, truth).items()
        }


def _frames(streams: Labelled, window: int) -> tuple[Tensor, Tensor]:
    """Return the frames that end a window and count, and their labels."""
    tokens, labels = (torch.cat([each[window - 1 :] for each in part]) for part in streams)
    counts = labels.sum(1) > 0
    return tokens[counts], labels[counts]


def mean_precisions(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Return `mAP` and `mcAP` of the scores (N, classes) of frames, whose labels (N, classes) are above 0 for the
    classes that they show.

    With the frames in order of the scores of an action, and TP and FP frames with and without the action among the
    first, precision is TP / (TP + FP), and the calibrated precision w TP / (w TP + FP), where w is the number of frames
    without the action for each frame with it. An average precision is the mean over the frames with the action. An
    action that no frame shows does not count, nor does the background. Frames of the same score come at the same
    time, and frames whose score is NaN come last.
    """
    found = []
    for score, shown in zip(scores.mT[BACKGROUND + 1 :], labels.mT[BACKGROUND + 1 :] > 0, strict=True):
        if not shown.any():
            continue
        lowness, order = (-score.nan_to_num(nan=-torch.inf)).sort(stable=True)
        ranked = shown[order].double()
        last = torch.searchsorted(lowness, lowness, right=True) - 1  # frames of one score count together
        right, wrong = ranked.cumsum(0)[last], (1 - ranked).cumsum(0)[last]
        weighted = right * (wrong[-1] / right[-1])
        # With an action in every frame, both precisions are 1.
        calibrated = torch.where(wrong > 0, weighted / (weighted + wrong), 1.0)
        found.append(torch.stack([each[ranked > 0].mean() for each in (right / (right + wrong), calibrated)]))
    if not found:
        raise ValueError(mismatch("labels", "no frame with an action", "at least one"))
    return dict(zip(("mAP", "mcAP"), torch.stack(found).mean(0).tolist(), strict=True))


@cache
def _tracks(folder: str, features: str) -> Streams:
    root = Path(folder)
    tracks = gtzan(root / "features_3_sec.csv") if features == "pieces" else gtzan_vggish(root / "gtzan_vggish.npz")
    # A genre's only track would be held out, so no model could learn it.
    several = tracks.labels.bincount()[tracks.labels] > 1
    if not several.any():
        raise ValueError(
            mismatch(
                "folder",
                f"{folder!r}, without a genre of two tracks with all their tokens",
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
def _videos(folder: str, part: str, window: int) -> Labelled:
    """Return the videos of a part that have a window of frames, with the shares of the classes in each frame."""
    videos = [video for video in thumos(folder, part).values() if len(video.tokens) >= window]
    if not videos:
        raise ValueError(
            mismatch("folder", f"{folder!r}, whose {part} part has no video of {window} frames", "at least one")
        )
    shares = []
    for _, labels in videos:
        shown = labels[:, :-1] * (labels[:, -1:] == 0)  # the last column marks doubtful frames
        shares.append(shown / shown.sum(1, keepdim=True).clamp(min=1))
    return Labelled(tuple(video.tokens for video in videos), tuple(shares))
