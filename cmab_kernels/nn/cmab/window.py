"""The stream of a block that reads a sliding window."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...attention import AttentionState
from ...runtime.checks import check_count
from ...window import StateWindow
from ..constructors import naming_options
from ..stream import AttentionStream, Part, extent


class WindowStream(AttentionStream):
    """A submodule that holds a `StateWindow` of `AttentionState`s with H heads, L queries and width E, or None.

    It works like `AttentionStream`. `state` is the merge of the states that the window holds.
    Assigning a state starts a new window that holds this state as one chunk. If there is a window,
    `state_dict` contains what `StateWindow.state_dict` returns: `out` (n, B, H, L, E) and `lse` (n,
    B, H, L), with K before B for stacked blocks, and the ints `front` and `size`. Loading refuses a
    window of another size.

    >>> stream = cmab_kernels.nn.WindowStream(window=5, heads=2, latents=3, width=4)
    >>> stream.state = stream.init_state(batch=1)
    >>> list(stream.state_dict()), stream.state_dict()["out"].shape
    (['out', 'lse', 'front', 'size'], torch.Size([1, 1, 2, 3, 4]))
    """

    fields = (*AttentionState._fields, "front", "size")

    @naming_options
    def __init__(
        self,
        window: int,
        heads: int,
        latents: int,
        width: int,
        *,
        blocks: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        window = check_count("window", window)
        super().__init__(heads, latents, width, blocks=blocks, device=device, dtype=dtype)
        self.window = window

    def pushed(self, state: AttentionState) -> Any:
        """Return the window that holds the state of a further chunk, for `hold`. The window held now does not
        change."""
        self._check(state)
        self._refuse_graph(state)
        if self.held is None:
            return self._taken(state)
        window: Any = copy.copy(self.held)
        window.push(state)
        return window

    def _given(self, value: Any) -> AttentionState:
        state: AttentionState = value.state
        return state

    def _taken(self, state: AttentionState) -> Any:
        window: StateWindow[AttentionState] = StateWindow(self.window)
        window.push(state)
        return window

    def _tensors(self, value: Any) -> Iterable[Any]:
        return [part for state in value.parts() for part in state]

    def _entries(self, value: Any) -> dict[str, Tensor]:
        entries: dict[str, Tensor] = value.state_dict()
        return entries

    @property
    def _before_batch(self) -> int:
        return super()._before_batch + 1

    def _parts(self, entries: Mapping[str, Any]) -> dict[str, Part]:
        shape = (extent(entries, "out", 0), *self.lead, extent(entries, "out", self._before_batch), *self.shape)
        ints = dict.fromkeys(("front", "size"), Part((), torch.int64))
        return {"out": Part(shape, self.state_dtype), "lse": Part(shape[:-1], torch.float64), **ints}

    def _unlikely(self, prefix: str, entries: Mapping[str, Tensor]) -> str:
        try:
            StateWindow(self.window).load_state_dict(entries, prefix)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    def _built(self, entries: Mapping[str, Tensor], device: torch.device | None) -> Any:
        window: StateWindow[AttentionState] = StateWindow(self.window)
        window.restore({name: entry.to(device) if entry.dim() else entry for name, entry in entries.items()})
        return window


def own_stream(window: int | None, *sizes: int, **options: Any) -> AttentionStream:
    """Return the stream of a block or stack: a `WindowStream` unless `window` is None."""
    return AttentionStream(*sizes, **options) if window is None else WindowStream(window, *sizes, **options)
