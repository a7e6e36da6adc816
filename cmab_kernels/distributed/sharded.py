"""Modules whose context is spread over the ranks of a group: each rank reads its part, and all ranks continue from the
merged state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import AttentionState, check_state, decayed, merge_states
from ..intention import RidgeState, check_ridge, decayed_ridge, merge_ridge, ridge_state
from ..nn import CMAB, Attended, CMABStack, CMABUpdate, MultiheadAttention, MultiheadIntention, WindowStream
from ..nn.inputs import split_heads
from ..nn.parts import computed
from ..nn.stream import with_own_streams
from ..runtime.checks import as_decay, mismatch, over_batch
from .merge import State, accepted, all_merge_state
from .messages import announced, members

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Group(NamedTuple):
    """A process group, or None. A group cannot leave its process, so a copy of the object refers to
    the same group. The object cannot be pickled."""

    group: ProcessGroup | None

    def __copy__(self) -> _Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self

    def __reduce__(self) -> Any:
        if self.group is None:
            return _Group, (None,)
        allowed = "None; save the state_dict(), and load it into a module that each process makes with its own group"
        raise TypeError(
            mismatch("group", "a process group, which belongs to its process and cannot be pickled", allowed)
        )


class ContextSharded(nn.Module, Generic[State]):
    """Base class: a module whose context is spread over the ranks of a group.

    The wrapped module is the attribute `module`, with its parameters and its own stream. All ranks advance the stream
    in the same way. If one rank raises an error for its arguments or its stream, all ranks raise, and no stream
    advances. A copy has its own stream, a deep copy also has its own weights, and both have the same group. A module
    with a group cannot be pickled (`TypeError`): save its `state_dict`.
    """

    wraps: ClassVar[tuple[type[nn.Module], ...]]
    """The classes of modules that this class wraps."""
    merge: ClassVar[Callable[..., Any]]
    """The function that merges two states of the wrapped module."""
    fade: ClassVar[Callable[..., Any]]
    """The function that multiplies the weight of what a state has read by a checked `decay`."""
    __copy__ = with_own_streams

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None) -> None:
        super().__init__()
        if not isinstance(module, self.wraps):
            given, allowed = type(module), " or ".join(f"a cmab_kernels.nn.{each.__name__}" for each in self.wraps)
            raise TypeError(mismatch("module", f"a {given.__module__}.{given.__name__}", allowed))
        self.module, self._group = module, _Group(group)

    @property
    def group(self) -> ProcessGroup | None:
        """The process group; None is the default group."""
        return self._group.group

    def _read(
        self, read: Callable[[], State], before: State | None = None, decay: float | Tensor | None = None
    ) -> State:
        """Add what the ranks read to the state `before`, with the weight of its inputs multiplied by `decay`; return
        the result. State and decay are the same on all ranks."""
        group = members(self.group)
        with announced(group, next(chain(self.parameters(), self.buffers()))):
            part = read()
            if decay is not None:
                shape, device = _weighed(part)
                decay = as_decay(decay, shape, device)
            if before is not None:
                _check_like(part, before)
                before = before if decay is None else self.fade(before, decay)
        merged = all_merge_state(part, group)
        return merged if before is None else self.merge(before, merged)


def _check_like(part: AttentionState | RidgeState, state: Any) -> None:
    """Raise unless `state` can be merged with `part`: it must have the same type, shapes, dtypes and device."""
    if isinstance(part, AttentionState):
        check_state(state, part.out.shape, part.out.dtype, part.out.device)
    else:
        check_ridge(state, part.moment.shape, part.moment.device)


def _weighed(part: AttentionState | RidgeState) -> tuple[torch.Size, torch.device]:
    """Return the shape (B, H, ...) to which a decay broadcasts, and the device."""
    weighed = part.lse if isinstance(part, AttentionState) else part.moment[..., 0, 0]
    return weighed.shape, weighed.device


class ShardedCMAB(ContextSharded[AttentionState]):
    """A `nn.CMAB` or `nn.CMABStack` whose inputs are spread over the ranks of a group.

    It returns the result of one process that has read all inputs. Each rank reads its own part of the inputs. A part
    may have any length, including 0. One collective merges the states. Every rank then does the rest of the work, whose
    cost does not depend on the inputs. So every rank has the same result and the same state. Latents, batch and weights
    must be the same on all ranks.

    Args:
        module: the block or stack. It becomes the attribute `module`, so names in the `state_dict` begin with
            "module.".
        group: a process group; None is the default group.

    The losses of all ranks count, as in `all_merge_state`. If every rank computes the same loss from the result,
    `DistributedDataParallel` or `fully_shard` of this module gives the parameter gradients of one process that has read
    all inputs. Gradients with respect to inputs are then those of W losses.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or torchrun, on any number
    >>> block = cmab_kernels.nn.CMAB(dim=16, num_latents=8, num_heads=2)
    >>> points, latents = torch.randn(1, 1000, 16), torch.randn(4, 16)
    >>> own = points.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]
    >>> torch.allclose(cmab_kernels.distributed.ShardedCMAB(block)(own, latents), block(points, latents), atol=1e-5)
    True
    >>> dist.destroy_process_group()
    """

    wraps = (CMAB, CMABStack)
    merge = staticmethod(merge_states)
    fade = staticmethod(decayed)
    module: CMAB | CMABStack

    def forward(self, inputs: Tensor, latents: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the latents (B, L_I, dim) after they attended to the inputs of all ranks. The arguments are those of
        `CMAB.forward`."""
        return self._updated(inputs, latents, None, key_padding_mask).latents

    def update(
        self,
        new_inputs: Tensor,
        latents: Tensor,
        state: AttentionState | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        decay: float | Tensor | None = None,
    ) -> CMABUpdate:
        """Return the result over all inputs so far; every rank adds its own part. The arguments are those of
        `CMAB.update`.

        `state` is the state of all ranks, as an earlier call returned it. With None, every rank advances the module's
        own stream in the same way; a module with a `window` needs a state (`ValueError`).
        """
        stream = self.module.stream
        if state is None and isinstance(stream, WindowStream):
            raise ValueError(
                mismatch("state", None, "a state, as the window of the module's own stream cannot be spread over ranks")
            )
        result = self._updated(new_inputs, latents, stream.held if state is None else state, key_padding_mask, decay)
        if state is None:
            stream.state = result.state
        return result

    def _updated(
        self,
        inputs: Tensor,
        latents: Tensor,
        before: AttentionState | None,
        key_padding_mask: Tensor | None,
        decay: float | Tensor | None = None,
    ) -> CMABUpdate:
        module = self.module._computed()

        def read() -> AttentionState:
            module._check(inputs, latents, key_padding_mask)
            return module._read(inputs, None, key_padding_mask)

        state = self._read(read, before, decay)
        nothing = inputs[:, :0]  # after the merge, no further inputs are needed
        return CMABUpdate(module.update(nothing, accepted(latents), state).latents, state)

    def init_state(self, batch: int) -> AttentionState:
        """Return the state before any input."""
        return self.module.init_state(batch)


class ShardedMultiheadAttention(ContextSharded[AttentionState]):
    """A `nn.MultiheadAttention` whose keys and values are spread over the ranks of a group, just as `ShardedCMAB`
    spreads inputs.

    The query is the same on all ranks. With `add_bias_kv` or `add_zero_attn`, the extra keys count once.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> attention = cmab_kernels.nn.MultiheadAttention(16, 2, batch_first=True)
    >>> sharded = cmab_kernels.distributed.ShardedMultiheadAttention(attention)
    >>> query, points = torch.randn(1, 4, 16), torch.randn(1, 100, 16)
    >>> own = points.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]
    >>> torch.allclose(sharded(query, own, own)[0], attention(query, points, points)[0], atol=1e-5)
    True
    >>> dist.destroy_process_group()
    """

    wraps = (MultiheadAttention,)
    merge = staticmethod(merge_states)
    fade = staticmethod(decayed)
    module: MultiheadAttention

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return (out, None) over the keys of all ranks. The arguments are those of `torch.nn.MultiheadAttention` with
        `need_weights=False`.

        Raise `RuntimeError` if dropout would apply, and `TypeError` for a mask that is not bool.
        """
        return self._attend(query, key, value, None, key_padding_mask).out, None

    def attend_state(
        self,
        query: Tensor,
        inputs: Tensor,
        state: AttentionState | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        decay: float | Tensor | None = None,
    ) -> Attended:
        """Attend to a stream; every rank adds its own part of the inputs. The arguments are those of
        `MultiheadAttention.attend_state`.

        `state` is the state of all ranks, as an earlier call returned it.
        """
        return self._attend(query, inputs, inputs, state, key_padding_mask, decay)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: AttentionState | None,
        key_padding_mask: Tensor | None,
        decay: float | Tensor | None = None,
    ) -> Attended:
        module = computed(self.module)

        def read() -> AttentionState:
            module._refuse_to_drop()
            module._check(key_padding_mask, query=query, key=key, value=value)
            return module._read(module._project(0, query), key, value, None, key_padding_mask)

        updated = self._read(read, state, decay)
        return Attended(module._answer(module._project(0, query), updated, query), updated)


class ShardedMultiheadIntention(ContextSharded[RidgeState]):
    """A `nn.MultiheadIntention` whose keys and values are spread over the ranks of a group, just as `ShardedCMAB`
    spreads inputs.

    The query is the same on all ranks. Sums and solves are those of `MultiheadIntention.update` and `predict`, in
    float64. `module.predict` answers queries from a state of all ranks.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> module = cmab_kernels.nn.MultiheadIntention(16, 2, batch_first=True)
    >>> sharded = cmab_kernels.distributed.ShardedMultiheadIntention(module)
    >>> query, points = torch.randn(1, 4, 16), torch.randn(1, 100, 16)
    >>> own = points.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]
    >>> torch.allclose(sharded(query, own, own)[0], module(query, points, points, need_weights=False)[0], atol=1e-5)
    True
    >>> dist.destroy_process_group()
    """

    wraps = (MultiheadIntention,)
    merge = staticmethod(merge_ridge)
    fade = staticmethod(decayed_ridge)
    module: MultiheadIntention

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return (out, None) over the keys of all ranks. The arguments are those of `MultiheadIntention` with
        `need_weights=False`."""
        module = computed(self.module)

        def read() -> RidgeState:
            pairs = module._pairs(key, value, key_padding_mask)
            module._check(None, key=key, query=query)
            over_batch(split_heads(module._batch_first(query), module.num_heads), pairs["key"], len(pairs["key"]))
            return ridge_state(**pairs)

        sums = self._read(read)
        return module.predict(accepted(query), sums), None

    def update(
        self,
        key: Tensor,
        value: Tensor | None = None,
        *,
        state: RidgeState | None = None,
        key_padding_mask: Tensor | None = None,
        decay: float | Tensor | None = None,
    ) -> RidgeState:
        """Return the state with the keys and values of all ranks added. The arguments are those of
        `MultiheadIntention.update`.

        `state` is the state of all ranks, as an earlier call returned it. With None, every rank advances the module's
        own stream in the same way.
        """
        before = self.module.stream.held if state is None else state
        updated = self._read(lambda: ridge_state(**self.module._pairs(key, value, key_padding_mask)), before, decay)
        if state is None:
            self.module.stream.state = updated
        return updated

    def init_state(self, batch: int) -> RidgeState:
        """Return the state before any key."""
        return self.module.init_state(batch)
