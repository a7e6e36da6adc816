"""Positional encodings on a circle, for tokens in a sliding window."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.checks import as_flag, check_count, mismatch
from ..constructors import naming_options
from ..inputs import check_features
from ..stream import Keeper, refuse_to_record
from .rows import Rows, absent_of, rows_of


class CircularPositionalEncoding(Keeper[int | Tensor]):
    """Adds to every token of a stream the encoding of its place on a circle of 2 n - 1 places, for windows of n tokens.

    A token keeps its encoding while it is in the window, so its key and value need not be recomputed. Two tokens of a
    window are at most n - 1 apart. On a circle of 2 n - 1 places the 2 n - 1 differences from -(n - 1) to n - 1 are all
    distinct.

    Args:
        embed_dim: C, columns of the tokens.
        sequence_len: n.
        learned: True: the encodings are a parameter `encodings` (2 n - 1, C), drawn from N(0, 0.02^2). False: encodings
            are sines and cosines with whole numbers of periods around the circle, from 1 to n - 1 in geometric steps.
            Sines and cosines are neither learned nor saved. A module on the meta device computes them in `to_empty`,
            or, on torch's default device, when weights are loaded with `assign=True`.
        batch_first, device, dtype: as in `torch.nn.MultiheadAttention`.

    `forward` adds encodings to a window of at most n tokens: (B, N, C) or (N, B, C), depending on `batch_first`, or (N,
    C). `forward_stream` adds them to a stream of any length. In training mode the encodings start at a random place,
    drawn at every call, so that all places are trained and only differences carry information. In eval mode they start
    at the stream's place, and both methods leave this place unchanged. `forward_step` takes one token (B, C) and
    `forward_steps` takes any number. Both advance the stream. `clean_state` resets the stream to place 0. The
    `state_dict` contains the place unless it is 0. After the first `key_padding_mask` or `clean_state(rows)`, each row
    of the batch has its own place, and the place is a tensor (B,).

    The package continual-inference calls this `RecyclingPositionalEncoding`. That class takes (B, C, T) and advances at
    every `forward`.

    Source: Continual Transformers: Redundancy-Free Attention for Online Inference (Hedegaard et al., 2023).

    >>> encoding = cmab_kernels.nn.CircularPositionalEncoding(16, sequence_len=64, batch_first=True).eval()
    >>> tokens = torch.randn(1, 64, 16)
    >>> whole = encoding(tokens)
    >>> steps = [encoding.forward_step(token) for token in tokens.unbind(1)]
    >>> torch.equal(torch.stack(steps, 1), whole), encoding.get_state()
    (True, 64)
    """

    fields = ("position",)
    encodings: Tensor
    _rows: int | None = None
    """The batch of the last step."""

    @naming_options
    def __init__(
        self,
        embed_dim: int,
        sequence_len: int,
        learned: bool = True,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim, sequence_len = check_count("embed_dim", embed_dim), check_count("sequence_len", sequence_len)
        self.sequence_len, self.period, self.batch_first = sequence_len, 2 * sequence_len - 1, batch_first
        if learned:
            self.encodings = nn.Parameter(0.02 * torch.randn(self.period, embed_dim, device=device, dtype=dtype))
        else:
            like = torch.empty(0, device=device, dtype=dtype)
            self.register_buffer("encodings", _waves(self.period, embed_dim).to(like), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a window with its encodings added."""
        encodings = self._checked("tokens", tokens, (2, 3))
        length = tokens.shape[self._along(tokens)]
        if length > self.sequence_len:
            raise ValueError(mismatch("tokens", f"{length} tokens", f"at most {self.sequence_len}, the window"))
        return self._added(tokens, encodings, self._start(tokens))

    def forward_stream(self, tokens: Tensor) -> Tensor:
        """Return a stream of any length with its encodings added, in the layout of `forward`."""
        return self._added(tokens, self._checked("tokens", tokens, (2, 3)), self._start(tokens))

    def forward_step(self, token: Tensor, update_state: bool = True, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return one token (B, C), or (C,), with its encoding added. `update_state=False` keeps the stream's place.

        `key_padding_mask` (B,) or (B, 1) is True where a row has no token: the row keeps its place.
        """
        encodings = self._checked("token", token, (1, 2))
        refuse_to_record("forward_step", "forward_stream, or the sum with a row of `encodings`")
        absent = None if key_padding_mask is None else absent_of(key_padding_mask, token, self.batch_first, one=True)
        place = self._place(token.shape[0] if token.dim() == 2 else 1, absent, token)
        out = token + encodings[place if token.dim() == 2 or isinstance(place, int) else place[0]]
        if as_flag("update_state", update_state):
            self._move(place, 1, absent, token.shape[0] if token.dim() == 2 else 1)
        return out

    def _forward_step(self, token: Tensor, prev_state: int | Tensor | None = None) -> tuple[Tensor, int | Tensor]:
        """Return one token (B, C) or (C) with the encoding of a place, and the next place.

        The caller keeps the place: None for 0, an int, or an int64 tensor () or (B,), which a program can record.
        """
        encodings = self._checked("token", token, (1, 2))
        place = 0 if prev_state is None else prev_state
        known = place.dtype == torch.int64 and place.dim() < 2 if isinstance(place, Tensor) else type(place) is int
        if not known:
            raise TypeError(mismatch("prev_state", repr(prev_state), "an int, or an int64 tensor () or (B,)"))
        next_place = (place + 1) % self.period
        if isinstance(place, int):
            return token + encodings[place % self.period], next_place
        rows = encodings.index_select(0, (place % self.period).reshape(-1))  # torch 2.6 cannot export an index ()
        return token + (rows if place.dim() and token.dim() == 2 else rows[0]), next_place

    def forward_steps(
        self, tokens: Tensor, update_state: bool = True, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return any number of tokens with their encodings added, in the layout of `forward`.

        `key_padding_mask` (B, N) is True where a row has no token.
        """
        encodings = self._checked("tokens", tokens, (2, 3))
        refuse_to_record("forward_steps", "forward_stream, or the sum with rows of `encodings`")
        absent = absent_of(key_padding_mask, tokens, self.batch_first)
        place = self._place(self._batch(tokens), absent, tokens)
        out = self._added(tokens, encodings, place, absent)
        if as_flag("update_state", update_state):
            self._move(place, tokens.shape[self._along(tokens)], absent, self._batch(tokens))
        return out

    @property
    def position(self) -> int | Tensor:
        """The place of the next token, from 0 to 2 n - 2, or the place of each row of the batch, (B,) int64."""
        held = self.held
        return 0 if held is None else held

    def clean_state(self, rows: Rows | None = None) -> None:
        """Reset the place to 0, for all rows of the batch or for `rows`: an index, several indices,
        or a bool tensor (B,)."""
        held, batch = self.held, self._rows
        if rows is None or held is None:
            self.hold(None)
            return
        if isinstance(held, Tensor):
            batch = len(held)
        elif isinstance(rows, Tensor) and rows.dtype == torch.bool and rows.dim() == 1:
            batch = len(rows)
        if batch is None:
            raise ValueError(
                mismatch("rows", repr(rows), "a bool tensor (B,), because no step has shown the batch size yet")
            )
        gone = rows_of(rows, batch, self.encodings.device)
        self.hold(self._of_rows(held, batch).masked_fill(gone, 0))

    def get_state(self) -> int | Tensor:
        """Return the place of the next token, from 0 to 2 n - 2, or the place of each row of the batch, (B,) int64."""
        place = self.position
        return place.clone() if isinstance(place, Tensor) else place

    def set_state(self, state: int | Tensor | None) -> None:
        """Continue from a place, or from a tensor with one place for each row. None acts as
        `clean_state`."""
        if isinstance(state, Tensor):
            if state.dtype != torch.int64 or state.dim() != 1 or not ((state >= 0) & (state < self.period)).all():
                raise ValueError(mismatch("state", repr(state), f"an int64 tensor (B,) from 0 to {self.period - 1}"))
            state = state.clone()
        elif state is not None and (
            isinstance(state, bool) or not (isinstance(state, int) and 0 <= state < self.period)
        ):
            raise ValueError(mismatch("state", repr(state), f"an int from 0 to {self.period - 1}"))
        self.__dict__["_rows"] = None  # the place may belong to another batch
        self.hold(state)

    @property
    def _learned(self) -> bool:
        return "encodings" not in self._buffers  # `self._parameters` does not hold a parametrized parameter

    def _apply(self, fn: Callable, recurse: bool = True) -> CircularPositionalEncoding:
        """Cast or move the module, and recompute sines and cosines, because `to_empty` gives memory without values."""
        before = self.encodings
        super()._apply(fn, recurse)
        if not self._learned and self.encodings is not before:
            self.encodings.copy_(_waves(*self.encodings.shape))
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if not self._learned and self.encodings.is_meta and local_metadata.get("assign_to_params_buffers"):
            self.encodings = _waves(*self.encodings.shape).to(torch.empty(0, dtype=self.encodings.dtype))

    def _checked(self, name: str, tokens: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return the encodings, after a check that the tokens fit them. A parametrization is computed only once."""
        encodings = self.encodings
        layout = "(B, C) or (C,)" if 1 in dims else f"{'(B, N, C)' if self.batch_first else '(N, B, C)'} or (N, C)"
        check_features(name, tokens, layout, dims, encodings.shape[1], encodings)
        return encodings

    def _start(self, tokens: Tensor) -> int | Tensor:
        """Return the place where `forward` begins: a random place in training mode, else the place of the stream."""
        if self.training:
            return torch.randint(self.period, (), device=tokens.device)
        return self._fitting(self.position, self._batch(tokens))

    def _along(self, tokens: Tensor) -> int:
        return 1 if self.batch_first and tokens.dim() == 3 else 0

    def _batch(self, tokens: Tensor) -> int:
        return tokens.shape[1 - self._along(tokens)] if tokens.dim() == 3 else 1

    def _place(self, batch: int, absent: Tensor | None, tokens: Tensor) -> int | Tensor:
        """Return the place of the stream, or (B,) where rows may differ."""
        place = self.position
        if isinstance(place, int) and absent is None:
            return place
        return self._of_rows(self._fitting(place, batch), batch).to(tokens.device)

    def _fitting(self, place: int | Tensor, batch: int) -> int | Tensor:
        """Return a place. Raise if it belongs to another batch."""
        if isinstance(place, Tensor) and len(place) != batch:
            raise ValueError(
                mismatch("tokens", f"batch {batch}", f"batch {len(place)}, that of the stream; clean_state() ends it")
            )
        return place

    def _of_rows(self, place: int | Tensor, batch: int) -> Tensor:
        return (
            place
            if isinstance(place, Tensor)
            else torch.full((batch,), place, dtype=torch.int64, device=self.encodings.device)
        )

    def _added(self, tokens: Tensor, encodings: Tensor, start: int | Tensor, absent: Tensor | None = None) -> Tensor:
        if isinstance(start, Tensor) and start.dim():
            present = torch.ones(len(start), tokens.shape[self._along(tokens)], dtype=torch.int64, device=tokens.device)
            present = present if absent is None else present.masked_fill(absent, 0)
            added = encodings[(start[:, None].to(tokens.device) + present.cumsum(1) - present) % self.period]
            return tokens + (added[0] if tokens.dim() == 2 else added if self.batch_first else added.transpose(0, 1))
        places = torch.arange(tokens.shape[self._along(tokens)], device=tokens.device)
        added = encodings[(places + start) % self.period]
        return tokens + (added if self.batch_first or tokens.dim() == 2 else added.unsqueeze(1))

    def _move(self, place: int | Tensor, tokens: int, absent: Tensor | None, batch: int) -> None:
        self.__dict__["_rows"] = batch  # `clean_state` needs it, because a single place for all rows hides their number
        self.hold((place + (tokens if absent is None else (~absent).sum(1))) % self.period)

    def _entries(self, value: int | Tensor) -> dict[str, Tensor]:
        if isinstance(value, Tensor):
            return {"position": value.clone()}
        return {"position": torch.tensor(value, device="cpu")} if value else {}

    def _problem(self, prefix: str, entries: Mapping[str, Any]) -> str:
        entry = entries["position"]
        known = isinstance(entry, Tensor) and entry.dim() < 2 and entry.dtype == torch.int64
        if known and ((entry >= 0) & (entry < self.period)).all():
            return ""
        return mismatch(f"{prefix}position", repr(entry), f"an int64 tensor () or (B,) from 0 to {self.period - 1}")

    def _built(self, entries: Mapping[str, Tensor], device: torch.device | None) -> int | Tensor:
        self.__dict__["_rows"] = None
        place = entries["position"]
        return place.clone() if place.dim() else int(place)


def _waves(period: int, width: int) -> Tensor:
    """Return a float64 matrix (period, width) with alternating columns of sines and cosines.

    Each column has a whole number of periods. The matrix is always on the CPU, for two reasons: the
    default device may be meta, and all devices get the same bits.
    """
    pairs = (width + 1) // 2
    fastest = max(period // 2, 1)
    turns = [round(fastest ** (pair / max(pairs - 1, 1))) for pair in range(pairs)]
    place = torch.arange(period, dtype=torch.float64, device="cpu")[:, None]
    angles = place * torch.tensor(turns, dtype=torch.float64, device="cpu") * (2 * math.pi / period)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]
