"""A batch of streams that begin and end independently: each row has its own tokens, and a step may have no token for a
row."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nystrom import ContinualAttentionState, ContinualNystromState, with_sums
from ...runtime.checks import check_dense, kind_of, mismatch
from .window import FillingWindow, StaggeredWindow, WindowState

Rows = int | Sequence[int] | Tensor
"""The values that `clean_state` takes for some rows of a batch: an index, several indices, or a bool tensor (B,)."""

MASK = "torch.bool, True where a stream has no token"


def rows_of(rows: Any, batch: int, device: torch.device) -> Tensor:
    """Return `rows` as a bool mask (B,). Raise unless all of them are rows of the batch."""
    allowed = f"a row from 0 to {batch - 1}, several, or a bool tensor ({batch},)"
    if isinstance(rows, Tensor):
        check_dense("rows", rows)
        if rows.is_meta:
            raise ValueError(mismatch("rows", "a tensor on the meta device", f"{allowed} with values"))
        if rows.dtype == torch.bool and rows.shape == (batch,):
            return rows.to(device)
        if rows.dtype != torch.int64 or rows.dim() > 1:
            raise ValueError(mismatch("rows", f"{rows.dtype} {tuple(rows.shape)}", allowed))
    if isinstance(rows, Tensor):
        given = rows.flatten().tolist()
    else:
        given = list(rows) if isinstance(rows, (list, tuple, range)) else [rows]
    for row in given:
        if not isinstance(row, Integral) or isinstance(row, bool):
            raise TypeError(mismatch("rows", kind_of(row), allowed))
        if not 0 <= int(row) < batch:
            raise ValueError(mismatch("rows", row, allowed))
    mask = torch.zeros(batch, dtype=torch.bool, device=device)
    mask[torch.tensor(list(map(int, given)), dtype=torch.int64, device=device)] = True
    return mask


def absent_of(mask: Any, tokens: Tensor, batch_first: bool, one: bool = False) -> Tensor | None:
    """Return a `key_padding_mask` as (B, T), for tokens in the layout of a module, or for `one` token; None for
    None."""
    if mask is None:
        return None
    batched = tokens.dim() == (2 if one else 3)
    batch = tokens.shape[0 if one or batch_first else 1] if batched else 1
    count = 1 if one else tokens.shape[1 if batched and batch_first else 0]
    if not isinstance(mask, Tensor):
        raise TypeError(mismatch("key_padding_mask", kind_of(mask), f"{MASK}, or None"))
    check_dense("key_padding_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(mismatch("key_padding_mask", mask.dtype, MASK))
    short = (batch,) if one else None if batched else (count,)
    if mask.shape not in ((batch, count), short):
        allowed = f"(B, {'1) or (B,' if one else 'T'}) = ({batch}, {count}), for these tokens"
        raise ValueError(mismatch("key_padding_mask", f"shape {tuple(mask.shape)}", allowed))
    if mask.device != tokens.device:
        raise ValueError(
            mismatch("key_padding_mask", f"device {mask.device}", f"{tokens.device}, the device of the tokens")
        )
    if mask.is_meta:
        allowed = "a mask that has values; a step with a mask computes only the rows that have a token"
        raise ValueError(mismatch("key_padding_mask", "a mask on the meta device", allowed))
    return mask.reshape(batch, count)


def staggered(module: Any, state: WindowState | None, batch: int) -> StaggeredWindow:
    """Return the state of a module's stream in the form in which each row has its own number of tokens."""
    n = module.sequence_len
    if type(state) is StaggeredWindow:
        return state
    if state is None or type(state) is FillingWindow:
        held = 0 if state is None else state.queries.shape[2]
        none = module._like.new_zeros(batch, module.num_heads, 0, module.head_dim)
        window = module._init(*(F.pad(tokens, (0, 0, 0, n - held)) for tokens in state or (none, none, none)))
    else:
        held, window = n, state
    return StaggeredWindow(torch.full((batch,), held, dtype=torch.int64, device=window.position.device), window)


@torch.no_grad()
def cleaned(module: Any, state: WindowState, rows: Any) -> WindowState:
    """Return a state in which some rows of the batch restart.

    Fixed landmarks are parameters: without `no_grad` their graph would enter the stream.
    """
    batch = state.keys.shape[0]
    gone = rows_of(rows, batch, state.keys.device)
    if not (gone.is_meta or gone.any()):
        return state
    tokens, window = staggered(module, state, batch)
    # The tokens of such a row stay in memory until others replace them, and are never read. A state of operators has
    # only full windows.
    position = window.position.masked_fill(gone[:, None], module.sequence_len)
    return StaggeredWindow(tokens.masked_fill(gone, 0), window._replace(position=position))


def ready_rows(state: WindowState | None, window: int) -> Tensor | None:
    """Return a bool mask (B,) of the rows with a full window; None before the first token, when the
    batch size is unknown."""
    if state is None:
        return None
    if type(state) is StaggeredWindow:
        return state.tokens == window
    filled = type(state) is not FillingWindow
    return torch.full((state.keys.shape[0],), filled, device=state.keys.device)


def windows_without(recent: Tensor, absent: Tensor) -> Tensor:
    """Return the windows (B, T, n, C) after each of T >= 1 tokens. Rows lack the tokens that are `absent` (B, T).

    `recent` (B, n + T, C) has the window before, and then the tokens.
    """
    count = absent.shape[1]
    window = recent[:, : recent.shape[1] - count]
    windows = []
    for token, gone in zip(recent[:, -count:].split(1, 1), absent.unbind(1), strict=True):
        window = window.where(gone[:, None, None], torch.cat([window[:, 1:], token], 1))
        windows.append(window)
    return torch.stack(windows, 1)


def walked(
    module: Any, state: WindowState | None, heads: tuple[Tensor, ...], absent: Tensor | None
) -> tuple[WindowState, list[Tensor]]:
    """Return the state after T >= 1 tokens (B, H, T, *), and the outputs (B, H, *, E) after each.

    `absent` (B, T) is True where a row has no token; None means that all rows have all tokens. Outputs of a row without
    a token, or without a full window, are NaN.
    """
    outs: list[Tensor] = []
    if type(state) is StaggeredWindow or state is None or type(state) is FillingWindow:
        if absent is not None:  # a window that is not full yet is read, so the entries without a token must be finite
            heads = tuple(head.masked_fill(absent[:, None, :, None], 0.0) for head in heads)
        state = staggered(module, state, heads[0].shape[0])
    for t in range(heads[0].shape[2]):
        query, key, value = (head[:, :, t : t + 1] for head in heads)
        gone = None if absent is None else absent[:, t]
        if type(state) is StaggeredWindow:
            out, state = _one(module, state, query, key, value, gone)
        else:
            out, state = module._step(state, query, key, value, gone)
        outs.append(out)
    return state, outs


def _one(
    module: Any, state: StaggeredWindow, query: Tensor, key: Tensor, value: Tensor, absent: Tensor | None
) -> tuple[Tensor, WindowState]:
    """Return (out, state) after one token of each row that is not absent."""
    if state.tokens.is_meta:
        allowed = "values; the rows of this batch began at different steps, and their numbers of tokens are read"
        raise ValueError(mismatch("state", "a state on the meta device", allowed))
    n, heads = module.sequence_len, (query, key, value)
    filling = state.tokens < n
    out, window = module._step(state.window, *heads, filling if absent is None else filling | absent)
    rows = (filling if absent is None else filling & ~absent).nonzero().flatten()
    tokens = state.tokens.index_add(0, rows, torch.ones_like(rows))
    # Writing is safe: no other state reads these rows of the rings that the step returned.
    with _writing(window.keys):
        for ring, head in zip((window.queries, window.keys, window.values), heads, strict=True):
            ring[rows, :, state.tokens[rows]] = head[rows, :, 0]
    full = rows[tokens[rows] == n]
    if full.numel():
        first = tuple(ring[full, :, :n] for ring in (window.queries, window.keys, window.values))
        out = out.index_copy(0, full, module._whole(*first))
        window = _with_first_windows(window, full, module._init(*first))
    return out, StaggeredWindow(tokens, window) if (tokens < n).any() else window


def _writing(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the tensor may be written to. A tensor of inference mode is
    writable only in that mode."""
    return torch.inference_mode() if tensor.is_inference() else nullcontext()


def _with_first_windows(
    window: ContinualNystromState | ContinualAttentionState, rows: Tensor, first: Any
) -> ContinualNystromState | ContinualAttentionState:
    """Return the state of a batch in which `rows` have just filled their first windows. Their
    tokens are already in the rings of the batch."""
    if window.sums.shape[2]:
        with _writing(window.sums):
            window.sums[rows] = with_sums(first).sums
    if isinstance(window, ContinualAttentionState):
        return window
    landmarks: Any = {name: getattr(window, name).index_copy(0, rows, getattr(first, name)) for name in LANDMARKS}
    return window._replace(**landmarks)


LANDMARKS = ("landmark_queries", "landmark_keys", "inverse")
"""The fields of a state that belong to its landmarks."""
