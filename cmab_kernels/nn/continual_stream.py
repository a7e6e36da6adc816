"""The window of newest tokens that a continual module keeps between calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks import wrong
from ..dtypes import state_dtype
from ..nystrom import ContinualAttentionState, ContinualNystromState
from ..nystrom.continual.state import check_state, position_on, ring_of, tokens_seen, window_of


class FillingWindow(NamedTuple):
    """The first tokens of a stream, as heads, while they are fewer than a window."""

    queries: Tensor
    """(B, H, p, D), 1 <= p < n, oldest first"""
    keys: Tensor
    """(B, H, p, D)"""
    values: Tensor
    """(B, H, p, E)"""


WindowState = FillingWindow | ContinualNystromState | ContinualAttentionState

_FIELDS = tuple(dict.fromkeys((*ContinualNystromState._fields, *ContinualAttentionState._fields)))


class Part(NamedTuple):
    """What a saved tensor must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ContinualStream(nn.Module):
    """Holds one window, or none: a submodule of a module that streams.

    While there is one, `state_dict` holds it: while it fills, `queries`, `keys` and `values` (B, H, p, D); afterwards these with the whole
    window, oldest token first, and the other fields of the state but `spare`, ints as int64 tensors. A stream that was saved and loaded
    goes on to the same bits. While there is none the `state_dict` holds nothing, so that weights alone are a complete checkpoint, and
    loading one ends the stream. Entries of wrong shape or dtype, or with values that no tokens leave behind, are refused with an error that
    names them, and the window held stays.

    The window moves with the module between devices, to the same bits. A cast casts its tokens, and the sums over them are computed
    afresh with the next step.

    Args:
        kind: the state of the operator that steps.
        heads, width: H and D = E.
        rows: how many rows the sums of such a state may have.
        counts: its ints, but for the position: its window, ...
        device, dtype: of the module's weights.

    >>> attention = cmab_kernels.nn.ContinualAttention(16, 2, sequence_len=4).eval()
    >>> with torch.no_grad():
    ...     out = attention.forward_steps(torch.randn(3, 1, 16))
    >>> list(attention.stream.state_dict())
    ['queries', 'keys', 'values']
    >>> attention.clean_state()
    >>> list(attention.stream.state_dict())
    []
    """

    weight_like: Tensor

    def __init__(
        self,
        kind: type[ContinualNystromState] | type[ContinualAttentionState],
        heads: int,
        width: int,
        rows: tuple[int, ...],
        counts: dict[str, int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kind: Any = kind
        self.heads, self.width, self.rows, self.counts = heads, width, rows, counts
        self.window = counts["window"]
        # The only reference to the tensors of a state that is stepped: a step may then use their memory again.
        self.held: WindowState | None = None
        # An element-free buffer follows the module's casts and moves, and tells of them.
        self.register_buffer("weight_like", torch.empty(0, device=device, dtype=dtype), persistent=False)

    @property
    def state(self) -> WindowState | None:
        """The window held, or None before the first token: a value, which later steps do not change.

        Assign one to continue from there, or None to start afresh. What is assigned is checked (`ValueError`, `TypeError`, or
        `RuntimeError` for one with a gradient: the chain of graphs would grow for as long as the stream runs) and copied.
        """
        return self.shared()

    @state.setter
    def state(self, state: WindowState | None) -> None:
        if state is None:
            self.held = None
            return
        if not isinstance(state, FillingWindow):
            check_state(state, self.kind)
        if any(isinstance(field, Tensor) and field.requires_grad for field in state):
            allowed = "a module's own stream holds no graph; run it under torch.no_grad(), or step states of your own by the operator"
            raise RuntimeError(wrong("state", "requires a gradient", allowed))
        entries = _entries(state)
        problem = self._problem("state.", entries)
        if problem:
            raise ValueError(problem)
        self.held = self._built(entries)

    def shared(self) -> Any:
        """The window held, in a tuple of its own: while that lives, steps write elsewhere."""
        return None if self.held is None else type(self.held)(*self.held)

    def _apply(self, fn: Callable, recurse: bool = True) -> ContinualStream:
        """Every cast and move of a module comes here."""
        before = self.weight_like
        super()._apply(fn, recurse)
        cast = before.dtype != self.weight_like.dtype
        if self.held is not None and (cast or before.device != self.weight_like.device):
            entries = _entries(self.held)
            self.held = self._built(self._cast(entries) if cast else entries)
        return self

    def _cast(self, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        """In the module's dtype; a row whose peak is out of reach of its sum is computed afresh by the next step."""
        parts = self._parts(entries)
        entries = {name: entry.to(parts[name].dtype) for name, entry in entries.items()}
        if "sums" in entries:
            sums = entries["sums"]
            sums[..., -1] = torch.finfo(sums.dtype).max
        return entries

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.held is not None:
            destination.update({prefix + name: entry for name, entry in _entries(self.held).items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        entries = {name: state_dict[prefix + name] for name in _FIELDS if prefix + name in state_dict}
        others = {name: entry for name, entry in state_dict.items() if name.removeprefix(prefix) not in entries}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        problem = self._problem(prefix, entries) if entries else ""
        if problem:
            error_msgs.append(problem)
        else:
            self.held = self._built(entries) if entries else None

    def _parts(self, entries: Mapping[str, Any]) -> dict[str, Part]:
        """What each entry must be, by the batch, the tokens and the rows that are there."""
        batch, tokens, rows = _extent(entries, "queries", 0), _extent(entries, "queries", 2), _extent(entries, "sums", 2)
        full = bool(entries.keys() - {*FillingWindow._fields})
        tokens, rows = self.window if full else tokens, rows if rows in self.rows else self.rows[-1]
        dtype, sums = self.weight_like.dtype, state_dtype(self.weight_like.dtype)
        parts = dict.fromkeys(FillingWindow._fields, Part((batch, self.heads, tokens, self.width), dtype))
        if not full:
            return parts
        parts["sums"] = Part((batch, self.heads, rows, self.width + 3), sums)
        if self.kind is ContinualNystromState:
            parts["landmark_queries"] = parts["landmark_keys"] = Part((batch, self.heads, rows, self.width), sums)
            parts["inverse"] = Part((batch, self.heads, rows, rows), sums)
        return {**parts, "scale": Part((), torch.float64), **dict.fromkeys(("position", *self.counts), Part((), torch.int64))}

    def _problem(self, prefix: str, entries: Mapping[str, Any]) -> str:
        """Why the entries are not a window of this module; "" when they are."""
        parts = self._parts(entries)
        for name, part in parts.items():
            entry = entries.get(name)
            if not isinstance(entry, Tensor) or entry.shape != part.shape or entry.dtype != part.dtype:
                given = f"is {entry.dtype} {tuple(entry.shape)}" if isinstance(entry, Tensor) else f"is {entry!r}"
                return wrong(prefix + name, given, f"{part.dtype} {part.shape} is needed, B being that of the queries")
            if not entry.isfinite().all():
                return wrong(prefix + name, "holds a NaN or an infinity", "every element must be finite")
        for name in entries.keys() - parts.keys():
            return wrong(prefix + name, "is given", f"a {self.kind.__name__} has none")
        if "sums" not in parts:
            tokens = entries["queries"].shape[2]
            return "" if 0 < tokens < self.window else wrong(prefix + "queries", f"has {tokens} tokens", f"1 to {self.window - 1} fit")
        return self._unlikely(prefix, entries)

    def _unlikely(self, prefix: str, entries: Mapping[str, Tensor]) -> str:
        """Why no stream through this module leaves these numbers behind; "" where one may."""
        for name, count in self.counts.items():
            if entries[name] != count:
                return wrong(prefix + name, f"is {int(entries[name])}", f"it is {count} in this module")
        if entries["position"] < self.window:
            return wrong(prefix + "position", f"is {int(entries['position'])}", f"at least the window's {self.window} is needed")
        if entries["scale"] != self.width**-0.5:
            return wrong(prefix + "scale", f"is {float(entries['scale'])}", f"it is {self.width**-0.5} in this module")
        if (entries["sums"][..., -3] <= 0).any():
            return wrong(prefix + "sums", "holds a total that is not positive", "a sum of exponentials is")
        return ""

    def _built(self, entries: Mapping[str, Tensor]) -> WindowState:
        """The state of sound entries, on the module's device, in memory of its own."""
        device = self.weight_like.device
        fields: dict[str, Any] = {
            name: entry.detach().to(device).clone(memory_format=torch.contiguous_format) for name, entry in entries.items() if entry.dim()
        }
        if "sums" not in fields:
            return FillingWindow(**fields)
        position = int(entries["position"])
        for name in FillingWindow._fields:
            fields[name] = ring_of(fields[name], position, self.window + 1)
        fields["spare"] = torch.zeros_like(fields["sums"])
        fields["scale"] = entries["scale"].detach().cpu().clone()
        fields["position"] = position_on(device, position, *fields["keys"].shape[:2])
        state: WindowState = self.kind(**fields, **self.counts)
        return state


def _entries(state: WindowState) -> dict[str, Tensor]:
    """What is saved of a state: tensors that nobody else holds."""
    if isinstance(state, FillingWindow):
        return {name: tensor.clone() for name, tensor in state._asdict().items()}
    position = tokens_seen(state)
    fields = {**state._asdict(), "position": position}
    del fields["spare"]
    rings = {name: window_of(fields[name], position, state.window) for name in FillingWindow._fields}
    others = {
        name: field.clone() if isinstance(field, Tensor) else torch.tensor(field) for name, field in fields.items() if name not in rings
    }
    return {**rings, **others}


def _extent(entries: Mapping[str, Any], name: str, dim: int) -> int:
    """0 where there is none."""
    entry = entries.get(name)
    return entry.shape[dim] if isinstance(entry, Tensor) and entry.dim() > dim else 0
