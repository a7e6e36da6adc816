"""The state of continual attention between steps: a ring that holds the tokens of the window, and a few sums over them.

A step returns a new state, and the state that it was given stays valid. No copy is needed if the library made the
state's tensors and nothing else can reach their memory. The step then writes only to memory that the given state does
not read: a free row of the ring, and `spare`.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...runtime.backends import imported
from ...runtime.checks import (
    MOST_ITERATIONS,
    check_dense,
    check_floats,
    device_of,
    is_dense,
    is_read,
    kind_of,
    mismatch,
)
from ...runtime.dtypes import state_dtype


class ContinualNystromState(NamedTuple):
    """The state of continual Nyström attention over a window of n tokens; `_asdict()` and `ContinualNystromState(**d)`
    convert it.

    Its size is constant: (n + 1)(2 D + E) + 2 m (E + 5) + 2 m D + m^2 elements a head. After a step of t > 1 tokens the
    rings have n + min(t, n) rows in place of n + 1.
    """

    queries: Tensor
    """(B, H, C, D), a ring of C > n rows in the dtype of the tokens: token p = 0, 1, ... of the stream is in row p %
    C."""
    keys: Tensor
    """(B, H, C, D), a ring like `queries`."""
    values: Tensor
    """(B, H, C, E), a ring like `queries`."""
    sums: Tensor
    """(B, H, m, E + 5) in the state dtype. A row, with log-scale c, holds exp(-c) Delta V, exp(-c) phi(Delta), c, the
    peak of exp(-c) phi(Delta), exp(-c) sum exp(S) |v|_1 over the window, and the peak of the latter.

    A peak is the largest value since the row was last recomputed. If torch computed the sums, the last peak is the
    largest number of the dtype. A kernel rounds differently from torch, so its next step then recomputes the row."""
    spare: Tensor
    """Memory to which the next step writes, with the shape and dtype of `sums`."""
    landmark_queries: Tensor
    """(B, H, m, D) in the state dtype, oldest first."""
    landmark_keys: Tensor
    """(B, H, m, D) in the state dtype, oldest first."""
    inverse: Tensor
    """(B, H, m, m) in the state dtype: the pseudo-inverse of Gamma_phi."""
    scale: Tensor
    """() float64 on the CPU: the factor of the logits."""
    position: Tensor
    """(B, H) int64: the number of tokens that each stream has read."""
    window: int
    """The number n of tokens in the window."""
    pinv_iterations: int
    """Iterations of the pseudo-inverse; 0 means the exact pseudo-inverse."""
    fixed: int
    """1 if the landmarks were given and do not change, 0 if they change with the window."""


class ContinualAttentionState(NamedTuple):
    """The state of exact continual attention over a window of n tokens.

    It has (n + 1)(2 D + E) elements per head, and 2 n (E + 5) more after a retroactive step."""

    queries: Tensor
    """(B, H, C, D), a ring of C > n rows in the dtype of the tokens: token p = 0, 1, ... of the stream is in row p %
    C."""
    keys: Tensor
    """(B, H, C, D), a ring like `queries`."""
    values: Tensor
    """(B, H, C, E), a ring like `queries`."""
    sums: Tensor
    """(B, H, n, E + 5) in the state dtype, as in `ContinualNystromState`: row i is for the query of the i-th token of
    the window. (B, H, 0, E + 5) while all steps request single outputs."""
    spare: Tensor
    """Memory to which the next step writes, with the shape and dtype of `sums`."""
    scale: Tensor
    """() float64 on the CPU: the factor of the logits."""
    position: Tensor
    """(B, H) int64: the number of tokens that each stream has read."""
    window: int
    """The number n of tokens in the window."""


EXTRA_SUMS = 5
"""The columns of a row of sums besides those of the values."""

UNSURE = 2.0**100
"""A log-scale at which kernels recompute a row of sums, because a subtraction might not remove what was added."""

LAST_POSITION = 2**62
"""The largest position that a state may have. Sums of positions and lengths then stay within 64 bits."""

RINGS = ("queries", "keys", "values")
"""The fields of a state that are rings."""

KINDS = (ContinualNystromState, ContinualAttentionState)
ContinualState = ContinualNystromState | ContinualAttentionState
State = TypeVar("State", ContinualNystromState, ContinualAttentionState)


if TYPE_CHECKING:  # Python 3.10 has no generic NamedTuple, and torch does not recognise one

    class StepResult(NamedTuple, Generic[State]):
        out: Tensor
        state: State

else:

    class StepResult(NamedTuple):
        """The result of a step."""

        out: Tensor
        """Single outputs: (B, H, t, E), each over the window that ends with its token. Retroactive: (B, H, n, E), for
        the window after the last token."""
        state: State
        """The state for the next step, of the same kind as the given state. The given state can still be used."""


def window_of(ring: Tensor, position: Tensor, window: int) -> Tensor:
    """Return a copy (B, H, n, *) of the newest `window` tokens of a ring (B, H, C, *) after `position` (B, H) tokens,
    oldest first."""
    rows = _rows_of(position, window, ring.shape[-2])
    return ring.gather(-2, rows[..., None].expand(*rows.shape, ring.shape[-1]))


def ring_of(tokens: Tensor, position: Tensor, capacity: int) -> Tensor:
    """Return a ring (B, H, C, *) of C = `capacity` rows whose newest tokens are `tokens`, after `position` (B, H)
    tokens of the stream."""
    rows = _rows_of(position, tokens.shape[-2], capacity)
    empty = tokens.new_zeros(*tokens.shape[:-2], capacity, tokens.shape[-1])
    return empty.scatter(-2, rows[..., None].expand_as(tokens), tokens)


def _rows_of(position: Tensor, tokens: int, capacity: int) -> Tensor:
    """Return the rows (B, H, t) of the newest `tokens` tokens in a ring of `capacity` rows, oldest first."""
    return (position[..., None] + torch.arange(-tokens, 0, device=position.device)) % capacity


def with_sums(state: State) -> State:
    """Return a state whose next retroactive step updates sums, from a state that has no such sums yet.

    The log-scale of these sums is so large that every step recomputes them.
    """
    if state.sums.shape[2]:
        return state
    batch, heads, _, columns = state.sums.shape
    sums = state.sums.new_zeros(batch, heads, state.window, columns)
    sums[..., -EXTRA_SUMS] = 1
    sums[..., 1 - EXTRA_SUMS] = UNSURE
    return type(state)(**{**state._asdict(), "sums": sums, "spare": torch.zeros_like(sums)})


def move_state(state: State, device: torch.device | str) -> State:
    """Return the state on another device, with the same bits.

    >>> tokens = torch.randn(1, 4, 64, 16)
    >>> state = cmab_kernels.continual_nystrom_init(tokens, tokens, tokens, num_landmarks=8)
    >>> cmab_kernels.move_state(state, "cpu").keys.device
    device(type='cpu')
    """
    _check_any(state)
    device = device_of(device)
    tensors: Any = {
        name: t.to(device) for name, t in state._asdict().items() if isinstance(t, Tensor) and name != "scale"
    }
    return state._replace(**tensors)


COUNTS = ("window", "pinv_iterations", "fixed")
"""The fields of a state that are ints."""


def state_to_tensors(state: ContinualState) -> dict[str, Tensor]:
    """Return a state as a dictionary of tensors, for example for a file of safetensors.
    `state_from_tensors` restores the state.

    The entries are the fields of the state without `spare`, in their own memory. `queries`, `keys` and `values` (B, H,
    n, *) are the window, oldest token first. Ints become int64 tensors ().

    >>> tokens = torch.randn(1, 4, 64, 16)
    >>> state = cmab_kernels.continual_nystrom_init(tokens, tokens, tokens, num_landmarks=8)
    >>> tensors = cmab_kernels.state_to_tensors(state)
    >>> tensors["keys"].shape, tensors["position"]
    (torch.Size([1, 4, 64, 16]), tensor([[64, 64, 64, 64]]))
    >>> restored = cmab_kernels.state_from_tensors(cmab_kernels.ContinualNystromState, tensors)
    >>> new = torch.randn(1, 4, 1, 16)
    >>> torch.equal(*(cmab_kernels.continual_nystrom_step(each, new, new, new).out for each in (state, restored)))
    True
    """
    _check_any(state)
    tensors = {name: field for name, field in state._asdict().items() if name != "spare"}
    counts = {name: torch.tensor(count, device=_HOST) for name, count in tensors.items() if name in COUNTS}
    rings = {name: window_of(tensors[name], state.position, state.window) for name in RINGS}
    others = {name: field.detach().clone() for name, field in tensors.items() if name not in (*COUNTS, *RINGS)}
    return {name: {**counts, **rings, **others}[name] for name in tensors}


def state_from_tensors(kind: type[State], tensors: Mapping[str, Tensor], name: str = "tensors") -> State:
    """Restore a state from the tensors of `state_to_tensors`, in new memory, on the device of the tensors.

    Args:
        kind: `ContinualNystromState` or `ContinualAttentionState`.
        tensors: all entries, and no others. `position` may also be one number () for all streams of the batch.
        name: the name of `tensors` in error messages.

    Raises:
        ValueError, TypeError: an entry is missing, or has a wrong shape, dtype or value; the message names it.

    >>> tokens = torch.randn(1, 4, 64, 16)
    >>> tensors = cmab_kernels.state_to_tensors(cmab_kernels.continual_attention_init(tokens, tokens, tokens))
    >>> cmab_kernels.state_from_tensors(cmab_kernels.ContinualAttentionState, tensors).position
    tensor([[64, 64, 64, 64]])
    """
    if not any(kind is each for each in KINDS):
        raise TypeError(mismatch("kind", repr(kind), "ContinualNystromState or ContinualAttentionState"))
    if not isinstance(tensors, Mapping):
        raise TypeError(mismatch(name, kind_of(tensors), "a mapping from names to tensors"))
    names: list[str] = [field for field in kind._fields if field != "spare"]
    if tensors.keys() != set(names):
        other = next(entry for entry in (*names, *tensors) if (entry in tensors) != (entry in names))
        given, wanted = ("a value", "no such entry") if other in tensors else ("nothing", "a tensor")
        raise ValueError(
            mismatch(f"{name}[{other!r}]", given, f"{wanted}, as a {kind.__name__} has {', '.join(names)}")
        )
    counts = {entry: _loaded_count(f"{name}[{entry!r}]", tensors[entry]) for entry in names if entry in COUNTS}
    fields: dict[str, Any] = {
        e: _loaded_numbers(f"{name}[{e!r}]", tensors[e]) for e in names if e not in (*COUNTS, "position")
    }
    for entry in ("keys", "queries", "values"):
        _check_window(f"{name}[{entry!r}]", fields[entry], fields["keys"], counts["window"])
    fields["position"] = _loaded_position(f"{name}['position']", tensors["position"], fields["keys"])
    fields.update({entry: ring_of(fields[entry], fields["position"], counts["window"] + 1) for entry in RINGS})
    fields.update(counts, spare=torch.zeros_like(fields["sums"]), scale=_on_host(f"{name}['scale']", fields["scale"]))
    state = kind(**fields)
    check_state(state, kind, name)
    problem = "" if state.sums.is_meta else unlikely_totals(f"{name}['sums']", state.sums)
    if problem:
        raise ValueError(problem)
    return remembered(state)


def unlikely_totals(name: str, sums: Tensor) -> str:
    """Return why no stream can have these sums, or "" if a stream can."""
    if (sums[..., -EXTRA_SUMS] <= 0).any():
        return mismatch(name, "a total that is not positive", "a sum of exponentials")
    return ""


def _loaded_count(name: str, count: Tensor) -> int:
    fits = (
        isinstance(count, Tensor)
        and is_dense(count)
        and count.shape == ()
        and count.dtype == torch.int64
        and not count.is_meta
    )
    if not fits or not 0 <= int(count) <= LAST_POSITION:
        raise ValueError(mismatch(name, repr(count), f"an int64 tensor () from 0 to {LAST_POSITION}"))
    return int(count)


def _check_window(name: str, tokens: Tensor, keys: Tensor, window: int) -> None:
    """Raise unless `tokens` is a window (B, H, n, *) with the batch, heads and device of the keys."""
    streams = tuple(keys.shape[:2]) if keys.dim() == 4 else ("B", "H")
    if tokens.dim() != 4 or tokens.shape[:3] != (*keys.shape[:2], window):
        needed = f"({streams[0]}, {streams[1]}, {window}, *), a window for the streams of keys"
        raise ValueError(mismatch(name, f"shape {tuple(tokens.shape)}", needed))
    if tokens.device != keys.device:
        raise ValueError(mismatch(name, f"device {tokens.device}", f"{keys.device}, the device of keys"))


def _loaded_position(name: str, position: Tensor, keys: Tensor) -> Tensor:
    """Return the position of each stream (B, H), on the device of keys (B, H, n, D), from a tensor (B, H) or ()."""
    _check_loaded(name, position)
    if position.is_meta and not keys.is_meta:
        raise ValueError(mismatch(name, "device meta", "a tensor with a value"))
    if position.dtype != torch.int64 or position.shape not in ((), keys.shape[:2]):
        given = f"{position.dtype} {tuple(position.shape)}"
        raise ValueError(mismatch(name, given, f"an int64 tensor (B, H) = {tuple(keys.shape[:2])}, or ()"))
    return position.to(keys.device).expand(keys.shape[:2]).clone(memory_format=torch.contiguous_format)


def _loaded_numbers(name: str, tensor: Tensor) -> Tensor:
    """Return a contiguous copy without a gradient; raise unless all numbers are finite."""
    _check_loaded(name, tensor)
    check_floats(name, tensor)
    if not tensor.is_meta and not tensor.isfinite().all():
        raise ValueError(mismatch(name, "a NaN or an infinity", "finite numbers"))
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _check_loaded(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(mismatch(name, kind_of(tensor), "a torch.Tensor"))
    check_dense(name, tensor)


def _on_host(name: str, tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise ValueError(mismatch(name, "device meta", "a tensor with a value"))
    return tensor.cpu()


def own_memory(state: State) -> State:
    """Return a state whose tensors are contiguous and without gradients: `state` itself if it has only such
    tensors, else a state with clones of the others."""
    if all(map(_is_own, state)):
        return state
    return type(state)._make(map(_owned, state))


def _is_own(field: Any) -> bool:
    return not isinstance(field, Tensor) or (field.is_contiguous() and not field.requires_grad and not field.is_neg())


def _owned(field: Any) -> Any:
    return field if _is_own(field) else field.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


# ---- the memory of the next state


_WRITTEN = 5
"""The number of fields of a state to which a step may write. These fields come first."""


@functools.cache
def _ownership() -> Any:
    """Return the native code that counts the references to a tensor (csrc/common/ownership.h). None if it was not
    built; every step then copies."""
    return imported("nystrom.continual", "native")


def remembered(state: State) -> State:
    """Record that the state's tensors are new and have their own memory, and return the state. Steps may write to this
    memory while nothing else can reach it. Tensor subclasses, such as fake tensors, have no memory to record."""
    if not torch.compiler.is_compiling() and _ownership() is not None and type(state.keys) is Tensor:
        _ownership().remember(state)
    return state


def next_state(state: State, tokens: int, retroactive: bool) -> State:
    """Return the state after a step of this number of tokens on a GPU, with memory that the step still has to fill.

    The rule is the same as in csrc/continual/next_state.h. If only this state holds its tensors, the step works in
    place: new tokens go to free rows of its rings, and its sums and spare memory are swapped. A step never writes to
    memory that others may read: it takes new memory instead.
    """
    sole = _ownership() is not None and _ownership().is_sole_owner(state)
    fields: tuple[Any, ...] = state
    queries, keys, values, sums, spare = fields[:_WRITTEN]
    batch, heads, capacity, _ = keys.shape
    window = state.window
    if not sole or capacity < window + tokens:
        capacity = window + min(tokens, window)
        queries, keys, values = (
            ring.new_empty(batch, heads, capacity, ring.shape[3]) for ring in (queries, keys, values)
        )
    followed = isinstance(state, ContinualNystromState)
    before = sums.shape[2]
    rows = before if followed else window if retroactive else 0
    if sole and rows == before > 0:
        sums, spare = spare, sums
    elif rows or before:
        sums, spare = (sums.new_empty(batch, heads, rows, sums.shape[3]) for _ in range(2))
    # Landmarks always get new memory, because sometimes only the GPU knows whether the step replaces a landmark.
    landmarks: Any = fields[_WRITTEN:-5] if followed else ()
    counts: Any = fields[-3 if followed else -1 :]
    made = (
        queries,
        keys,
        values,
        sums,
        spare,
        *map(torch.empty_like, landmarks),
        state.scale,
        torch.empty_like(state.position),
        *counts,
    )
    return remembered(type(state)._make(made))


def _sent(state: State) -> tuple[Any, ...]:
    """Reduce a state to bytes for another process. Otherwise torch would share its memory, and neither process could
    see the references of the other process."""
    fields: tuple[Any, ...] = state
    if any(isinstance(field, Tensor) and field.requires_grad for field in fields):
        return type(state)._make, (fields,)  # torch shares a leaf tensor, and raises for a tensor with a history
    file = io.BytesIO()
    torch.save(fields, file)
    return _received, (type(state), file.getvalue())


def _received(kind: type[State], data: bytes) -> State:
    return kind._make(torch.load(io.BytesIO(data), weights_only=True))


for _kind in KINDS:
    ForkingPickler.register(_kind, _sent)


def refuse_other_output(state: State, retroactive: bool) -> None:
    """Raise `RuntimeError` if a step of this kind cannot be captured in a CUDA graph because the state's sums would
    need other memory."""
    known = state.sums.shape[-2] > 0
    if isinstance(state, ContinualAttentionState) and known != retroactive:
        kinds = ("single", "retroactive")
        allowed = f"{kinds[known]!r} as in earlier steps, because a captured step keeps the state's memory"
        raise RuntimeError(
            mismatch("output", repr(kinds[retroactive]), f"{allowed}; take a step of this kind before the capture")
        )


_HOST = torch.device("cpu")


def check_state(state: State, kind: type[State], name: str = "state") -> None:
    """Raise unless `state` is a `kind` and its parts fit together."""
    if not isinstance(state, kind):
        made_by = "continual_nystrom_init" if kind is ContinualNystromState else "continual_attention_init"
        raise TypeError(mismatch(name, kind_of(state), f"a {kind.__name__}, from {made_by} or a step"))
    _check_counts(state, name)
    parts, home = _parts(state, name), state.keys.device
    for part, (shape, dtype) in parts.items():
        tensor = getattr(state, part)
        if not isinstance(tensor, Tensor):
            raise TypeError(mismatch(f"{name}.{part}", kind_of(tensor), "a torch.Tensor"))
        check_dense(f"{name}.{part}", tensor)
        if tensor.shape != shape:
            raise ValueError(mismatch(f"{name}.{part}", f"shape {tuple(tensor.shape)}", shape))
        if tensor.dtype != dtype:
            raise TypeError(mismatch(f"{name}.{part}", tensor.dtype, dtype))
        device = _HOST if part == "scale" else home
        if tensor.device != device:
            raise ValueError(
                mismatch(f"{name}.{part}", f"device {tensor.device}", f"{device}; `move_state` moves a state")
            )
    _check_positions(state, name)


def _check_any(state: Any) -> None:
    """Raise unless `state` is one of `KINDS` and its parts fit together."""
    kind = type(state)
    if kind not in KINDS:
        raise TypeError(mismatch("state", kind_of(state), "a ContinualNystromState or a ContinualAttentionState"))
    check_state(state, kind)


_BOUNDS = {"window": (1, LAST_POSITION), "pinv_iterations": (0, MOST_ITERATIONS), "fixed": (0, 1)}
"""The smallest and the largest value of each int of a state."""


def _check_counts(state: ContinualState, name: str) -> None:
    for field, (least, most) in _BOUNDS.items():
        count = getattr(state, field, least)
        if not isinstance(count, int) or isinstance(count, bool) or not least <= count <= most:
            raise ValueError(mismatch(f"{name}.{field}", repr(count), f"an int from {least} to {most}"))


def _check_positions(state: ContinualState, name: str) -> None:
    """Raise for a position that no stream can have. On a GPU, positions are not checked, because the host would have to
    wait."""
    if not is_read(state.position) or not state.position.numel():
        return
    for extreme in map(int, state.position.aminmax()):
        if not state.window <= extreme <= LAST_POSITION:
            allowed = (
                f"a position from {state.window}, the window, to {LAST_POSITION}; continual_*_init takes the "
                "first window at once"
            )
            raise ValueError(mismatch(f"{name}.position", extreme, allowed))


def _parts(state: ContinualState, name: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype that each tensor must have. They follow from the shapes and dtypes
    of the rings. If one ring differs in dtype from the other two, the other two count as right."""
    queries, keys, values, sums = state.queries, state.keys, state.values, state.sums
    for part, ring in (("queries", queries), ("keys", keys), ("values", values), ("sums", sums)):
        if isinstance(ring, Tensor):
            check_floats(f"{name}.{part}", ring)
        if not isinstance(ring, Tensor) or ring.dim() != 4:
            shown = f"shape {tuple(ring.shape)}" if isinstance(ring, Tensor) else kind_of(ring)
            raise ValueError(mismatch(f"{name}.{part}", shown, "a tensor of 4 dimensions"))
    given = queries.dtype if queries.dtype == values.dtype else keys.dtype
    batch, heads, capacity, width = keys.shape
    value_width, dtype = values.shape[-1], state_dtype(given)
    if capacity <= state.window:
        raise ValueError(
            mismatch(f"{name}.keys", f"a ring of {capacity} rows", f"more than {state.window}, the window")
        )
    rows = sums.shape[-2]
    if isinstance(state, ContinualAttentionState) and rows:
        rows = state.window
    elif isinstance(state, ContinualNystromState) and not 1 <= rows <= state.window:
        raise ValueError(mismatch(f"{name}.sums", f"{rows} landmarks", f"1 to {state.window}, the window"))
    parts = {
        "queries": ((batch, heads, capacity, width), given),
        "keys": ((batch, heads, capacity, width), given),
        "values": ((batch, heads, capacity, value_width), given),
        "sums": ((batch, heads, rows, value_width + EXTRA_SUMS), dtype),
        "spare": ((batch, heads, rows, value_width + EXTRA_SUMS), dtype),
        "scale": ((), torch.float64),
        "position": ((batch, heads), torch.int64),
    }
    if isinstance(state, ContinualNystromState):
        parts["landmark_queries"] = parts["landmark_keys"] = ((batch, heads, rows, width), dtype)
        parts["inverse"] = ((batch, heads, rows, rows), dtype)
    return parts
