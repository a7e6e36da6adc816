"""Checkpoints: one file that is written completely or not at all, and is read without executing anything."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from torch import nn

from cmab_kernels.runtime.checks import mismatch

FORMAT = "cmab_models checkpoint, version 1"
NEEDED = "the checkpoint.pt of a training; without it, train again in another --folder"


class BadCheckpoint(ValueError):
    """A file from which training cannot be resumed; the message says why."""


class Checkpoint(NamedTuple):
    """Everything that the rest of a training run depends on."""

    run: dict[str, Any]
    """The system, the task and their settings, as numbers and strings only."""
    step: int
    """The number of finished steps."""
    cpu_seconds: float
    wall_seconds: float
    model: dict[str, Any]
    optimizer: dict[str, Any]


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write the file through a second file next to it, so that an interruption leaves the previous checkpoint
    unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    torch.save({"format": FORMAT, **checkpoint._asdict()}, beside)
    os.replace(beside, path)


def load(path: Path, run: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint of this run; `BadCheckpoint` if there is none, it is broken, or it belongs to another
    run."""
    if not path.exists():
        raise BadCheckpoint(mismatch(str(path), "no such file", "a checkpoint to resume; leave out --resume"))
    try:
        entries = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # if bytes are not a pickle, the unpickler can raise anything, also without a message
        raise BadCheckpoint(mismatch(str(path), _unreadable(path), NEEDED)) from error
    if not isinstance(entries, dict) or entries.pop("format", None) != FORMAT or entries.keys() != set(Checkpoint._fields):
        raise BadCheckpoint(mismatch(str(path), f"a file that is no {FORMAT}", NEEDED))
    checkpoint = Checkpoint(**entries)
    if not isinstance(checkpoint.run, dict) or not isinstance(checkpoint.step, int):
        raise BadCheckpoint(mismatch(str(path), "a file with no settings or no number of steps", NEEDED))
    for name in run:
        if checkpoint.run.get(name) != run[name]:
            raise BadCheckpoint(mismatch(name, repr(run[name]), f"{checkpoint.run.get(name)!r}, as {path} was trained with"))
    return checkpoint


def _unreadable(path: Path) -> str:
    """Say why torch cannot read a file. Its own messages tell to read the file with code, which nobody should."""
    if path.is_dir():
        return "a folder"
    start = path.read_bytes()[:2]
    if not start:
        return "an empty file"
    if start != b"PK":
        return "a file of another kind"
    return "a file that holds something else" if is_zipfile(path) else "a file that is cut short or damaged"


def resumed(path: Path, run: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> Checkpoint:
    """Load the checkpoint of this run into its model and optimiser, and return it; `BadCheckpoint` also if it does not
    fit them."""
    checkpoint = load(path, run)
    try:
        model.load_state_dict(checkpoint.model)
        optimizer.load_state_dict(checkpoint.optimizer)
    except (RuntimeError, ValueError, KeyError) as error:
        raise BadCheckpoint(
            mismatch(str(path), f"weights of another version ({shorten(str(error), 300)})", f"those of {run['system']}")
        ) from error
    return checkpoint
