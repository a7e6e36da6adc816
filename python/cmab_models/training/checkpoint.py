"""Checkpoints of Lightning, read without executing anything, and checked before a training continues from one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from cmab_kernels.runtime.checks import is_dense, kind_of, mismatch

FORMAT = "cmab_models checkpoint, version 2"
NEEDED = "the checkpoint.pt of a training; without it, train again in another --folder"


ENTRIES: dict[str, type] = {
    "run": dict,
    "global_step": object,
    "cpu_seconds": object,
    "wall_seconds": object,
    "state_dict": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "loops": dict,
    "callbacks": dict,
}
"""The entries of a checkpoint, and their types. Lightning writes all of them except the run and its seconds."""


BEST: dict[str, type] = {"loss": float, "step": int, "waited": int, "weights": dict}
"""What a training with `patience` keeps of its checks, and the types."""


class BadCheckpoint(ValueError):
    """A file from which training cannot be resumed; the message says why."""


class Checkpoint(NamedTuple):
    """The parts of a training's file that are checked."""

    run: dict[str, Any]
    """The system, the task and their settings, as numbers and strings only."""
    step: int
    """The number of finished steps."""
    seconds: dict[str, float]
    """The `cpu_seconds` and `wall_seconds` of these steps."""
    model: dict[str, Any]
    optimizer: dict[str, Any]
    callbacks: dict[str, Any]

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the model has the weights of these steps, or the best of them if there were checks."""
        weights = self.callbacks.get("EarlyStop", {}).get("weights") or self.model
        own = model.state_dict()
        return own.keys() == weights.keys() and all(torch.equal(own[name].cpu(), weights[name]) for name in own)


def load(path: Path) -> Checkpoint:
    """Return a checkpoint; raise `BadCheckpoint` if there is none, or if it is broken."""
    if not path.exists():
        raise BadCheckpoint(mismatch(str(path), "no such file", "a checkpoint to resume; leave out --resume"))
    try:
        entries = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # if bytes are not a pickle, the unpickler can raise anything, also without a message
        raise BadCheckpoint(mismatch(str(path), _unreadable(path), NEEDED)) from error
    if not isinstance(entries, dict) or entries.get("format") != FORMAT or not entries.keys() >= ENTRIES.keys():
        raise BadCheckpoint(mismatch(str(path), f"a file without the format {FORMAT!r}", NEEDED))
    for name, kind in ENTRIES.items():
        if not isinstance(entries[name], kind):
            raise BadCheckpoint(mismatch(f"{path}, {name}", kind_of(entries[name]), f"a {kind.__name__}"))
    step, optimizers = entries["global_step"], entries["optimizer_states"]
    if type(step) is not int or step < 0:
        raise BadCheckpoint(mismatch(f"{path}, global_step", repr(step), "an int >= 0"))
    seconds = {name: entries[name] for name in ("cpu_seconds", "wall_seconds")}
    for name, number in seconds.items():
        if type(number) not in (int, float) or not 0 <= number < math.inf:
            raise BadCheckpoint(mismatch(f"{path}, {name}", repr(number), "a finite number >= 0"))
    if len(optimizers) != 1 or not isinstance(optimizers[0], dict):
        raise BadCheckpoint(
            mismatch(f"{path}, optimizer_states", f"a list of {len(optimizers)}", "a list of one dict, Adam's state")
        )
    model = {str(name).removeprefix("model."): entry for name, entry in entries["state_dict"].items()}
    return Checkpoint(entries["run"], step, seconds, model, optimizers[0], entries["callbacks"])


def check_settings(run: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a setting that a checkpoint could not hold, so that training could not be resumed."""
    for name, value in run.items():
        try:
            is_kept = bool(_read_again(value) == value)
        except Exception:  # pickling, reading and comparing can raise anything
            is_kept = False
        if not is_kept:
            expected = "a number but NaN, a string, None, or tuples, lists and dicts of these; data has repr=False"
            raise ValueError(mismatch(name, f"{kind_of(value)}, {shorten(repr(value), 60)}", expected))


def check_states(callbacks: Iterable[Any]) -> None:
    """Raise a `ValueError` for a callback whose state a checkpoint could not hold."""
    for each in callbacks:
        state = each.state_dict()
        try:
            _read_again(state)
        except Exception as error:
            given = f"{kind_of(each)} with the state {shorten(repr(state), 60)}"
            raise ValueError(mismatch("callbacks", given, "a state of numbers, strings and tensors")) from error


def _read_again(value: Any) -> Any:
    """Return a value as a checkpoint gives it back."""
    file = BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def differences(
    run: Mapping[str, Any], other: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each setting that differs between a run and a record.

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


def resumed(path: Path, run: Mapping[str, Any], defaults: Mapping[str, Any], model: nn.Module) -> Checkpoint:
    """Return the checkpoint, and load its weights; raise `BadCheckpoint` unless this run can continue from the file."""
    checkpoint, own = load(path), model.state_dict()
    check_same(path, checkpoint, {**defaults, **run}, defaults)
    if checkpoint.step > run["steps"]:
        raise BadCheckpoint(
            mismatch(f"{path}, global_step", checkpoint.step, f"an int from 0 to steps = {run['steps']}")
        )
    for name in checkpoint.model.keys() & own.keys():
        _check_tensor(f"{path}, state_dict, {name}", checkpoint.model[name], own[name])
    _check_state(f"{path}, optimizer, state", checkpoint.optimizer.get("state"), model)
    if run["patience"]:
        _check_best(f"{path}, callbacks, EarlyStop", checkpoint.callbacks.get("EarlyStop"), own)
    try:
        model.load_state_dict(checkpoint.model)
    except RuntimeError as error:
        raise BadCheckpoint(
            mismatch(str(path), f"weights of another version ({shorten(str(error), 300)})", f"those of {run['system']}")
        ) from error
    return checkpoint


def _check_best(name: str, best: Any, own: Mapping[str, Any]) -> None:
    """Raise unless `best` is what a training with `patience` keeps of its checks."""
    _check_dict(name, best)
    for entry, kind in BEST.items():
        if type(best.get(entry)) is not kind:
            raise BadCheckpoint(mismatch(f"{name}, {entry}", kind_of(best.get(entry)), f"a {kind.__name__}"))
    if best["weights"] and best["weights"].keys() != own.keys():
        raise BadCheckpoint(mismatch(f"{name}, weights", f"{len(best['weights'])} others", "those of the model"))
    for entry, weight in best["weights"].items():
        _check_tensor(f"{name}, weights, {entry}", weight, own[entry])


def _check_state(name: str, state: Any, model: nn.Module) -> None:
    """Raise unless `state` is a state of Adam. A parameter that has had no gradient yet has no state."""
    _check_dict(name, state)
    parameters = dict(enumerate(model.parameters()))
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
