"""The running state that a streaming module keeps between calls: how it is held, moved, saved and loaded."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..attention import AttentionState, check_state, empty_state, unlikely_attention
from ..intention import RidgeState, check_ridge, empty_ridge, unlikely_ridge
from ..runtime.checks import check_count, is_dense, kind_of, mismatch
from ..runtime.dtypes import state_dtype
from ..runtime.tracing import is_observed, is_recorded, is_transformed
from .constructors import naming_options

M = TypeVar("M", bound=nn.Module)
Value = TypeVar("Value")
State = TypeVar("State", bound=tuple)


class Keeper(nn.Module, Generic[Value]):
    """Holds a value or None, and saves it in the `state_dict`. A loaded value replaces it only if the whole load
    succeeds.

    `torch.nn.Module.load_state_dict` visits one module after the other, collects their errors in one list, and raises
    at the end if the list has entries. Unexpected and missing keys under `strict=True` enter the list only at the end.
    This module therefore keeps a loaded value together with the list. The loaded value takes effect at its first use
    after the load, if the list is still empty.
    """

    fields: ClassVar[tuple[str, ...]]
    """The names of all `state_dict` entries in which a value may be saved."""

    def __init__(self) -> None:
        super().__init__()
        self._value: Value | None = None
        self._loaded: tuple[Value | None, list[str]] | None = None

    @property
    def held(self) -> Value | None:
        """The value itself, or None. If nothing else refers to it, a step may reuse the memory of its tensors."""
        if self._loaded is None:
            return self._value
        value, errors = self._loaded
        return self._value if errors else value

    def hold(self, value: Value | None) -> None:
        """Replace the value, without checks."""
        if self._loaded is not None:
            self._loaded = None
        self._value = value

    def __getattr__(self, name: str) -> Any:
        """Return an entry of the `state_dict` by its name; torch.distributed.checkpoint looks up all entries."""
        if name in type(self).fields and "_value" in self.__dict__:
            held = self.held
            entries = {} if held is None else self._entries(held)
            if name in entries:
                return entries[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise an error for an assignment to an entry of the `state_dict`. `torch.func.functional_call` would set the
        entry, but no code would read it."""
        if isinstance(value, Tensor) and name in type(self).fields:
            allowed = (
                "a whole state; torch.func.functional_call takes parameters and buffers, not the entries of a stream"
            )
            raise TypeError(mismatch(name, "a tensor for this single entry", allowed))
        super().__setattr__(name, value)

    @abstractmethod
    def _entries(self, value: Value) -> dict[str, Tensor]:
        """Return the `state_dict` entries of a value, named as in `fields`. Later steps do not change their tensors."""

    @abstractmethod
    def _problem(self, prefix: str, entries: Mapping[str, Any]) -> str:
        """Return why loaded entries cannot be a value of this module, or "" if they can."""

    @abstractmethod
    def _built(self, entries: Mapping[str, Tensor], device: torch.device | None) -> Value:
        """Return a value made from entries that passed `_problem`, in new memory on a device.

        A device of None means the device of the entries.
        """

    @property
    def _loading_device(self) -> torch.device | None:
        """The device on which to build a loaded value; None means the device of its entries."""
        return None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        held = self.held
        if held is not None:
            destination.update({prefix + name: entry for name, entry in self._entries(held).items()})

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
        entries = {name: state_dict[prefix + name] for name in self.fields if prefix + name in state_dict}
        others = {name: entry for name, entry in state_dict.items() if name.removeprefix(prefix) not in entries}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        problem = _not_plain(prefix, entries) or (self._problem(prefix, entries) if entries else "")
        if problem:
            error_msgs.append(problem)
        else:
            # The lists are equal only if the model contains this module twice.
            if self._loaded is None or self._loaded[1] is not error_msgs:
                self.hold(self.held)
            self._loaded = (self._built(entries, self._loading_device) if entries else None, error_msgs)


def _not_plain(prefix: str, entries: Mapping[str, Any]) -> str:
    """Return why an entry cannot be copied like a tensor of torch, or "" if all can."""
    for name, entry in entries.items():
        if not isinstance(entry, Tensor):
            continue
        if not is_dense(entry) or entry.is_quantized:
            return mismatch(prefix + name, f"a tensor of layout {entry.layout}, {kind_of(entry)}", "a dense tensor")
        if type(entry) not in (Tensor, nn.Parameter) and not torch.compiler.is_compiling():
            return mismatch(prefix + name, kind_of(entry), "a torch.Tensor; tensor.as_subclass(torch.Tensor) makes one")
    return ""


class Part(NamedTuple):
    """The shape and dtype that a saved tensor must have."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Stream(Keeper[State]):
    """A submodule that holds the state of a streaming module, or None.

    The state moves with the module between devices. If there is a state, its tensors are entries of the `state_dict`.
    Without a state there are no entries, so that weights alone are a complete checkpoint. A successful
    `load_state_dict` restores the saved stream, whatever batch was held before, and the stream continues with the same
    bits. A `state_dict` without a stream ends the stream, also with `strict=False`. A `load_state_dict` that raises,
    for any module of the model, leaves the stream unchanged. (The weights may change: torch copies the weights that fit
    before it raises.) Entries of wrong shape or dtype, or with values that no stream can have, raise an error that
    names them.
    """

    weight_like: Tensor
    """An empty buffer that has the dtype and device of the module's weights after every cast, move and load."""
    lead: tuple[int, ...] = ()
    """The dimensions of a state that come before the batch dimension."""

    def __init__(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.register_buffer("weight_like", torch.empty(0, device=device, dtype=dtype), persistent=False)

    def __copy__(self) -> Stream:
        """Return an independent stream that continues from the same state.

        A step may write to the memory of a state that only one stream holds. So the copy needs its own state.
        """
        return copy.deepcopy(self)

    @property
    def state(self) -> State | None:
        """The state, or None before the first input. Later steps do not change the state that this property returns.

        Assign a state to continue from it, or None to start again. A state that does not fit the module raises a
        `ValueError` or `TypeError`. A state that requires a gradient raises a `RuntimeError`, because its autograd
        graph would grow with every step.
        """
        held = self.held
        return None if held is None else self._given(held)

    @state.setter
    def state(self, state: State | None) -> None:
        if state is not None:
            self._check(state)
            self._refuse_graph(state)
        self.hold(None if state is None else self._taken(state))

    def hold(self, value: State | None) -> None:
        """Replace the value. Raise for tensors that belong to a transform or a mode, because they would outlive it."""
        if value is not None and is_observed() and not torch.compiler.is_compiling():
            is_real = not hasattr(self.weight_like, "fake_mode")
            for field in self._tensors(value):
                if isinstance(field, Tensor) and (is_transformed(field) or (is_real and hasattr(field, "fake_mode"))):
                    what = (
                        "it would hold tensors that belong to a transform of torch.func, forward mode or FakeTensorMode"
                    )
                    raise RuntimeError(f"stream: {what}; pass the states yourself, or call the module outside")
        super().hold(value)

    def started(self, state: State | None) -> State:
        """Return `state`, or the held state if `state` is None. Raise `RuntimeError` if both are None."""
        state = self.held if state is None else state
        if state is None:
            raise RuntimeError(
                "state: it is None, and the module's own stream has seen nothing; update it first, or pass a state"
            )
        return state

    @property
    def _loading_device(self) -> torch.device | None:
        """The device of the weights, or None for the meta device.

        After a load with `assign=True`, weights are no longer on the meta device.
        """
        return None if self.weight_like.is_meta else self.weight_like.device

    def follow(self, weight: Tensor) -> None:
        """Take the dtype and device of `weight`. Loading with `assign=True` replaces a module's weights, but not this
        buffer."""
        self.weight_like = torch.empty(0, dtype=weight.dtype, device=weight.device)

    @abstractmethod
    def _check(self, state: State) -> None:
        """Raise unless `state` has the type, shapes, dtypes and device of this module. Any batch size is valid."""

    def _refuse_graph(self, state: State) -> None:
        """Raise if a state requires a gradient."""
        if any(isinstance(field, Tensor) and field.requires_grad for field in _leaves(state)):
            what, advice = (
                "it requires a gradient, and a module's own stream holds no graph",
                "or pass and keep the states yourself",
            )
            raise RuntimeError(f"state: {what}; run the module under torch.no_grad(), {advice}")

    def _taken(self, state: State) -> State:
        """Return the value to hold after `state` was assigned. By default this is `state` itself."""
        return state

    def _given(self, value: State) -> State:
        """Return the state for a value that is held. By default these are new references to the tensors: while they
        exist, steps write elsewhere."""
        return _again(value)

    def _tensors(self, value: State) -> Iterable[Any]:
        """Return all tensors of a value; the result may contain other objects too."""
        return _leaves(value)

    @property
    def _before_batch(self) -> int:
        """The number of dimensions of an entry that come before the batch dimension."""
        return len(self.lead)

    @abstractmethod
    def _parts(self, entries: Mapping[str, Any]) -> dict[str, Part]:
        """Return the shape and dtype that each entry must have, for the batch size that the entries show."""

    @abstractmethod
    def _unlikely(self, prefix: str, entries: Mapping[str, Tensor]) -> str:
        """Return why no stream can have entries with these values, or "" if a stream can."""

    def _problem(self, prefix: str, entries: Mapping[str, Any]) -> str:
        parts = self._parts(entries)
        for name, (shape, dtype) in parts.items():
            entry = entries.get(name)
            if not isinstance(entry, Tensor) or entry.shape != shape or entry.dtype != dtype:
                given = f"{entry.dtype} {tuple(entry.shape)}" if isinstance(entry, Tensor) else repr(entry)
                lead = self._before_batch
                shown = (*shape[:lead], "B", *shape[lead + 1 :]) if shape else ()
                allowed = f"{dtype} ({', '.join(map(str, shown))}), with one B for all entries"
                return mismatch(prefix + name, given, allowed)
            if entry.is_meta:
                return mismatch(prefix + name, "device meta", "a tensor with values")
        return self._unlikely(prefix, entries)

    def _cast(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries in the dtypes that the module needs."""
        parts = self._parts(entries)
        return {name: entry.to(parts[name].dtype) for name, entry in entries.items()}

    def _apply(self, fn: Callable, recurse: bool = True) -> Stream:
        """Cast or move the state too. torch calls this method for every cast and move of a module."""
        before = self.weight_like
        super()._apply(fn, recurse)
        cast = before.dtype != self.weight_like.dtype
        held = self.held
        # After `to_empty` the state has no values, so the stream ends.
        if before.is_meta and not self.weight_like.is_meta:
            self.hold(None)
        elif held is not None and (cast or before.device != self.weight_like.device):
            entries = self._entries(held)
            self.hold(self._built(self._cast(entries) if cast else entries, self.weight_like.device))
        return self


def _again(state: Any) -> Any:
    """Return a new state object with the same tensors. A field of the state may be a state too."""
    return type(state)(*(_again(field) if isinstance(field, tuple) else field for field in state))


def _leaves(state: Any) -> Iterator[Any]:
    for field in state:
        yield from _leaves(field) if isinstance(field, tuple) else (field,)


def refuse_to_record(method: str, instead: str) -> None:
    """Raise an error if a call that advances a module's own stream is recorded, because each run of the recording would
    start from the same state."""
    if is_recorded():
        what = (
            "torch.export, torch.jit.trace or make_fx records it, which would freeze the stream that the module holds"
        )
        raise RuntimeError(f"{method}: {what}; record {instead}, with the state among its inputs and outputs")


def with_own_streams(module: M) -> M:
    """Return a shallow copy of a module with independent streams that continue from the same states.

    Classes use this function as their `__copy__`.
    """
    if isinstance(module, Keeper):
        return copy.copy(module)
    made: M = object.__new__(type(module))
    parts = {
        name: with_own_streams(part) if part is not None and _keeps(part) else part
        for name, part in module._modules.items()
    }
    made.__dict__ = {**module.__dict__, "_modules": parts}
    return made


def _keeps(module: nn.Module) -> bool:
    return any(isinstance(part, Keeper) for part in module.modules())


def follow_weights(module: nn.Module, _: Any = None) -> None:
    """Let the submodule `stream` follow the module's weights. Modules register this function as a hook that runs after
    a load."""
    stream = module.stream
    assert isinstance(stream, Stream)
    # A frozen module has only buffers, and the stream's buffer is the last of them.
    stream.follow(next(chain(module.parameters(), module.buffers())))


class AttentionStream(Stream[AttentionState]):
    """A submodule that holds one `AttentionState` of H heads, L queries and width E, or None.

    With `blocks` K, the state is that of K stacked blocks. The state moves with the module between devices. A cast of
    the module does not change the bits of the state: `out` stays float32 after `.half()` or `.bfloat16()`. `out` is
    float64 in a float64 module. If there is a state, `state_dict` contains it as `out` (B, H, L, E) and `lse` (B, H,
    L), with a leading K for stacked blocks. See `Stream` for the rules of loading. Loading raises an error for a NaN or
    +inf in `lse`. It also raises an error for a NaN or an infinity in `out`, except in rows where `lse` is -inf. Such a
    row of `out` has no effect, and loading sets it to 0.

    >>> stream = cmab_kernels.nn.AttentionStream(heads=2, latents=3, width=4)
    >>> stream.state is None, list(stream.state_dict())
    (True, [])
    >>> stream.state = stream.init_state(batch=1)
    >>> list(stream.half().state_dict()), stream.state.out.dtype
    (['out', 'lse'], torch.float32)
    """

    fields: ClassVar[tuple[str, ...]] = AttentionState._fields

    @naming_options
    def __init__(
        self,
        heads: int,
        latents: int,
        width: int,
        *,
        blocks: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        self.shape = check_count("heads", heads), check_count("latents", latents, least=0), check_count("width", width)
        self.lead = () if blocks is None else (check_count("blocks", blocks),)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of `out`: float64 in a float64 module, else float32."""
        return state_dtype(self.weight_like.dtype)

    def init_state(self, batch: int) -> AttentionState:
        """Return the state of no keys for a batch, in the module's state dtype and on its device."""
        state = empty_state(batch, *self.shape, dtype=self.state_dtype, device=self.weight_like.device)
        return AttentionState(*(part.repeat(*self.lead, *(1 for _ in part.shape)) for part in state))

    def _check(self, state: AttentionState) -> None:
        lead = len(self.lead)
        known = isinstance(state, AttentionState) and isinstance(state.out, Tensor) and state.out.dim() > lead
        batch = state.out.shape[lead] if known else 0
        check_state(state, (*self.lead, batch, *self.shape), self.state_dtype, self.weight_like.device)

    def _entries(self, value: AttentionState) -> dict[str, Tensor]:
        return value._asdict()

    def _parts(self, entries: Mapping[str, Any]) -> dict[str, Part]:
        shape = (*self.lead, extent(entries, "out", len(self.lead)), *self.shape)
        return {"out": Part(shape, self.state_dtype), "lse": Part(shape[:-1], torch.float64)}

    def _unlikely(self, prefix: str, entries: Mapping[str, Tensor]) -> str:
        return unlikely_attention(prefix, entries)

    def _built(self, entries: Mapping[str, Tensor], device: torch.device | None) -> AttentionState:
        state = AttentionState(**copied(entries, device))
        return state._replace(out=state.out.masked_fill((state.lse == -torch.inf).unsqueeze(-1), 0.0))


class RidgeStream(Stream[RidgeState]):
    """A submodule that holds one `RidgeState` of H heads, keys of width D and values of width E, or None.

    It works like `AttentionStream`. `gram` (B, H, D, D) and `moment` (B, H, D, E) are float64 and `count` (B, H) is
    int64 in a module of any dtype. Loading raises an error for a NaN or an infinity, a gram that is not symmetric up to
    rounding, a negative count, and sums that are not 0 where the count is 0.

    >>> stream = cmab_kernels.nn.RidgeStream(heads=2, width=4, value_width=3)
    >>> stream.state = stream.init_state(batch=1)
    >>> list(stream.half().state_dict()), stream.state.gram.dtype
    (['gram', 'moment', 'count'], torch.float64)
    """

    fields = RidgeState._fields

    @naming_options
    def __init__(
        self,
        heads: int,
        width: int,
        value_width: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        self.shape = check_count("heads", heads), check_count("width", width), check_count("value_width", value_width)

    def init_state(self, batch: int) -> RidgeState:
        """Return the state of no keys for a batch, on the device of the module."""
        return empty_ridge(batch, *self.shape, device=self.weight_like.device)

    def _check(self, state: RidgeState) -> None:
        known = isinstance(state, RidgeState) and isinstance(state.count, Tensor) and state.count.dim() > 0
        batch = state.count.shape[0] if known else 0
        check_ridge(state, (batch, *self.shape), self.weight_like.device)

    def _entries(self, value: RidgeState) -> dict[str, Tensor]:
        return value._asdict()

    def _parts(self, entries: Mapping[str, Any]) -> dict[str, Part]:
        batch, (heads, width, _) = extent(entries, "gram", 0), self.shape
        return {
            "gram": Part((batch, heads, width, width), torch.float64),
            "moment": Part((batch, *self.shape), torch.float64),
            "count": Part((batch, heads), torch.int64),
        }

    def _unlikely(self, prefix: str, entries: Mapping[str, Tensor]) -> str:
        return unlikely_ridge(prefix, entries)

    def _built(self, entries: Mapping[str, Tensor], device: torch.device | None) -> RidgeState:
        return RidgeState(**copied(entries, device))


def extent(entries: Mapping[str, Any], name: str, dim: int) -> int:
    """Return the size of an entry along a dimension, or 0 if the entry or the dimension is missing."""
    entry = entries.get(name)
    return entry.shape[dim] if isinstance(entry, Tensor) and entry.dim() > dim else 0


def copied(entries: Mapping[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
    """Return contiguous, detached copies of the entries on a device. None keeps the device of each entry."""
    return {
        name: entry.detach().to(device).clone(memory_format=torch.contiguous_format) for name, entry in entries.items()
    }
