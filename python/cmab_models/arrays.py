"""Arrays of a caller's own data: checks, and scales."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from cmab_kernels.runtime.checks import kind_of, mismatch

from .pretrained import Pretrained
from .systems import SYSTEMS

NUMBERS = ("model/model.safetensors", "state.pt")
"""The files of a fitted model that hold numbers."""


def numbers(name: str, given: Any, columns: int | None = None, *, missing: bool = False) -> np.ndarray:
    """Return numbers (N, C), float64, from an array, a table of pandas or polars, a list or a tensor; (N,) becomes (N,
    1).

    Raises a `TypeError` or a `ValueError` that names the argument for something else than numbers, for another number
    of columns, for an infinity, and for a NaN unless numbers may be `missing`.
    """
    allowed = "an array or a table of numbers"
    try:
        found = _filled(_from_tensor(given) if isinstance(given, Tensor) else given)
        numeric = found.dtype.kind not in "cmM"  # complex numbers and times become float64 without an error
        found = found.astype(np.float64) if numeric else found
    except (TypeError, ValueError) as error:
        raise TypeError(mismatch(name, f"{kind_of(given)} ({error})", allowed)) from error
    if not numeric:
        raise TypeError(mismatch(name, f"{kind_of(given)} ({found.dtype})", allowed))
    found = found[:, None] if found.ndim == 1 else found
    if found.ndim != 2 or columns not in (None, found.shape[1]) or not found.shape[1]:
        allowed = f"(N, {'columns' if columns is None else columns})" + (" or (N,)" if columns in (None, 1) else "")
        raise ValueError(mismatch(name, f"shape {np.shape(given)}", allowed))
    if np.isinf(found).any() or (not missing and np.isnan(found).any()):
        what = "an infinity" if np.isinf(found).any() else f"{int(np.isnan(found).sum())} missing numbers"
        raise ValueError(mismatch(name, what, "finite numbers" + (", or NaN for a missing one" if missing else "")))
    return found


def _from_tensor(given: Tensor) -> np.ndarray:
    found: np.ndarray = (given.double() if given.is_floating_point() else given).numpy(force=True)  # not bfloat16
    return found


def _filled(given: Any) -> np.ndarray:
    """Return an array with NaN where a masked array or a table of pandas says that a number is missing."""
    if isinstance(given, np.ma.MaskedArray):
        return np.where(np.ma.getmaskarray(given), np.nan, given.data) if given.dtype.kind in "biuf" else given.data
    found = np.asarray(given)
    if found.dtype == object:  # pandas.NA does not become a float
        missing = np.array([_is_na(each) for each in found.ravel()], bool).reshape(found.shape)
        found = np.where(missing, np.nan, found)
    return found


def is_missing(label: Any) -> bool:
    """Whether a label is None, pandas.NA, NaN or NaT."""
    return label is None or _is_na(label) or label != label


def _is_na(each: Any) -> bool:
    return type(each).__name__ == "NAType"  # pandas.NA, whose comparisons have no truth


class Scale(NamedTuple):
    """The means and the standard deviations of columns, with which a model's numbers have means of 0 and deviations of
    1. All of this is float64, because a clock or a map may have large numbers with small differences."""

    mean: np.ndarray
    """(C,)"""
    std: np.ndarray
    """(C,), 1 for a column with one value"""

    @classmethod
    def of(cls, name: str, values: np.ndarray) -> Scale:
        """Return the scale of columns (N, C); a `ValueError` names them if float64 cannot hold their squares."""
        # A constant column keeps its exact value, and large numbers their small differences.
        least = np.nanmin(values, 0)
        with np.errstate(over="ignore", invalid="ignore"):
            above = values - least
            mean, std = least + np.nanmean(above, 0), np.nanstd(above, 0)
        if not np.isfinite(std).all():
            largest = np.nanmax(np.abs(values))
            raise ValueError(
                mismatch(
                    name, f"values up to {largest:.2g}", "values below 1e150; leave out numbers that mark missing ones"
                )
            )
        return cls(mean, np.where(std > 1e-14 * np.abs(mean), std, 1.0))

    def standardise(self, values: np.ndarray) -> Tensor:
        """Return values as a float32 tensor of means 0 and deviations 1."""
        return torch.from_numpy(((values - self.mean) / self.std).astype(np.float32))

    def told(self) -> dict[str, list[float]]:
        return {"mean": self.mean.tolist(), "std": self.std.tolist()}

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Scale:
        return cls(*(np.array(told[name], np.float64) for name in cls._fields))


def digest(*groups: Iterable[Tensor]) -> str:
    """Return a digest of the numbers of a task."""
    found = hashlib.sha256()
    for part in (each for group in groups for each in group):
        found.update(part.numpy().tobytes())
    return found.hexdigest()[:12]


def save(folder: str | Path, told: Mapping[str, Any], model: Pretrained, state: Any) -> None:
    """Write a fitted model to a folder: `model/`, `state.pt`, and `fitted.json`, which has digests of the others."""
    folder = Path(folder)
    try:
        model.save_pretrained(folder / "model")
        torch.save(state, folder / "state.pt")
        (folder / "fitted.json").write_text(json.dumps({**told, "digests": _digests(folder)}))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(f"{folder} cannot be written: {error}") from error


def _digests(folder: Path) -> list[str]:
    """Return digests of the files whose numbers belong together."""
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16] for name in NUMBERS]


def load(folder: str | Path, kind: str) -> tuple[dict[str, Any], Any, Any]:
    """Return what `save` wrote: what was told, the model, and the state. Nothing in the files is executed.

    Raises `FileNotFoundError` without the files, and a `ValueError` if they hold something else than a `kind`.
    """
    folder = Path(folder)
    names = [name for name in ("model/config.json", "fitted.json", "state.pt") if not (folder / name).is_file()]
    if names:
        raise FileNotFoundError(mismatch(str(folder), f"a folder without {names[0]}", "one that `save` wrote"))
    try:
        told = json.loads((folder / "fitted.json").read_text())
        if told["kind"] != kind:
            raise ValueError(mismatch("kind", told["kind"], kind))
        if told.pop("digests") != _digests(folder):
            raise ValueError(mismatch("digests", "those of other files", "files of one `save`; one was interrupted"))
        with contextlib.redirect_stdout(io.StringIO()):  # huggingface_hub prints that it reads from a folder
            model = SYSTEMS[told["system"]].from_pretrained(folder / "model").eval()
        return told, model, torch.load(folder / "state.pt", weights_only=True)
    except Exception as error:  # if bytes are not a pickle, the unpickler can raise anything
        given = f"files that cannot be read ({shorten(repr(error), 100)})"
        raise ValueError(mismatch(str(folder), given, f"a saved {kind}")) from error
