"""The state of a set from which points can be removed without subtraction: a sliding window, and a tree for points that
are removed in any order.

States can be merged, so both classes hold the states of the current points, and partial merges of these states. Nothing
is ever subtracted, so no digits are lost, even if few points are left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from .attention import AttentionState, check_mergeable, unlikely_attention
from .attention.api import union
from .intention import RidgeState, check_ridge, merge_ridge, unlikely_ridge
from .runtime.checks import check_count, check_dense, kind_of, mismatch, not_a_tensor

State = TypeVar("State", AttentionState, RidgeState)


def merge(*states: State) -> State:
    """The merge of states that fit each other, in new memory."""
    union_of: Any = union if isinstance(states[0], AttentionState) else merge_ridge
    return cast("State", union_of(*states))


def _partial(*states: State) -> State:
    """Return the merge of states, to be kept for later calls. Autograd records it in any grad mode,
    because gradients must not depend on the call that happens to make the merge."""
    with torch.enable_grad():
        return merge(*states)


def check_fits(state: Any, like: Any, name: str) -> None:
    """Raise an error unless `state` is a state that can be merged with the state `like`; None allows any state."""
    kind = type(state if like is None else like)
    if kind is AttentionState:
        check_mergeable(state, name, like)
    elif kind is RidgeState:
        shape, device = (None, None) if like is None else (like.moment.shape, like.gram.device)
        check_ridge(state, shape, device, name)
    else:
        raise TypeError(mismatch(name, kind_of(state), "an AttentionState or a RidgeState"))


class Held(ABC, Generic[State]):
    """Base class of both containers: how the states that they hold are saved and restored."""

    @property
    @abstractmethod
    def state(self) -> State:
        """The merge of all states that are held, in new memory. Raises a `ValueError` if there are none."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of states that are held."""

    @abstractmethod
    def parts(self) -> Sequence[State]:
        """The states, and partial merges, from which everything else that is held can be computed."""

    def _refuse_nothing(self) -> None:
        if not len(self):
            raise ValueError(mismatch(type(self).__name__, "no state that is held", "at least one"))

    def _stacked(self) -> dict[str, Tensor]:
        """The tensors of all `parts`, stacked in a new first dimension, in new memory and without graphs."""
        parts = self.parts()
        names = parts[0]._fields if parts else ()
        return {
            name: torch.stack([each.detach() for each in all_])
            for name, all_ in zip(names, zip(*parts, strict=True), strict=True)
        }


def _unstacked(entries: Mapping[str, Tensor]) -> list[Any]:
    """The states that `_stacked` stacked, in new memory; other entries are ignored."""
    kind = AttentionState if "out" in entries else RidgeState
    tensors = [entries[name].detach() for name in kind._fields if name in entries]
    return [
        kind(*(part.clone(memory_format=torch.contiguous_format) for part in each))
        for each in zip(*tensors, strict=True)
    ]


def _count(entries: Mapping[str, Any], prefix: str) -> int:
    """The number of states that `_stacked` stacked. Raise an error for entries that cannot be states."""
    if not entries:
        return 0
    kind = next((kind for kind in (AttentionState, RidgeState) if {*kind._fields} & {*entries}), None)
    if kind is None or {*kind._fields} != {*entries}:
        every = " or ".join(", ".join(each._fields) for each in (AttentionState, RidgeState))
        raise ValueError(
            mismatch(prefix.rstrip(".") or "entries", ", ".join(map(str, entries)), f"the parts of states, {every}")
        )
    parts = [entries[name] for name in kind._fields]
    counts = []
    for name, part in zip(kind._fields, parts, strict=True):
        if not isinstance(part, Tensor):
            raise TypeError(not_a_tensor(prefix + name, part))
        check_dense(prefix + name, part)
        counts.append(part.shape[0] if part.dim() else 0)
        if not counts[0] or counts[-1] != counts[0]:
            raise ValueError(
                mismatch(
                    prefix + name, f"shape {tuple(part.shape)}", f"({counts[0] or 'n'}, ...), one row for each state"
                )
            )
    check_fits(kind(*(part[0] for part in parts)), None, prefix.rstrip(".") or "state")
    if not parts[0].is_meta:
        problem = unlikely_attention(prefix, entries) if kind is AttentionState else unlikely_ridge(prefix, entries)
        if problem:
            raise ValueError(problem)
    return len(parts[0])


def _refuse_names(entries: Any, needed: Sequence[str], prefix: str) -> dict[str, Any]:
    """The entries other than those that are `needed`. Raise an error if one of these is missing."""
    if not isinstance(entries, Mapping):
        raise TypeError(mismatch(prefix.rstrip("."), kind_of(entries), "a mapping from names to tensors"))
    for name in needed:
        if name not in entries:
            raise ValueError(mismatch(prefix + name, "nothing", "an entry of this name"))
    return {name: entry for name, entry in entries.items() if name not in needed}


class _Queue(NamedTuple):
    """A queue of two stacks. A window changes it by one assignment, so that an interruption changes all or nothing.

    The lists may have further entries, from a call that was interrupted.
    """

    front: list[Any]
    """The older part: the last entry is the merge of all its states, the entry before is the merge without the oldest
    state, and so on."""
    older: int
    """The number of states in `front`."""
    back: list[Any]
    """The states of the newer part, oldest first."""
    newer: int
    """The number of states in `back`."""
    total: Any
    """The merge of the newer part."""

    def turned(self) -> _Queue:
        """Return the queue after its newer part has become its older part. The older part must be
        empty before."""
        front: list[Any] = []
        for state in reversed(self.back[: self.newer]):
            front.append(_partial(state, front[-1]) if front else state)
        return _Queue(front, len(front), [], 0, None)


class StateWindow(Held[State]):
    """The exact state of the newest chunks of a stream: each push drops the oldest chunk, and nothing is subtracted.

    The window is a queue of two stacks. `push` merges the new state into the merge of the newer part. The older part
    holds the merges of all its suffixes, so that `pop` only drops the outermost merge. When the older part is empty,
    the newer part becomes the older part, with a merge for each of its states. So a push takes two merges on average,
    but one push in n takes n merges. A `StateTree` never takes more than log2(n) merges. The window needs memory for at
    most n + 1 states.

    Args:
        size: n, the largest number of states that are held; an int >= 1 (`ValueError` otherwise).

    States may be `AttentionState`s, also with further dimensions before L, or `RidgeState`s. All states of a window
    must have the same kind, shapes, dtypes and device. The window holds the tensors themselves, like the stream of a
    module: do not write to them. If grad mode is on when `state` is read, gradients flow to all states that are held
    and require a gradient. The grad mode of `push` and `pop` does not matter. The graphs of states that have left are
    freed.

    `state_dict` returns tensors: the parts of the states, stacked in a new first dimension, and the ints `front` and
    `size` (). `load_state_dict` loads them into a window of the same size, which then continues with the same bits (up
    to rounding if merges were recorded). Entries that no window can have raise a `ValueError` or `TypeError`, and the
    window does not change. `copy.copy` returns an independent window.

    >>> latents, points = torch.randn(4, 16, 8), torch.randn(2, 4, 1000, 8)
    >>> window = cmab_kernels.StateWindow(3)
    >>> for chunk in points.split(100, dim=2):
    ...     window.push(cmab_kernels.attention_state(latents, chunk, chunk))
    >>> newest = points[:, :, -300:]
    >>> len(window), torch.allclose(window.state.out, cmab_kernels.latent_attention(latents, newest, newest), atol=1e-5)
    (3, True)
    """

    def __init__(self, size: int) -> None:
        self.size = check_count("size", size)
        self._queue = _Queue([], 0, [], 0, None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, also one of an earlier version, which has `_front`, `_back` and `_total`."""
        if "_queue" not in state:
            front, back = state["_front"], state["_back"]
            state = {"size": state["size"], "_queue": _Queue(front, len(front), back, len(back), state["_total"])}
        self.__dict__.update(state)

    def __len__(self) -> int:
        return self._queue.older + self._queue.newer

    def __copy__(self) -> StateWindow[State]:
        made: StateWindow[State] = StateWindow(self.size)
        made._queue = self._queue._replace(front=self._queue.front.copy(), back=self._queue.back.copy())
        return made

    @property
    def state(self) -> State:
        self._refuse_nothing()
        front, older, _, _, total = self._queue
        parts = front[older - 1 : older] if older else []
        return merge(*parts) if total is None else merge(*parts, total)

    def push(self, state: State) -> None:
        """Add the state of one chunk, and drop the oldest state if more than `size` states are then held."""
        full = len(self) == self.size
        front, older, back, newer, total = self._queue
        check_fits(state, total or (front[0] if older else None), "state")
        if full and not older:
            front, older, back, newer, total = self._queue.turned()
        total = state if total is None else _partial(total, state)
        back[newer:] = [state]
        self._queue = _Queue(front, older - full, back, newer + 1, total)
        del front[older - full :]

    def pop(self) -> None:
        """Drop the oldest state. Raises a `ValueError` if there is none."""
        self._refuse_nothing()
        queue = self._queue if self._queue.older else self._queue.turned()
        self._queue = queue._replace(older=queue.older - 1)
        del queue.front[queue.older - 1 :]

    def parts(self) -> list[State]:
        front, older, back, newer, _ = self._queue
        return front[:older] + back[:newer]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the window as tensors in new memory, for `torch.save` or a file of safetensors."""
        front, size = (torch.tensor(count, device="cpu") for count in (self._queue.older, self.size))
        return {**self._stacked(), "front": front, "size": size}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str = "state_dict.") -> None:
        """Hold the states that `state_dict` returned, in new memory. `prefix` comes before names in error messages."""
        parts = _refuse_names(state_dict, ("front", "size"), prefix)
        for name in ("front", "size"):
            entry = state_dict[name]
            if not isinstance(entry, Tensor) or entry.dtype != torch.int64 or entry.shape != () or entry.is_meta:
                raise TypeError(mismatch(prefix + name, repr(entry), "an int64 tensor ()"))
        if state_dict["size"] != self.size:
            raise ValueError(
                mismatch(f"{prefix}size", int(state_dict["size"]), f"{self.size}, the size of this window")
            )
        count, front = _count(parts, prefix), int(state_dict["front"])
        if count > self.size:
            raise ValueError(
                mismatch(prefix + next(iter(parts)), f"{count} states", f"at most {self.size}, the size of this window")
            )
        if not 0 <= front <= count:
            raise ValueError(mismatch(f"{prefix}front", front, f"an int from 0 to {count}, the number of states"))
        self.restore(state_dict)

    def restore(self, entries: Mapping[str, Tensor]) -> None:
        """Do the same as `load_state_dict`, for entries that came from a window. They are not
        checked."""
        states, front = _unstacked(entries), int(entries["front"])
        total = None
        for state in states[front:]:
            total = state if total is None else merge(total, state)
        self._queue = _Queue(states[:front], front, states[front:], len(states) - front, total)


class _Change(NamedTuple):
    """The change that `StateTree.put` or `discard` makes."""

    nodes: list[dict[int, Any]]
    """For each level, the new nodes by their places."""
    counts: list[int]
    """For each level, the number of nodes."""
    keys: dict[int, Hashable]
    """New keys by their places."""
    gone: tuple[Hashable, ...]
    """Keys that leave."""


class StateTree(Held[State]):
    """The exact state of a set whose members are added and removed in any order: nothing is subtracted.

    The states are the leaves of a binary tree, and every other node is the merge of the two below it. Among n states,
    `put` takes at most log2(n) merges, rounded up, and `discard` takes twice as many. The tree needs memory for 2 n
    states.

    States, gradients and saving are as in `StateWindow`. Keys are hashable (`TypeError` otherwise). The `state_dict`
    has the list `keys` beside the stacked parts. `torch.load` reads it with `weights_only=True` if keys are strings,
    numbers, or tuples of them.

    >>> latents, points = torch.randn(4, 16, 8), torch.randn(2, 4, 1000, 8)
    >>> tree = cmab_kernels.StateTree()
    >>> for day, chunk in enumerate(points.split(100, dim=2)):
    ...     tree.put(day, cmab_kernels.attention_state(latents, chunk, chunk))
    >>> for day in (4, 0, 7, 99):
    ...     tree.discard(day)
    >>> left = torch.cat([points[:, :, 100 * day : 100 * (day + 1)] for day in (1, 2, 3, 5, 6, 8, 9)], dim=2)
    >>> whole = cmab_kernels.latent_attention(latents, left, left)
    >>> len(tree), 4 in tree, torch.allclose(tree.state.out, whole, atol=1e-5)
    (7, False, True)
    """

    _change: _Change | None = None
    """The change that is being written. If the writing is interrupted, the next call writes it again."""

    def __init__(self) -> None:
        self._keys: list[Hashable] = []
        """The keys of the leaves."""
        self._places: dict[Hashable, int] = {}
        """The place of each key in this list."""
        self._levels: list[list[State]] = [[]]
        """The leaves, then the merges of pairs of neighbours, and so on up to the root. A last node without a neighbour
        moves up unchanged."""

    def __len__(self) -> int:
        self._settle()
        return len(self._keys)

    def __contains__(self, key: Hashable) -> bool:
        self._settle()
        return key in self._places

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the keys that are held now, so that a loop may discard them."""
        self._settle()
        return iter(tuple(self._keys))

    def __copy__(self) -> StateTree[State]:
        self._settle()
        made: StateTree[State] = StateTree()
        made._keys, made._places = self._keys.copy(), self._places.copy()
        made._levels = [nodes.copy() for nodes in self._levels]
        return made

    @property
    def state(self) -> State:
        self._refuse_nothing()
        return merge(self._levels[-1][0])

    def put(self, key: Hashable, state: State) -> None:
        """Hold a state under a key. It replaces the earlier state of the key, if any."""
        _refuse_unhashable(key)
        count = len(self)
        check_fits(state, next(iter(self._levels[0]), None), "state")
        place = self._places.get(key, count)
        self._change = _Change(*self._merged({place: state}, max(place + 1, count)), {place: key}, ())
        self._settle()

    def discard(self, key: Hashable) -> None:
        """Drop the state of a key. A key without a state is not an error."""
        _refuse_unhashable(key)
        last = len(self) - 1
        place = self._places.get(key)
        if place is None:
            return
        moves = place < last  # the last leaf moves to the place that becomes free
        nodes, counts = self._merged({place: self._levels[0][last]} if moves else {}, last)
        self._change = _Change(nodes, counts, {place: self._keys[last]} if moves else {}, (key,))
        self._settle()

    def _merged(self, leaves: dict[int, State], count: int) -> tuple[list[dict[int, State]], list[int]]:
        """Return the nodes of each level that change if leaves are written to their places and `count` leaves are kept,
        and the number of nodes of each level."""
        levels, changed, counts, shrinks = self._levels, [leaves], [count], count < len(self._levels[0])
        while counts[-1] > 1:
            below, known, length = (
                changed[-1],
                levels[len(counts) - 1] if len(counts) <= len(levels) else [],
                counts[-1],
            )
            # This pair of nodes may have lost one.
            pairs = {place // 2 for place in below} | ({(length - 1) // 2} if shrinks else set())
            nodes: dict[int, State] = {}
            for pair in pairs:
                two = [
                    below[place] if place in below else known[place]
                    for place in range(2 * pair, min(2 * pair + 2, length))
                ]
                nodes[pair] = _partial(*two) if len(two) == 2 else two[0]
            changed.append(nodes)
            counts.append((length + 1) // 2)
        return changed, counts

    def _settle(self) -> None:
        """Write the change, if there is one. Writing it twice has the same result as writing it
        once."""
        if self._change is None:
            return
        changed, counts, keys, gone = self._change
        levels = self._levels
        for level, (nodes, length) in enumerate(zip(changed, counts, strict=True)):
            if level == len(levels):
                levels.append([])
            for place in sorted(nodes):
                levels[level][place : place + 1] = [nodes[place]]
            del levels[level][length:]
        del levels[len(counts) :]
        for place, key in keys.items():
            self._keys[place : place + 1] = [key]
            self._places[key] = place
        del self._keys[counts[0] :]
        for key in gone:
            self._places.pop(key, None)
        self._change = None

    def parts(self) -> list[State]:
        self._settle()
        return self._levels[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the tree as a list of keys, and as tensors in new memory."""
        return {**self._stacked(), "keys": list(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold the states that `state_dict` returned, in new memory."""
        prefix = "state_dict."
        count = _count(_refuse_names(state_dict, ("keys",), prefix), prefix)
        keys: Any = state_dict["keys"]
        if not isinstance(keys, (list, tuple)):
            raise TypeError(mismatch(f"{prefix}keys", kind_of(keys), "a list of keys"))
        for key in keys:
            _refuse_unhashable(key)
        if len({*keys}) != len(keys) or len(keys) != count:
            raise ValueError(
                mismatch(
                    f"{prefix}keys", f"{len({*keys})} different keys of {len(keys)}", f"{count}, one for each state"
                )
            )
        made: StateTree[State] = StateTree()
        leaves = dict(enumerate(_unstacked(state_dict)))
        self._settle()
        gone = tuple(self._places.keys() - {*keys})
        self._change = _Change(*made._merged(leaves, count), dict(enumerate(keys)), gone)
        self._settle()


def _refuse_unhashable(key: Any) -> None:
    try:
        hash(key)
    except TypeError:
        raise TypeError(mismatch("key", kind_of(key), "a hashable value, such as an int or a string")) from None
