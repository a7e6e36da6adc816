"""The window of newest tokens that a continual module keeps between calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...nystrom import (
    EXTRA_SUMS,
    LAST_POSITION,
    ContinualAttentionState,
    ContinualNystromState,
    check_state,
    state_from_tensors,
    state_to_tensors,
    unlikely_totals,
)
from ...runtime.checks import kind_of, mismatch
from ...runtime.dtypes import state_dtype
from ..constructors import naming_options
from ..stream import Part, Stream, copied, extent


class FillingWindow(NamedTuple):
    """The state of a stream of fewer than n tokens: the tokens so far, projected to heads."""

    queries: Tensor
    """(B, H, p, D), 1 <= p < n, oldest first"""
    keys: Tensor
    """(B, H, p, D)"""
    values: Tensor
    """(B, H, p, E)"""


class StaggeredWindow(NamedTuple):
    """The state of a batch of streams while some of them have fewer than n tokens, and others may have more."""

    tokens: Tensor
    """(B,) int64: how many tokens of its window each stream has, 0 to n"""
    window: ContinualNystromState | ContinualAttentionState
    """The state of all streams. A stream with p < n tokens has them in rows 0 to p - 1 of its rings, and its position
    is n; the rest of its rings, its sums and its landmarks have no meaning yet."""

    @property
    def queries(self) -> Tensor:
        return self.window.queries

    @property
    def keys(self) -> Tensor:
        return self.window.keys


WindowState = FillingWindow | StaggeredWindow | ContinualNystromState | ContinualAttentionState


class RecentTokens(NamedTuple):
    """The newest tokens of a stream, as the layer received them."""

    tokens: Tensor
    """(B, n, C), oldest first. Rows before the first token are 0."""


# Their place in 0.1.0.
_OLDER = [(kind, f"cmab_kernels.nn.continual_stream.{kind.__name__}") for kind in (FillingWindow, RecentTokens)]
# The states in cmab_kernels are registered in the same way.
torch.serialization.add_safe_globals([FillingWindow, StaggeredWindow, RecentTokens, *_OLDER])


class ContinualStream(Stream[WindowState]):
    """A submodule that holds the window of a streaming module, or None.

    `state_dict` contains the window if there is one. Before the window is full, the entries are
    `queries`, `keys` and `values` (B, H, p, D) of the p < n tokens so far. Once it is full, these
    three entries hold all n tokens, oldest first. The other fields of the state except `spare` are
    then entries too, with ints as int64 tensors. If the rows of the batch have different numbers of
    tokens, and one row has fewer than n, there is one more entry `tokens` (B,). In a row with fewer
    than n tokens, the tokens come first, and zeros follow. See `Stream` for the rules of loading. A
    window that is assigned to `state` is checked and copied.

    The window moves with the module between devices, with the same bits. A cast of the module casts the tokens, and the
    next step recomputes the sums over them.

    Args:
        kind: the type of the state of the operator that makes the steps.
        heads, width: H and D = E.
        rows: the allowed numbers of rows of the state's sums.
        counts: the ints of the state, by name: `window` and, for a `ContinualNystromState`, `pinv_iterations` and
            `fixed`.
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

    fields = tuple(dict.fromkeys((*ContinualNystromState._fields, *ContinualAttentionState._fields, "tokens")))

    @naming_options
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
        super().__init__(device=device, dtype=dtype)
        self.kind: Any = kind
        self.heads, self.width, self.rows, self.counts = heads, width, rows, counts
        self.window = counts["window"]

    def check(self, state: Any, name: str = "prev_state") -> None:
        """Raise unless a step of this module can continue from `state`. The values of its tensors
        are not checked."""
        self._check(state)
        full = state.window if isinstance(state, StaggeredWindow) else state
        for count, wanted in self.counts.items():
            given = getattr(full, count, wanted)
            if given != wanted:
                raise ValueError(mismatch(f"{name}.{count}", given, f"{wanted}, as in this module"))

    def _check(self, state: WindowState) -> None:
        if isinstance(state, StaggeredWindow):
            check_state(state.window, self.kind, "state.window")
            count, keys = state.tokens, state.keys
            _check_tensors(tokens=count)
            if count.dtype != torch.int64 or count.shape != keys.shape[:1] or count.device != keys.device:
                given = f"{count.dtype} {tuple(count.shape)} on {count.device}"
                raise ValueError(
                    mismatch("state.tokens", given, f"torch.int64 (B,) = ({keys.shape[0]},) on {keys.device}")
                )
        elif isinstance(state, FillingWindow):
            _check_tensors(**state._asdict())
        else:
            check_state(state, self.kind)

    def _taken(self, state: WindowState) -> WindowState:
        entries = self._entries(state)
        problem = self._problem("state.", entries)
        if problem:
            raise ValueError(problem)
        return self._built(entries, self.weight_like.device)

    def _cast(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the cast entries. The peak (largest value) of each row is set to the largest number, so the next step
        recomputes the row."""
        cast = super()._cast(entries)
        if "sums" in cast:
            sums = cast["sums"]
            sums[..., -1] = torch.finfo(sums.dtype).max
        return cast

    def _parts(self, entries: Mapping[str, Any]) -> dict[str, Part]:
        """Return the shape and dtype of each entry. If there are only token entries, the window is not full yet."""
        batch, tokens, rows = extent(entries, "queries", 0), extent(entries, "queries", 2), extent(entries, "sums", 2)
        full = bool(entries.keys() - {*FillingWindow._fields})
        tokens, rows = self.window if full else tokens, rows if rows in self.rows else self.rows[-1]
        dtype, sums = self.weight_like.dtype, state_dtype(self.weight_like.dtype)
        parts = dict.fromkeys(FillingWindow._fields, Part((batch, self.heads, tokens, self.width), dtype))
        if not full:
            return parts
        parts["sums"] = Part((batch, self.heads, rows, self.width + EXTRA_SUMS), sums)
        if self.kind is ContinualNystromState:
            parts["landmark_queries"] = parts["landmark_keys"] = Part((batch, self.heads, rows, self.width), sums)
            parts["inverse"] = Part((batch, self.heads, rows, rows), sums)
        given = entries.get("position")
        common = isinstance(given, Tensor) and not given.dim()  # older files have one number for all streams
        if "tokens" in entries:
            parts["tokens"], common = Part((batch,), torch.int64), False
        parts["position"] = Part(() if common else (batch, self.heads), torch.int64)
        return {**parts, "scale": Part((), torch.float64), **dict.fromkeys(self.counts, Part((), torch.int64))}

    def _unlikely(self, prefix: str, entries: Mapping[str, Tensor]) -> str:
        for name, entry in entries.items():
            if name not in self._parts(entries):
                return mismatch(
                    prefix + name, "a tensor", f"no such entry, because a {self.kind.__name__} does not have it"
                )
            if not entry.isfinite().all():
                return mismatch(prefix + name, "a NaN or an infinity", "finite numbers")
        if "sums" in entries:
            return self._unlikely_sums(prefix, entries)
        tokens = entries["queries"].shape[2]
        return (
            ""
            if 0 < tokens < self.window
            else mismatch(f"{prefix}queries", f"{tokens} tokens", f"1 to {self.window - 1}")
        )

    def _unlikely_sums(self, prefix: str, entries: Mapping[str, Tensor]) -> str:
        """Return why these entries of a full window cannot come from a stream of this module, or "" if they can."""
        for name, count in self.counts.items():
            if entries[name] != count:
                return mismatch(prefix + name, int(entries[name]), f"{count}, as in this module")
        for extreme in map(int, entries["position"].aminmax() if entries["position"].numel() else ()):
            if not self.window <= extreme <= LAST_POSITION:
                return mismatch(
                    prefix + "position", extreme, f"a position from {self.window}, the window, to {LAST_POSITION}"
                )
        if "tokens" in entries:
            held = entries["tokens"]
            for extreme in map(int, held.aminmax() if held.numel() else ()):
                if not 0 <= extreme <= self.window:
                    return mismatch(f"{prefix}tokens", extreme, f"0 to {self.window}, the window")
            if (entries["position"][held < self.window] != self.window).any():
                return mismatch(
                    f"{prefix}position",
                    "another number",
                    f"{self.window} where a stream has fewer tokens than the window",
                )
        if entries["scale"] != self.width**-0.5:
            return mismatch(prefix + "scale", float(entries["scale"]), f"{self.width**-0.5}, as in this module")
        return unlikely_totals(prefix + "sums", entries["sums"])

    def _built(self, entries: Mapping[str, Tensor], device: torch.device | None) -> WindowState:
        if "sums" not in entries:
            return FillingWindow(**copied(entries, device))
        moved = {
            name: entry.to(device) if entry.dim() else entry for name, entry in entries.items() if name != "tokens"
        }
        state: Any = state_from_tensors(self.kind, moved)
        return (
            StaggeredWindow(**copied({"tokens": entries["tokens"]}, device), window=state)
            if "tokens" in entries
            else state
        )

    def _entries(self, value: WindowState) -> dict[str, Tensor]:
        if isinstance(value, FillingWindow):
            return {name: tensor.clone() for name, tensor in value._asdict().items()}
        if not isinstance(value, StaggeredWindow):
            return state_to_tensors(value)
        entries, filling = state_to_tensors(value.window), value.tokens < self.window
        for name in FillingWindow._fields:
            later = torch.arange(self.window, device=filling.device) >= value.tokens[:, None]
            entries[name].masked_fill_(later[:, None, :, None], 0.0)  # tokens of a stream that has ended
        for name in ("sums", "landmark_queries", "landmark_keys", "inverse"):
            if name in entries:
                entries[name][filling] = 1.0
        return {**entries, "tokens": value.tokens.clone()}


def _check_tensors(**fields: Any) -> None:
    for name, field in fields.items():
        if not isinstance(field, Tensor):
            raise TypeError(mismatch(f"state.{name}", kind_of(field), "a torch.Tensor"))


class RecentStream(Stream[RecentTokens]):
    """A submodule that holds the n newest tokens of a stream, or None.

    `state_dict` contains the tokens as `tokens` (B, n, C); see `Stream`. The tokens have the module's dtype, and a cast
    of the module casts them.

    Args:
        window, width: n and C.
        device, dtype: of the module's weights.

    >>> stream = cmab_kernels.nn.RecentStream(window=4, width=16)
    >>> stream.state = cmab_kernels.nn.RecentTokens(torch.randn(1, 4, 16))
    >>> list(stream.state_dict()), stream.half().state.tokens.dtype
    (['tokens'], torch.float16)
    """

    fields = RecentTokens._fields

    @naming_options
    def __init__(
        self, window: int, width: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        self.shape = (window, width)

    def _check(self, state: RecentTokens) -> None:
        if not isinstance(state, RecentTokens):
            raise TypeError(mismatch("state", kind_of(state), "a RecentTokens"))
        problem = self._problem("state.", state._asdict())
        if problem:
            raise ValueError(problem)

    def _taken(self, state: RecentTokens) -> RecentTokens:
        return self._built(state._asdict(), self.weight_like.device)

    def _entries(self, value: RecentTokens) -> dict[str, Tensor]:
        return value._asdict()

    def _parts(self, entries: Mapping[str, Any]) -> dict[str, Part]:
        return {"tokens": Part((extent(entries, "tokens", 0), *self.shape), self.weight_like.dtype)}

    def _unlikely(self, prefix: str, entries: Mapping[str, Tensor]) -> str:
        if entries["tokens"].isfinite().all():
            return ""
        return mismatch(f"{prefix}tokens", "a NaN or an infinity", "finite numbers")

    def _built(self, entries: Mapping[str, Tensor], device: torch.device | None) -> RecentTokens:
        return RecentTokens(**copied(entries, device))
