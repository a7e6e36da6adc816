"""Streams of features in the formats in which GTZAN and THUMOS14 are published. Both must be downloaded by hand.

- GTZAN (Tzanetakis and Cook, 2002; no licence is stated): `features_3_sec.csv`, ten pieces of 3 seconds for each of
  1,000 tracks, from
  https://www.kaggle.com/datasets/andradaolteanu/gtzan-dataset-music-genre-classification
- THUMOS14 (Idrees et al., 2017; for research): a folder of arrays for each kind of feature, with a frame per row, and a
  `data_info.json`. This is the format of the code of LSTR (Xu et al., 2021) and its successors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from .packages import imported

PIECES = 10
"""The number of pieces of a track."""
NOT_FEATURES = ["filename", "length", "label"]


class Tracks(NamedTuple):
    """Tracks of music as streams of their pieces."""

    tokens: Tensor
    """(tracks, 10, features) float32, unscaled"""
    labels: Tensor
    """(tracks,) int64, indices into `genres`"""
    genres: list[str]
    names: list[str]
    """Names such as blues.00000, for a split by track."""


class Video(NamedTuple):
    """A video as a stream of frames, each with its classes."""

    tokens: Tensor
    """(frames, features) float32"""
    labels: Tensor
    """(frames, classes) float32, 1 where a frame shows a class"""


def gtzan(path: str | Path) -> Tracks:
    """Return the tracks of a `features_3_sec.csv`. Tracks that lack a piece are left out. Another format raises a
    `ValueError`."""
    pandas = imported("pandas", "pandas")
    table = pandas.read_csv(_existing(Path(path)))
    missing = [column for column in NOT_FEATURES if column not in table]
    parts = table["filename"].str.extract(r"^(?P<name>\w+\.\d+)\.(?P<piece>\d+)\.wav$") if "filename" in table else None
    if missing or parts is None or parts["name"].isna().any():
        reason = f"no column {missing[0]}" if missing else "another filename than such as blues.00000.0.wav"
        raise ValueError(
            mismatch(str(path), reason, "the columns of features_3_sec.csv: filename, length, features, label")
        )
    table = table.assign(name=parts["name"], piece=parts["piece"].astype(int)).sort_values(
        ["name", "piece"], kind="stable"
    )
    whole = [(name, rows) for name, rows in table.groupby("name") if rows["piece"].tolist() == list(range(PIECES))]
    if not whole:
        raise ValueError(mismatch(str(path), f"no track with all of {PIECES} pieces", "at least one"))
    features = [rows.drop(columns=[*NOT_FEATURES, "name", "piece"]).to_numpy("float32") for _, rows in whole]
    genres = sorted(table["label"].unique())
    labels = torch.tensor([genres.index(rows["label"].iloc[0]) for _, rows in whole])
    return Tracks(torch.stack([torch.tensor(each) for each in features]), labels, genres, [name for name, _ in whole])


def thumos(
    folder: str | Path, part: str, features: tuple[str, ...] = ("rgb_kinetics_resnet50", "flow_kinetics_bninception")
) -> dict[str, Video]:
    """Return the videos of `part`, "train" or "test", by name.

    The folder has `data_info.json`, with `THUMOS`: {`train_session_set`: names, `test_session_set`: names}. It has a
    folder of `name.npy` (frames, width) for each of `features`, and one folder `target_perframe` (frames, classes). The
    features of a frame are joined into one row. If the arrays of a video have different lengths, a `ValueError` is
    raised.
    """
    if part not in ("train", "test"):
        raise ValueError(mismatch("part", repr(part), "'train' or 'test'"))
    root = Path(folder)
    sessions = json.loads(_existing(root / "data_info.json").read_text())
    if f"{part}_session_set" not in sessions.get("THUMOS", {}):
        raise ValueError(
            mismatch(str(root / "data_info.json"), f"no {part}_session_set of THUMOS", "a JSON object with one")
        )
    return {name: _video(root, name, features) for name in sessions["THUMOS"][f"{part}_session_set"]}


def _video(root: Path, name: str, features: tuple[str, ...]) -> Video:
    numpy = imported("numpy", "numpy")
    arrays = {
        kind: numpy.load(_existing(root / kind / f"{name}.npy"), allow_pickle=False)
        for kind in (*features, "target_perframe")
    }
    lengths = {kind: len(array) for kind, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            mismatch(
                name,
                f"arrays of lengths {', '.join(f'{kind} {length}' for kind, length in lengths.items())}",
                "one length for all",
            )
        )
    labels = torch.tensor(arrays.pop("target_perframe"), dtype=torch.float32)
    return Video(torch.cat([torch.tensor(array, dtype=torch.float32) for array in arrays.values()], 1), labels)


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file; download it as {__name__} says")
    return path
