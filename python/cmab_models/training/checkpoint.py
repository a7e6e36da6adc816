"""Checkpoints: one file that is written completely or not at all, and is read without executing anything."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from cmab_kernels.runtime.checks import is_dense, kind_of, mismatch

FORMAT = "cmab_models checkpoint, version 1"
NEEDED = "the checkpoint.pt of a training; without it, train again in another --folder"


class BadCheckpoint(ValueError):
    """A file from which training cannot be resumed; the message says why."""


class Checkpoint(NamedTuple):
    """Everything on which the rest of a training run depends."""

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


def load(path: Path) -> Checkpoint:
    """Return a checkpoint; raise `BadCheckpoint` if there is none, or if it is broken."""
    if not path.exists():
        raise BadCheckpoint(mismatch(str(path), "no such file", "a checkpoint to resume; leave out --resume"))
    try:
        entries = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # if bytes are not a pickle, the unpickler can raise anything, also without a message
        raise BadCheckpoint(mismatch(str(path), _unreadable(path), NEEDED)) from error
    if (
        not isinstance(entries, dict)
        or entries.pop("format", None) != FORMAT
        or entries.keys() != set(Checkpoint._fields)
    ):
        raise BadCheckpoint(mismatch(str(path), f"a file that is no {FORMAT}", NEEDED))
    checkpoint = Checkpoint(**entries)
    for name in ("run", "model", "optimizer"):
        _check_dict(f"{path}, {name}", entries[name])
    if type(checkpoint.step) is not int or checkpoint.step < 0:
        raise BadCheckpoint(mismatch(f"{path}, step", repr(checkpoint.step), "an int >= 0"))
    for name in ("cpu_seconds", "wall_seconds"):
        if type(entries[name]) not in (int, float) or not 0 <= entries[name] < math.inf:
            raise BadCheckpoint(mismatch(f"{path}, {name}", repr(entries[name]), "a finite number >= 0"))
    return checkpoint


def differences(
    run: Mapping[str, Any], other: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each setting of a run in which a record differs.

    A setting of a model that the record leaves out has the value of `defaults`. A record may have further entries.
    """
    for name, ours in run.items():
        theirs = other.get(name, defaults.get(name))
        if ours != theirs:
            yield name, ours, theirs


def check_same(path: Path, checkpoint: Checkpoint, run: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise `BadCheckpoint` if the checkpoint belongs to another run."""
    for name, ours, theirs in differences(run, checkpoint.run, defaults):
        raise BadCheckpoint(mismatch(name, repr(ours), f"{theirs!r}, as {path} was trained with"))


def _check_dict(name: str, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise BadCheckpoint(mismatch(name, kind_of(entry), "a dict"))


def _check_tensor(name: str, entry: Any, like: Tensor) -> None:
    """Raise unless an entry can be copied to a tensor. torch's optimiser writes out of bounds if the shape differs."""
    if not isinstance(entry, Tensor):
        raise BadCheckpoint(mismatch(name, kind_of(entry), "a torch.Tensor"))
    kinds = (entry.is_floating_point(), entry.is_complex()), (like.is_floating_point(), like.is_complex())
    if not is_dense(entry) or entry.is_meta or entry.shape != like.shape or kinds[0] != kinds[1]:
        given = f"a tensor {tuple(entry.shape)}, {entry.dtype}, {entry.layout}, on {entry.device}"
        raise BadCheckpoint(mismatch(name, given, f"a dense tensor {tuple(like.shape)}, {like.dtype}"))


def _unreadable(path: Path) -> str:
    """Say why torch cannot read a file. torch's own messages advise to read the file with code execution, which nobody
    should do."""
    if path.is_dir():
        return "a folder"
    start = path.read_bytes()[:2]
    if not start:
        return "an empty file"
    if start != b"PK":
        return "a file of another kind"
    return "a file that holds something else" if is_zipfile(path) else "a file that is cut short or damaged"


def resumed(
    path: Path, run: Mapping[str, Any], defaults: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Checkpoint:
    """Load the checkpoint of this run into its model and optimiser, and return it; raise `BadCheckpoint` also if it
    does not fit them."""
    checkpoint, own = load(path), model.state_dict()
    check_same(path, checkpoint, run, defaults)
    if checkpoint.step > run["steps"]:
        raise BadCheckpoint(mismatch(f"{path}, step", checkpoint.step, f"an int from 0 to steps = {run['steps']}"))
    for name in checkpoint.model.keys() & own.keys():
        _check_tensor(f"{path}, model, {name}", checkpoint.model[name], own[name])
    state = checkpoint.optimizer.get("state")
    _check_state(f"{path}, optimizer, state", state, optimizer)
    try:
        model.load_state_dict({str(name): entry for name, entry in checkpoint.model.items()})
    except RuntimeError as error:
        raise BadCheckpoint(
            mismatch(str(path), f"weights of another version ({shorten(str(error), 300)})", f"those of {run['system']}")
        ) from error
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})  # its settings are determined by the run
    return checkpoint


def _check_state(name: str, state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise unless `state` is a state of Adam. A parameter that has had no gradient yet has no state."""
    _check_dict(name, state)
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for number, moments in state.items():
        if number not in parameters:
            raise BadCheckpoint(
                mismatch(f"{name}, {number}", "a state", f"none, as the model has {len(parameters)} parameters")
            )
        _check_dict(f"{name}, {number}", moments)
        for moment, like in (
            ("step", torch.zeros(())),
            ("exp_avg", parameters[number]),
            ("exp_avg_sq", parameters[number]),
        ):
            _check_tensor(f"{name}, {number}, {moment}", moments.get(moment), like)
