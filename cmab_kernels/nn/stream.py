"""The running state that a streaming module keeps between calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..attention import AttentionState, empty_state
from ..attention.state import check_state
from ..checks import wrong
from ..dtypes import state_dtype
from ..intention import RidgeState, empty_ridge
from ..intention.state import check_ridge

State = TypeVar("State", bound=AttentionState | RidgeState)


class Part(NamedTuple):
    """What a tensor of a state must be: the extents that follow the batch, and the dtype."""

    extents: tuple[int, ...]
    dtype: torch.dtype


class Stream(nn.Module, Generic[State]):
    """Holds one state, or none: what is common to the streams below, which say what their states look like."""

    state_type: ClassVar[type]
    weight_like: Tensor

    def __init__(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        # Not persistent: what is saved is written below. An element-free buffer follows the module's casts and moves, and tells of them.
        for name in self._fields:
            self.register_buffer(name, None, persistent=False)
        self.register_buffer("weight_like", torch.empty(0, device=device, dtype=dtype), persistent=False)

    @property
    def state(self) -> State | None:
        """The state held, or None before the first input; assign one to continue from there, or None to start afresh.

        Assigning checks shapes, dtypes and device (`ValueError`, `TypeError`) and refuses a state with a gradient (`RuntimeError`): the
        chain of graphs would grow for as long as the stream runs.
        """
        tensors = [getattr(self, name) for name in self._fields]
        return None if tensors[0] is None else self.state_type(*tensors)

    @state.setter
    def state(self, state: State | None) -> None:
        if state is not None:
            self._check(state)
            if any(tensor.requires_grad for tensor in state):
                allowed = "a module's own stream holds no graph; run it under torch.no_grad(), or pass and keep the states yourself"
                raise RuntimeError(wrong("state", "requires a gradient", allowed))
        self._hold(state or [None] * len(self._fields))

    @abstractmethod
    def init_state(self, batch: int) -> State:
        """The empty state of a batch, in the module's state dtype and on its device."""

    @abstractmethod
    def _parts(self) -> dict[str, Part]:
        """What each field of a state of this module must be."""

    @abstractmethod
    def _check(self, state: State) -> None:
        """Raise unless `state` fits this module, at any batch."""

    @abstractmethod
    def _unlikely(self, names: Sequence[str], state: State) -> str:
        """Why no set of inputs leaves these values behind, with the `names` of the fields; "" where one may."""

    @property
    def _fields(self) -> tuple[str, ...]:
        return self.state_type._fields  # type: ignore[attr-defined]

    def _hold(self, tensors: Sequence[Tensor | None]) -> None:
        for name, tensor in zip(self._fields, tensors, strict=True):
            setattr(self, name, tensor)

    def _apply(self, fn: Callable, recurse: bool = True) -> Stream:
        """Every cast and move of a module comes here; of the state, only the device may change."""
        state = self.state
        super()._apply(fn, recurse)
        if state is not None:
            dtypes = [part.dtype for part in self._parts().values()]
            self._hold([tensor.to(self.weight_like.device, dtype) for tensor, dtype in zip(state, dtypes, strict=True)])
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
        entries: dict[str, Any] = {prefix + name: state_dict.get(prefix + name) for name in self._fields}
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
        tensors = [entry.detach() for entry in entries.values()]
        self._hold(tensors if assign else [tensor.to(self.weight_like.device, copy=True) for tensor in tensors])

    def _problem(self, entries: Mapping[str, Any]) -> str:
        """Why the saved entries are not a state of this module; "" when they are."""
        first = next(iter(entries.values()))
        batch = first.shape[0] if isinstance(first, Tensor) and first.dim() else 0
        for (name, entry), part in zip(entries.items(), self._parts().values(), strict=True):
            if not isinstance(entry, Tensor) or list(entry.shape) != [batch, *part.extents] or entry.dtype != part.dtype:
                given = f"is {entry.dtype} {tuple(entry.shape)}" if isinstance(entry, Tensor) else f"is {entry!r}"
                shape = ", ".join(map(str, ("B", *part.extents)))
                return wrong(name, given, f"{part.dtype} ({shape}) is needed, with one B for {', '.join(self._fields)}")
        return self._unlikely(list(entries), self.state_type(*entries.values()))


class AttentionStream(Stream[AttentionState]):
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

    state_type = AttentionState

    def __init__(
        self, heads: int, latents: int, width: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        self.shape = (heads, latents, width)

    @property
    def state_dtype(self) -> torch.dtype:
        """float64 in a float64 module, else float32."""
        return state_dtype(self.weight_like.dtype)

    def init_state(self, batch: int) -> AttentionState:
        return empty_state(batch, *self.shape, dtype=self.state_dtype, device=self.weight_like.device)

    def _parts(self) -> dict[str, Part]:
        return {"out": Part(self.shape, self.state_dtype), "lse": Part(self.shape[:-1], torch.float64)}

    def _check(self, state: AttentionState) -> None:
        batch = state.lse.shape[0] if isinstance(state, AttentionState) and state.lse.dim() else 0
        check_state(state, (batch, *self.shape), self.state_dtype, self.weight_like.device)

    def _unlikely(self, names: Sequence[str], state: AttentionState) -> str:
        out_name, lse_name = names
        out, lse = state
        if not out.isfinite().all():
            return wrong(out_name, "holds a NaN or an infinity", "every element must be finite")
        if (lse.isnan() | (lse == torch.inf)).any():
            return wrong(lse_name, "holds a NaN or +inf", "every element must be finite, or -inf where no key was seen")
        if (out[lse == -torch.inf] != 0).any():
            return wrong(out_name, f"is not 0 where {lse_name} is -inf", "a row that saw no key is 0")
        return ""


class RidgeStream(Stream[RidgeState]):
    """Holds one `RidgeState` of H heads, keys of width D and values of width E, or none: as `AttentionStream` holds its state.

    `gram` (B, H, D, D) and `moment` (B, H, D, E) are float64 and `count` (B, H) int64 in a module of any dtype. Loading refuses what no
    set of keys leaves behind: a NaN or an infinity, a gram that is not symmetric (beyond rounding), a negative count, sums of no keys that
    are not 0.

    >>> stream = cmab_kernels.nn.RidgeStream(heads=2, width=4, value_width=3)
    >>> stream.state = stream.init_state(batch=1)
    >>> list(stream.half().state_dict()), stream.state.gram.dtype
    (['gram', 'moment', 'count'], torch.float64)
    """

    state_type = RidgeState

    def __init__(
        self, heads: int, width: int, value_width: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        self.shape = (heads, width, value_width)

    def init_state(self, batch: int) -> RidgeState:
        return empty_ridge(batch, *self.shape, device=self.weight_like.device)

    def _parts(self) -> dict[str, Part]:
        heads, width, _ = self.shape
        return {
            "gram": Part((heads, width, width), torch.float64),
            "moment": Part(self.shape, torch.float64),
            "count": Part((heads,), torch.int64),
        }

    def _check(self, state: RidgeState) -> None:
        batch = state.count.shape[0] if isinstance(state, RidgeState) and state.count.dim() else 0
        check_ridge(state, (batch, *self.shape), self.weight_like.device)

    def _unlikely(self, names: Sequence[str], state: RidgeState) -> str:
        gram_name, _, count_name = names
        for name, sums in zip(names, state[:2], strict=False):
            if not sums.isfinite().all():
                return wrong(name, "holds a NaN or an infinity", "every element must be finite")
            if sums[state.count == 0].any():
                return wrong(name, f"is not 0 where {count_name} is 0", "the sums of no keys are 0")
        if (state.count < 0).any():
            return wrong(count_name, "has a negative element", "every element must be >= 0")
        rounding = 1e-9 * state.gram.abs().amax((-2, -1), keepdim=True)
        if ((state.gram - state.gram.mT).abs() > rounding).any():
            return wrong(gram_name, "is not symmetric", "a sum of products k'k is")
        return ""  # a gram that is not positive may be what a removal left, to rounding: a solve tells
