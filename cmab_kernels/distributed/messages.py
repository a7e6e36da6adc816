"""Messages between the ranks of a group: states in messages of one length, with headers that show all ranks whether the
states fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..attention import AttentionState
from ..attention.state import refuse_wrong_sums
from ..intention import RidgeState
from ..runtime.checks import check_dense, kind_of, mismatch, not_a_tensor
from ..runtime.dtypes import state_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KINDS = (AttentionState, RidgeState)
_FAILED = len(KINDS)
"""A header holds this number in place of the kind of state if its rank has raised an error."""
_GRAD_MODE_OFF, _UNWANTED, WANTED = range(3)
NUMBERS = 16
"""The number of int64 entries in a message's header. The entries are: whether a gradient is needed, the kind of state,
the bytes of an element, the number of dimensions, the shape, and zeros."""
FIRST_ROOM = 65_536
"""The bytes of a state for which the first message of a group has room, besides its header."""


def members(group: ProcessGroup | None) -> ProcessGroup:
    """Return the group, or the default one for None; raise if there is none, or if this process does not belong to
    it."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError(
            "group: torch.distributed has no process group yet; call torch.distributed.init_process_group first"
        )
    group = distributed.group.WORLD if group is None else group
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(mismatch("group", repr(group), "a ProcessGroup that this process belongs to, or None"))
    return group


class _Agreement:
    """The facts on which the ranks of a group have agreed. They are the same on every rank: they change only after all
    ranks have compared headers and agreed."""

    def __init__(self) -> None:
        self.largest = 0
        self.shapes: set[tuple[int, ...]] = set()

    @property
    def room(self) -> int:
        """The bytes of a state that a message has room for. Ranks with messages of different lengths would crash or
        hang."""
        return self.largest or FIRST_ROOM


_AGREEMENTS: WeakKeyDictionary[ProcessGroup, _Agreement] = WeakKeyDictionary()


def gathered(
    packed: Tensor, header: tuple[int, ...], group: ProcessGroup, *, alike: bool = False
) -> tuple[Tensor, bool]:
    """Return the packed states (W, bytes) of all ranks, and whether any rank wants a gradient.
    Raise on all ranks if the states do not fit.

    On a GPU the program does not wait for the headers if their shapes were agreed on before. If the headers differ
    then, the result is NaN. A rank that needs no gradient, but could record one, must read whether other ranks need a
    gradient. With `alike`, it is an error if only some ranks want a gradient.
    """
    agreement, size = _AGREEMENTS.setdefault(group, _Agreement()), packed.numel()
    fits = size <= agreement.room
    headers, rows = _exchanged(header, packed if fits else packed[:0], agreement.room, group)
    gradient, shape = header[0], header[1:]
    if shape in agreement.shapes and gradient != _UNWANTED and _waits(packed):
        own = headers[torch.distributed.get_rank(group)]
        unlike = (headers[:, 1:] != own[1:]).any() | ((headers[:, 0] - own[0]).abs() == WANTED - _GRAD_MODE_OFF).any()
        return rows.masked_fill(unlike, 255), gradient == WANTED  # eight bytes of 255 are a NaN
    found = headers.tolist()
    _compare(found, alike)
    agreement.shapes.add(shape)
    agreement.largest = max(agreement.largest, size)
    return rows if fits else _all_gather(packed, group), any(each[0] == WANTED for each in found)


def _waits(tensor: Tensor) -> bool:
    """Whether the program would have to wait for the values of a tensor."""
    return tensor.is_cuda


def _exchanged(header: Sequence[int], packed: Tensor, room: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the headers (W, NUMBERS) int64 and the packed states (W, bytes) of all ranks, from one collective."""
    head = torch.tensor(header).to(packed.device, non_blocking=True).view(torch.uint8)
    received = _all_gather(torch.cat([head, packed, packed.new_zeros(room - packed.numel())]), group)
    states = received[:, head.numel() : head.numel() + packed.numel()]
    return received[:, : head.numel()].contiguous().view(torch.int64), states


def _all_gather(message: Tensor, group: ProcessGroup) -> Tensor:
    """Return the messages (W, bytes) of all ranks, in rank order."""
    world = torch.distributed.get_world_size(group)
    received = message.new_empty(world * message.numel())
    # This function has its old name before torch 2.13.
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(received, message, group)
    return received.view(world, -1)


@contextmanager
def announced(group: ProcessGroup, like: Any) -> Iterator[None]:
    """Tell the other ranks of an error raised in this context, so that they raise too and do not wait for this rank.

    `like` holds tensors on the device of the messages.
    """
    try:
        yield
    except Exception:
        device = next(
            (leaf.device for leaf in tree_leaves(like) if isinstance(leaf, Tensor) and not leaf.is_meta), None
        )
        if device is None:
            device = torch.device("cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu")
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        _exchanged(_padded(_UNWANTED, _FAILED), nothing, _AGREEMENTS.setdefault(group, _Agreement()).room, group)
        raise


# ---- the header of a state


def header_of(state: AttentionState | RidgeState) -> tuple[int, ...]:
    """Return the header of a state's message. States can be merged if their headers are equal except for the
    gradient."""
    kind = KINDS.index(type(state))
    like = state[kind]  # out or moment; its shape determines the shapes of the other fields
    wanted = WANTED if any(field.requires_grad for field in state) else _UNWANTED
    gradient = wanted if torch.is_grad_enabled() else _GRAD_MODE_OFF
    return _padded(gradient, kind, like.element_size(), like.dim(), *like.shape)


def _padded(*numbers: int) -> tuple[int, ...]:
    return (*numbers, *[0] * (NUMBERS - len(numbers)))


def _compare(headers: list[list[int]], alike: bool) -> None:
    """Raise unless the states of all ranks have one type, shape and dtype. If a rank wants a gradient, also raise
    unless all ranks can take part."""
    gradients, kinds, sizes, *_ = zip(*headers, strict=True)
    if _FAILED in kinds:
        ranks = _ranks(kind == _FAILED for kind in kinds)
        raise RuntimeError(f"state: {ranks} raised an error and sent none; see the message there")
    if len({tuple(each[1:]) for each in headers}) > 1:
        brought = [_described(each) for each in headers]
        given = "; ".join(f"{_ranks(other == each for other in brought)}: {each}" for each in dict.fromkeys(brought))
        error = ValueError if len(set(kinds)) == len(set(sizes)) == 1 else TypeError
        raise error(mismatch("state", given, "one type, shape and dtype on all ranks"))
    wanting = f"one that requires a gradient on {_ranks(each == WANTED for each in gradients)}"
    if WANTED in gradients and _GRAD_MODE_OFF in gradients:
        off = _ranks(each == _GRAD_MODE_OFF for each in gradients)
        raise RuntimeError(
            mismatch(
                "state",
                f"{wanting} while grad mode is off on {off}",
                "grad mode on every rank, because all ranks take part in the backward pass",
            )
        )
    if alike and WANTED in gradients and _UNWANTED in gradients:
        raise RuntimeError(
            mismatch("state", wanting, "a gradient required on all ranks or on none, because the graph is compiled")
        )


def _ranks(chosen: Iterable[bool]) -> str:
    ranks = [str(rank) for rank, each in enumerate(chosen) if each]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:8])}{', ...' * (len(ranks) > 8)}"


def _described(header: Sequence[int]) -> str:
    _, kind, size, dims, *shape = header
    name, part = (KINDS[kind].__name__, KINDS[kind]._fields[kind])
    return f"{name} with {part} {tuple(shape[:dims])} torch.float{8 * size}"


# ---- one state, checked, packed and unpacked


def check(state: AttentionState | RidgeState) -> None:
    """Raise unless `state` is a state of consistent shapes and dtypes, on one device."""
    if type(state) not in KINDS:
        raise TypeError(mismatch("state", kind_of(state), "an AttentionState or a RidgeState"))
    for name, field in state._asdict().items():
        if not isinstance(field, Tensor):
            raise TypeError(not_a_tensor(f"state.{name}", field))
        check_dense(f"state.{name}", field)
    like = state[KINDS.index(type(state))]
    if not 2 <= like.dim() <= NUMBERS - 4:
        raise ValueError(mismatch("state", f"tensors of {like.dim()} dimensions", f"2 to {NUMBERS - 4} dimensions"))
    if like.is_meta:
        raise TypeError(mismatch("state", "tensors on device meta", "dense tensors with values"))
    *leading, height, width = like.shape
    wanted: dict[str, tuple[list[int], torch.dtype]]
    if isinstance(state, AttentionState):
        wanted = {
            "out": ([*leading, height, width], state_dtype(like.dtype)),
            "lse": ([*leading, height], torch.float64),
        }
    else:
        matrices = {"gram": [*leading, height, height], "moment": [*leading, height, width]}
        wanted = {name: (shape, torch.float64) for name, shape in matrices.items()} | {"count": (leading, torch.int64)}
    for name, (shape, dtype) in wanted.items():
        field = getattr(state, name)
        if list(field.shape) != shape:
            raise ValueError(mismatch(f"state.{name}", f"shape {tuple(field.shape)}", tuple(shape)))
        if field.dtype != dtype:
            raise TypeError(mismatch(f"state.{name}", field.dtype, dtype))
        if field.device != like.device:
            raise ValueError(
                mismatch(f"state.{name}", f"device {field.device}", f"{like.device}, the device of the other fields")
            )
    if isinstance(state, AttentionState):
        refuse_wrong_sums(state, "state")


def packed_bytes(fields: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all fields, and zeros up to a multiple of 8. The fields are packed in reverse order,
    so that each field is aligned."""
    parts = [field.resolve_neg().contiguous().view(-1).view(torch.uint8) for field in reversed(fields)]
    missing = -sum(part.numel() for part in parts) % 8
    return torch.cat([*parts, parts[0].new_zeros(missing)])


def unpacked(rows: Tensor, fields: Sequence[Tensor]) -> list[Tensor]:
    """Return the fields (W, ...) of all ranks from their packed states (W, bytes). `fields` have the shapes and dtypes
    of one rank's fields."""
    parts, begin = [], 0
    for field in reversed(fields):
        end = begin + field.numel() * field.element_size()
        parts.append(rows[:, begin:end].view(field.dtype).reshape(len(rows), *field.shape))
        begin = end
    return parts[::-1]
