"""The running state that a streaming module keeps between calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import AttentionState, empty_state
from ..attention.state import check_state
from ..checks import wrong
from ..dtypes import state_dtype


class AttentionStream(nn.Module):
    """Holds one `AttentionState` of H heads, L queries and width E, or none: a submodule of a module that streams.

    The state moves with the module between devices, and no cast touches its bits: `out` stays float32 after `.half()` or `.bfloat16()`. It
    is float64 in a float64 module. While there is a state, `state_dict` holds it as `out` (B, H, L, E) and `lse` (B, H, L); while there is
    none it holds neither, so that weights alone are a complete checkpoint. Loading one therefore ends the stream, and loading a saved
    stream continues it, to the same bits, whatever batch is held now. Entries of wrong shape or dtype, or with values that no set of keys
    has, are refused with an error that names them, and the state held stays.

    >>> stream = cmab_kernels.nn.AttentionStream(heads=2, latents=3, width=4)
    >>> stream.state is None, list(stream.state_dict())
    (True, [])
    >>> stream.state = stream.init_state(batch=1)
    >>> list(stream.half().state_dict()), stream.state.out.dtype
    (['out', 'lse'], torch.float32)
    """

    out: Tensor | None
    lse: Tensor | None
    weight_like: Tensor

    def __init__(
        self, heads: int, latents: int, width: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.shape = (heads, latents, width)
        # Not persistent: what is saved is written below. An element-free buffer follows the module's casts and moves, and tells of them.
        self.register_buffer("out", None, persistent=False)
        self.register_buffer("lse", None, persistent=False)
        self.register_buffer("weight_like", torch.empty(0, device=device, dtype=dtype), persistent=False)

    @property
    def state(self) -> AttentionState | None:
        """The state held, or None before the first input; assign one to continue from there, or None to start afresh.

        Assigning checks shapes, dtypes and device (`ValueError`, `TypeError`) and refuses a state with a gradient (`RuntimeError`): the
        chain of graphs would grow for as long as the stream runs.
        """
        return None if self.out is None or self.lse is None else AttentionState(self.out, self.lse)

    @state.setter
    def state(self, state: AttentionState | None) -> None:
        if state is None:
            self.out = self.lse = None
            return
        batch = state.lse.shape[0] if isinstance(state, AttentionState) and state.lse.dim() else 0
        check_state(state, (batch, *self.shape), self.state_dtype, self.weight_like.device)
        if state.out.requires_grad or state.lse.requires_grad:
            allowed = "a module's own stream holds no graph; run it under torch.no_grad(), or pass and keep the states yourself"
            raise RuntimeError(wrong("state", "requires a gradient", allowed))
        self.out, self.lse = state

    @property
    def state_dtype(self) -> torch.dtype:
        """float64 in a float64 module, else float32."""
        return state_dtype(self.weight_like.dtype)

    def init_state(self, batch: int) -> AttentionState:
        """The empty state of a batch, in the module's state dtype and on its device."""
        return empty_state(batch, *self.shape, dtype=self.state_dtype, device=self.weight_like.device)

    def _apply(self, fn: Callable, recurse: bool = True) -> AttentionStream:
        """Every cast and move of a module comes here; of the state, only the device may change."""
        state = self.state
        super()._apply(fn, recurse)
        if state is not None:
            self.out = state.out.to(self.weight_like.device, self.state_dtype)
            self.lse = state.lse.to(self.weight_like.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.state is not None:
            destination.update({prefix + name: tensor for name, tensor in self.state._asdict().items()})

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
        entries: dict[str, Any] = {prefix + name: state_dict.get(prefix + name) for name in AttentionState._fields}
        others = {name: entry for name, entry in state_dict.items() if name not in entries}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if all(entry is None for entry in entries.values()):
            self.state = None
            return
        problem = self._problem(entries)
        if problem:
            error_msgs.append(problem)
            return
        assign = local_metadata.get("assign_to_params_buffers", False)
        out, lse = (entries[prefix + name].detach() for name in AttentionState._fields)
        self.out, self.lse = (out, lse) if assign else (tensor.to(self.weight_like.device, copy=True) for tensor in (out, lse))

    def _problem(self, entries: Mapping[str, Any]) -> str:
        """Why the saved entries of `out` and `lse` are not a state of this module; "" when they are."""
        (out_name, out), (lse_name, lse) = entries.items()
        batch = out.shape[0] if isinstance(out, Tensor) and out.dim() else 0
        shape = (batch, *self.shape)
        for name, entry, wanted, dtype in ((out_name, out, shape, self.state_dtype), (lse_name, lse, shape[:-1], torch.float64)):
            if not isinstance(entry, Tensor) or entry.shape != wanted or entry.dtype != dtype:
                given = f"is {entry.dtype} {tuple(entry.shape)}" if isinstance(entry, Tensor) else f"is {entry!r}"
                return wrong(name, given, f"{dtype} (B, {', '.join(map(str, wanted[1:]))}) is needed, with one B for out and lse")
        if not out.isfinite().all():
            return wrong(out_name, "holds a NaN or an infinity", "every element must be finite")
        if (lse.isnan() | (lse == torch.inf)).any():
            return wrong(lse_name, "holds a NaN or +inf", "every element must be finite, or -inf where no key was seen")
        if (out[lse == -torch.inf] != 0).any():
            return wrong(out_name, f"is not 0 where {lse_name} is -inf", "a row that saw no key is 0")
        return ""
