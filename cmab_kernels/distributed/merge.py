"""States that are merged over the ranks of a group, with gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..attention import AttentionState
from ..attention.api import union
from ..attention.state import share_gradient
from ..intention import RidgeState
from ..runtime.checks import mismatch
from ..runtime.tracing import is_differentiated
from .messages import WANTED, announced, check, gathered, header_of, members, packed_bytes, unpacked

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

State = TypeVar("State", AttentionState, RidgeState)

LIB = torch.library.Library("cmab", "FRAGMENT")
LIB.define("gather_states(Tensor[] fields, SymInt[] header, int world, str group) -> Tensor")
LIB.define("sum_over_ranks(Tensor summand, str group) -> Tensor")


def all_merge_state(state: State, group: ProcessGroup | None = None) -> State:
    """Return the state of everything that the processes of `group` have read: their states, merged in rank order.

    Every rank of the group calls this with the state of its own part of the keys. Every rank gets a bitwise equal
    state: the same as `merge_states` or `merge_ridge` of all states. A rank that has read nothing passes an empty
    state.

    A call makes one collective (`all_gather`). Its size does not depend on how many keys were read. There is a second
    collective if a state is larger than all states that the group has merged before (in the first call, larger than 64
    KiB): the ranks then agree on the size first. A state is sent in a message that has room for the largest state so
    far. So merge states of very different sizes over different groups.

    The result is differentiable to any order. A backward pass is one collective too (`all_reduce`), and every rank must
    take part in it: the loss of every rank has to depend on the result. **The losses of all ranks count**: a gradient
    is that of the sum of the losses of all ranks. If all W ranks compute the same loss from the result, each parameter
    gets W times the gradient of that loss over all keys. `DistributedDataParallel` and `fully_shard` average over
    ranks, so that they give exactly the gradient of one loss.

    Args:
        state: an `AttentionState` or a `RidgeState`, with any leading dimensions before (H, L, E), or (H, D, E).
        group: a process group; None is the default group.

    Raises:
        RuntimeError: `torch.distributed` is not initialised; another rank raised an error before it merged its state;
            or the call is under a transform of `torch.func` or in forward mode, which a collective does not support.
        TypeError, ValueError: `state` is not a state or has no values, or its type, shapes or dtypes differ from those
            of the other ranks. Every rank raises. On a GPU, comparing shapes with the other ranks would make the
            program wait. There, a rank whose own state has the shapes and dtypes of an earlier call gets NaN instead of
            an error.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or torchrun, on any number
    >>> query, points = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 10, 8)
    >>> own = points.tensor_split(dist.get_world_size(), dim=2)[dist.get_rank()]
    >>> merged = cmab_kernels.distributed.all_merge_state(cmab_kernels.attention_state(query, own, own))
    >>> torch.allclose(merged.out, cmab_kernels.attention_state(query, points, points).out, atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    group = members(group)
    with announced(group, state):
        if is_differentiated():
            given = "tensors under a transform of torch.func or in forward mode"
            raise RuntimeError(mismatch("state", given, "plain tensors, because a collective has only a backward mode"))
        check(state)
        header = header_of(state)
        fields = tuple(field.detach() for field in state)
        # Pack inside this context, so that the other ranks learn of it if memory runs out.
        packed = None if torch.compiler.is_compiling() else packed_bytes(fields)
    if packed is None:
        world = torch.distributed.get_world_size(group)
        rows, gradient = torch.ops.cmab.gather_states(fields, header, world, group.group_name), header[0] == WANTED
    else:
        rows, gradient = gathered(packed, header, group)
    if not gradient:
        return _merged(type(state), rows, fields)
    state = type(state)(*map(accepted, state))
    if header[0] != WANTED:  # other ranks want a gradient, so this rank takes part in the backward pass
        state = type(state)(
            *(field.detach().requires_grad_() if field.is_floating_point() else field for field in state)
        )
    return type(state)(*_Merge.apply(type(state), group.group_name, rows, *state))


def accepted(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if autograd is on and the tensor was made under inference mode, because autograd
    refuses such a tensor.

    A rank that raises after the merge would leave the others waiting in the backward pass. Compilers do not support
    inference mode.
    """
    refused = torch.is_grad_enabled() and not torch.compiler.is_compiling() and tensor.is_inference()
    return tensor.clone() if refused else tensor


def _merged(kind: type[State], rows: Tensor, fields: Sequence[Tensor]) -> State:
    """Return the merged state of all ranks from their packed states (W, bytes)."""
    parts = [field.unbind(0) for field in unpacked(rows, fields)]
    if issubclass(kind, AttentionState):
        return union(*map(kind, *parts))
    return kind(*(functools.reduce(torch.add, summands) for summands in parts))


class _Merge(torch.autograd.Function):
    """The merged state from the packed states of all ranks, with the gradient of this rank's own state.

    The merged state is the same on all ranks. So the gradient needs only the sum over ranks of the gradients with
    respect to the merged state. A backward pass sends as many numbers as one state has, for any number of ranks, and
    keeps nothing of the states of the other ranks.
    """

    @staticmethod
    def forward(ctx: Any, kind: type[State], group: str, rows: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
        merged = _merged(kind, rows, fields)
        ctx.kind, ctx.group = kind, group
        ctx.save_for_backward(*fields, *merged)
        ctx.mark_non_differentiable(*(field for field in merged if not field.is_floating_point()))
        return tuple(merged)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        own, merged = saved[: len(grads)], saved[len(grads) :]
        floating = [grad for grad, field in zip(grads, own, strict=True) if field.is_floating_point()]
        summed = _SumOverRanks.apply(torch.cat([grad.double().flatten() for grad in floating]), ctx.group)
        pieces = summed.split([grad.numel() for grad in floating])
        total = [piece.view(grad.shape) for piece, grad in zip(pieces, floating, strict=True)]
        if ctx.kind is AttentionState:
            down, slope = share_gradient(AttentionState(*own), AttentionState(*merged), *total)
            return None, None, None, down.to(own[0].dtype), slope
        return None, None, None, *total, None


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks, on every rank. The losses of all ranks count, so the derivative is again a
    sum over ranks."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: str) -> Tensor:
        ctx.group = group
        return torch.ops.cmab.sum_over_ranks(summand, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.group), None


# ---- for compilers, which see a collective as one operator


@torch.library.impl(LIB, "gather_states", "CompositeExplicitAutograd")
def _(fields: list[Tensor], header: list[int], world: int, group: str) -> Tensor:
    rows, _ = gathered(packed_bytes(fields), tuple(header), _named(group), alike=True)
    return rows.clone()


@torch.library.register_fake("cmab::gather_states", lib=LIB)
def _(fields: list[Tensor], header: list[int], world: int, group: str) -> Tensor:
    size = sum(field.numel() * field.element_size() for field in fields)
    return fields[0].new_empty(world, (size + 7) // 8 * 8, dtype=torch.uint8)


@torch.library.impl(LIB, "sum_over_ranks", "CompositeExplicitAutograd")
def _(summand: Tensor, group: str) -> Tensor:
    total = summand.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=_named(group))
    return total


@torch.library.register_fake("cmab::sum_over_ranks", lib=LIB)
def _(summand: Tensor, group: str) -> Tensor:
    return summand.new_empty(summand.shape)


def _named(group: str) -> ProcessGroup:
    """Return the group of this name, found in the way that torch's own operators find theirs."""
    return torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]  # its type is derived from str
