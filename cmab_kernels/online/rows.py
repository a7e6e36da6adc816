"""Examples and points that callers pass, converted to tensors."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..intention import RidgeState, merge_ridge, remove_ridge, ridge_state
from ..intention.state import subtract_ridge
from ..runtime.checks import is_distributed, kind_of, mismatch
from ..runtime.dtypes import FLOATING, state_dtype
from .results import column_names, result_dtype, target_names
from .sums import Squares, quick

if TYPE_CHECKING:
    from .sums import Sums

BLOCK = 2**20
"""The largest number of elements of a sparse matrix that are made dense at a time, unless one row has more."""


class Rows:
    """Examples: x (N, D), y (N, E) and weights (1, N) or None; `flat` is True if y was (N,).

    x is a tensor, or a CSR matrix of SciPy.
    """

    def __init__(self, name: str, X: Any, y: Any, sample_weight: Any = None, held: Sums | None = None) -> None:
        if y is None:
            raise ValueError(f"{name} requires y to be passed, but the target y is None")
        self.x = read_points(name, X, held)
        device = self.x.device if isinstance(self.x, Tensor) else None if held is None else held.device
        number = self.x.shape[0]
        targets = _tensor("y", y, device)
        self.flat = targets.dim() == 1
        if targets.dim() not in (1, 2) or len(targets) != number or targets.shape[-1] == 0 < len(targets):
            expected = f"(N,) or (N, E) with N = {number} and E >= 1, as X has {number} rows"
            raise ValueError(mismatch("y", f"shape {tuple(targets.shape)}", expected))
        self.y = targets[:, None] if self.flat else targets
        if held is not None and (self.flat, self.y.shape[1]) != (held.flat, held.targets):
            wanted = "(N,)" if held.flat else f"(N, {held.targets})"
            raise ValueError(mismatch("y", f"shape {tuple(targets.shape)}", f"{wanted}, as in the examples before"))
        self.weights = None if sample_weight is None else _weights(sample_weight, number, self.y.device)
        self.dtype, self.names, self.target_names = result_dtype(X), column_names(X), target_names(y)
        named = held is not None and not self.flat and None not in (self.target_names, held.target_names)
        if held is not None and named and self.target_names != held.target_names:
            wanted = f"{held.target_names}, as in the examples before"
            raise ValueError(mismatch("y", f"the targets {self.target_names}", wanted))

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def faded(self, forgetting: float) -> Tensor | None:
        """Return the weights (1, N) that result if each example multiplies the weights of earlier examples by
        `forgetting`."""
        if forgetting == 1:
            return self.weights
        fading = forgetting ** torch.arange(len(self) - 1, -1, -1, dtype=torch.float64, device=self.y.device)
        return fading[None] if self.weights is None else fading * self.weights

    def origins(self) -> tuple[Tensor, Tensor]:
        """Return points (D,) and (E,) close to the means of x and y. Sparse rows have the origin 0, which keeps them
        sparse."""
        counted = slice(None) if self.weights is None else self.weights[0] > 0  # a row of weight 0 may hold padding
        y = _origin(self.y[counted].double())
        return (_origin(self.x[counted].double()) if isinstance(self.x, Tensor) else y.new_zeros(self.x.shape[1])), y

    def added(self, held: Sums, state: RidgeState, weights: Tensor | None) -> RidgeState:
        """Return a state of the sums `held` with these examples, at these weights."""
        if not isinstance(self.x, Tensor):
            return merge_ridge(state, self._sparse(held, weights))
        return ridge_state(_key(held, self.x), _value(held, self.y), weights=weights, state=state)

    def removed(self, held: Sums) -> RidgeState:
        """Return the state of the sums `held` without these examples."""
        if not isinstance(self.x, Tensor):
            return subtract_ridge(held.state, self._sparse(held, self.weights))
        return remove_ridge(held.state, _key(held, self.x), _value(held, self.y), weights=self.weights)

    def squares(self, held: Sums, weights: Tensor | None) -> Squares:
        y = self.y - held.target_origin
        if weights is not None:
            y *= weights.sqrt().T  # this comes before the squares, because a row of weight 0 may hold any number
        sums = quick(y.square_().sum(0))
        return Squares(sums, float(len(self)) if weights is None else quick(weights).sum(), sums)

    def blocks(self) -> Iterator[tuple[Tensor, slice]]:
        """Yield dense blocks of x, each with its range of rows."""
        first = 0
        for block in dense_blocks(self.x, self.y.device):
            yield block, slice(first, first := first + len(block))

    def _sparse(self, held: Sums, weights: Tensor | None) -> RidgeState:
        """Return the state of sparse examples: by sparse products about the origin 0, otherwise by dense blocks."""
        if held.origin.any():
            states = []
            for x, rows in self.blocks():
                each = None if weights is None else weights[:, rows]
                states.append(ridge_state(_key(held, x), _value(held, self.y[rows]), weights=each))
            return merge_ridge(*states)
        import numpy as np

        x, y = self.x, _value(held, self.y)[0, 0].cpu().numpy()
        if held.intercept:
            from scipy import sparse

            x = sparse.hstack([x, np.ones((len(self), 1))], format="csr")
        weighted = (x if weights is None else x.multiply(weights.cpu().numpy().T)).T.tocsr()
        sums = ((weighted @ x).toarray(), weighted @ y)
        gram, moment = (torch.from_numpy(np.ascontiguousarray(each))[None, None].to(held.device) for each in sums)
        return RidgeState(gram, moment, held.state.count.new_full((1, 1), len(self)))


def _key(held: Sums, x: Tensor) -> Tensor:
    """Return the key (1, 1, N, D [+ 1]) of points for the sums `held`. It is float64, so that examples of any dtype are
    removed exactly."""
    key = held.origin.new_ones(1, 1, len(x), x.shape[1] + held.intercept)
    torch.sub(x, held.origin, out=key[0, 0, :, : x.shape[1]])
    return key


def _value(held: Sums, y: Tensor) -> Tensor:
    """Return the value (1, 1, N, E) of targets for the sums `held`, float64."""
    return (y - held.target_origin)[None, None]


def _origin(rows: Tensor) -> Tensor:
    """Return the means (C,) of rows (N, C). They are rounded to a multiple of a power of two below the spread.

    Then differences between numbers with few bits have few bits too.
    """
    spread, mean = rows.std(0, correction=0), rows.mean(0)
    step = torch.ldexp(torch.ones_like(spread), spread.frexp().exponent - 1)
    return torch.where(spread > 0, (mean / step).round() * step, mean).nan_to_num(0.0, 0.0, 0.0)


def dense_blocks(points: Any, device: torch.device) -> Iterator[Tensor]:
    """Yield points as dense tensors: a tensor unchanged, and a sparse matrix in blocks of rows."""
    if isinstance(points, Tensor):
        yield points
        return
    rows = max(BLOCK // points.shape[1], 1)
    for first in range(0, points.shape[0], rows):
        yield torch.from_numpy(points[first : first + rows].toarray()).to(device)


def read_points(name: str, X: Any, held: Sums | None) -> Any:
    """Return X (N, D) as a tensor on the device of the sums `held`, or as a CSR matrix of SciPy if it is sparse.

    Raise if X has another form or width. Some messages have the wording that scikit-learn's estimator checks expect.
    """
    points = _csr(X) if hasattr(X, "tocsr") else _tensor("X", X, None if held is None else held.device)
    if points.ndim != 2:
        shown = f"shape {tuple(points.shape)}"
        raise ValueError(
            mismatch(
                "X", shown, "(N, D); Reshape your data: X.reshape(-1, 1) for one feature, X.reshape(1, -1) for one row"
            )
        )
    for axis, each in enumerate(("sample", "feature")):
        if points.shape[axis] == 0:
            raise ValueError(
                f"Found array X with 0 {each}(s) (shape={tuple(points.shape)}) while a minimum of 1 is required."
            )
    names = column_names(X)
    if held is not None and None not in (names, held.names) and names != held.names:
        raise ValueError(
            f"The feature names should match those that were passed during fit: {names} were given, not {held.names}"
        )
    if held is not None and points.shape[1] != held.width:
        raise ValueError(f"X has {points.shape[1]} features, but {name} is expecting {held.width} features as input")
    return points


def _csr(given: Any) -> Any:
    """Return a sparse matrix of SciPy as CSR of finite float64 numbers."""
    import numpy as np

    if given.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: X is {given.dtype}")
    if given.dtype.kind not in "biuf":
        raise TypeError(mismatch("X", f"a sparse matrix of {given.dtype}", "a sparse matrix of numbers"))
    rows = given.tocsr().astype(np.float64)
    if not np.isfinite(rows.data).all():
        raise ValueError(_not_finite("X"))
    return rows


def _weights(given: Any, number: int, device: torch.device) -> Tensor:
    """Return the weights (1, N) float64 of examples, from one weight for each example or one number for all."""
    if isinstance(given, Real):
        given = torch.full((number,), float(given), dtype=torch.float64, device=device)
    weights = _tensor("sample_weight", given, device)
    if weights.shape != (number,):
        raise ValueError(mismatch("sample_weight", f"shape {tuple(weights.shape)}", f"({number},), one for each row"))
    if (weights < 0).any():
        raise ValueError(mismatch("sample_weight", "a negative element", "numbers >= 0"))
    return weights[None].double()


def _tensor(name: str, given: Any, device: torch.device | None) -> Tensor:
    """Return finite numbers as a tensor: float32 for half types and float32, float64 for all other numbers."""
    if not isinstance(given, Tensor):
        return _array(name, given).to(device)
    if device is not None and given.device != device:
        raise ValueError(
            mismatch(name, f"device {given.device}", f"{device}, the device of the examples before or of X")
        )
    if is_distributed(given):
        raise TypeError(mismatch(name, "a DTensor", "a tensor of this rank; fit its to_local(), and merge estimators"))
    if given.is_nested or given.layout != torch.strided or given.is_meta:
        shown = "a nested tensor" if given.is_nested else given.layout
        raise TypeError(mismatch(name, f"{shown} on {given.device}", "a dense tensor with values"))
    if given.is_complex():
        raise ValueError(f"Complex data not supported: {name} is {given.dtype}")
    tensor = given.to(state_dtype(given.dtype) if given.dtype in FLOATING else torch.float64)
    if not tensor.isfinite().all():
        raise ValueError(_not_finite(name))
    return tensor


def _not_finite(name: str) -> str:
    return f"Input {name} contains infinity or NaN; every element must be finite"


def _array(name: str, given: Any) -> Tensor:
    """Return a sequence, an array or a table of numbers as a tensor on the CPU, with the dtypes of `_tensor`."""
    import numpy as np

    if hasattr(given, "tocsr"):
        raise TypeError(mismatch(name, "a sparse matrix", "a dense array; use toarray()"))  # X may be: see `_csr`
    if np.ma.is_masked(given):
        raise ValueError(
            mismatch(
                name,
                "an array with masked entries",
                "an array without masked entries; fill them in, or leave out their rows",
            )
        )
    try:
        array = np.asarray(given)
        if array.dtype.kind in "mM":
            raise TypeError(f"{array.dtype} is not a number")
        if array.dtype.kind != "c":
            small = array.dtype.kind == "f" and array.dtype.itemsize in (2, 4)
            array = array.astype(np.float32 if small else np.float64, copy=False)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(mismatch(name, kind_of(given), f"an array of numbers; {error}")) from error
    if array.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: {name} is {array.dtype}")
    if not np.isfinite(array).all():
        raise ValueError(_not_finite(name))
    # torch calls a reversed array of one row "contiguous".
    is_read = array.flags.c_contiguous and array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.from_numpy(array if is_read else array.copy())
