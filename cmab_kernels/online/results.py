"""The kinds of results: tensors, arrays, and data frames of pandas or polars, with the names of columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def column_names(given: Any) -> list[str] | None:
    """Return the column names of a data frame, or None if there are none or not all are strings."""
    columns = getattr(given, "columns", None)
    names = None if columns is None else list(columns)
    return names if names and all(isinstance(name, str) for name in names) else None


def target_names(given: Any) -> list[str] | None:
    """Return the column names of a data frame or the name of a series, or None if there are none."""
    name = getattr(given, "name", None)
    return [name] if isinstance(name, str) and name else column_names(given)


def result_dtype(given: Any) -> Any:
    """Return the dtype of results for an input: a floating dtype of torch for a tensor, of NumPy for other inputs."""
    if isinstance(given, Tensor):
        return given.dtype if given.is_floating_point() else torch.float64
    import numpy as np

    dtype: Any = getattr(given, "dtype", None)
    return dtype if getattr(dtype, "kind", "") == "f" and dtype.itemsize in (2, 4, 8) else np.dtype(np.float64)


def cast(out: Tensor, dtype: Any) -> Any:
    """Return a tensor with a dtype of torch, or an array with a dtype of NumPy."""
    return out.to(dtype) if isinstance(dtype, torch.dtype) else out.detach().cpu().numpy().astype(dtype, copy=False)


def framed(out: Tensor, package: str, names: list[str] | None, given: Any) -> Any:
    """Return results (N,) as a series, or (N, E) as a data frame, of pandas or polars, in float64 or float32.

    Columns have the names of the targets: `names`, or "y", or "y0" to "y{E-1}". The index of pandas is that of the
    frame `given`.
    """
    wide = str(result_dtype(given)).endswith("float64")
    values = out.detach().to(torch.float64 if wide else torch.float32).cpu().numpy()
    if names is None:
        names = ["y"] if values.ndim == 1 else [f"y{each}" for each in range(values.shape[1])]
    if package == "polars":
        import polars

        return polars.Series(names[0], values) if values.ndim == 1 else polars.DataFrame(values, schema=names)
    import pandas

    index = given.index if isinstance(given, (pandas.DataFrame, pandas.Series)) else None
    return pandas.Series(values, index, name=names[0]) if values.ndim == 1 else pandas.DataFrame(values, index, names)
