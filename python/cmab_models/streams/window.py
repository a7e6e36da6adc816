"""The window of tokens that layers read at every step, as a module that saves, loads, moves and casts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cmab_kernels.nn import RecentStream
from cmab_kernels.nn.stream import Part, extent


class TokenWindow(RecentStream):
    """Holds the newest tokens of streams, 1 to n of them, or None. `state_dict` holds them as `tokens` (B, p, dim),
    oldest first."""

    def _parts(self, entries: Mapping[str, Any]) -> dict[str, Part]:
        window, width = self.shape
        tokens = min(max(extent(entries, "tokens", 1), 1), window)
        return {"tokens": Part((extent(entries, "tokens", 0), tokens, width), self.weight_like.dtype)}
