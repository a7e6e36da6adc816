"""Modules whose context is spread over the ranks of a group: each rank reads its part, and all go on from the merged state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

from torch import Tensor, nn

from ..attention import AttentionState, check_state, merge_states
from ..intention import RidgeState, check_ridge, merge_ridge, ridge_state
from ..nn import CMAB, Attended, CMABStack, CMABUpdate, MultiheadAttention, MultiheadIntention
from ..nn.inputs import split_heads
from ..nn.parts import computed
from ..runtime.checks import over_batch, wrong
from .merge import State, accepted, all_merge_state
from .messages import announced, members

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Group(NamedTuple):
    """A process group, or None. Copies have the same one, as no process has two; it is not to be pickled."""

    group: ProcessGroup | None

    def __copy__(self) -> _Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self

    def __reduce__(self) -> Any:
        if self.group is None:
            return _Group, (None,)
        allowed = "save the state_dict(), and load it into a module that each process makes with its own group"
        raise TypeError(wrong("group", "is a process group, which belongs to its process and cannot be pickled", allowed))


class ContextSharded(nn.Module, Generic[State]):
    """Base class: a module whose context is spread over the ranks of a group.

    The wrapped module is the attribute `module`, with its parameters and its own stream, which is advanced on all ranks alike. An error
    that one rank raises for its arguments or its stream makes all ranks raise, and no stream advances. A copy has weights of its own and
    the same group. A module with a group cannot be pickled (`TypeError`): save its `state_dict`.
    """

    wraps: ClassVar[tuple[type[nn.Module], ...]]
    """The modules that this class wraps."""
    merge: ClassVar[Callable[..., Any]]
    """The function that merges two states of it."""

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None) -> None:
        super().__init__()
        if not isinstance(module, self.wraps):
            given, allowed = type(module), " or ".join(f"a cmab_kernels.nn.{each.__name__}" for each in self.wraps)
            raise TypeError(wrong("module", f"is a {given.__module__}.{given.__name__}", f"{allowed} is needed"))
        self.module, self._group = module, _Group(group)

    @property
    def group(self) -> ProcessGroup | None:
        """The process group; None is the default one."""
        return self._group.group

    def _read(self, read: Callable[[], State], before: State | None = None) -> State:
        """Return the state `before`, the same on all ranks, with what the ranks read added."""
        group = members(self.group)
        with announced(group, next(chain(self.parameters(), self.buffers()))):
            part = read()
            if before is not None:
                _check_like(part, before)
        merged = all_merge_state(part, group)
        return merged if before is None else self.merge(before, merged)


def _check_like(part: AttentionState | RidgeState, state: Any) -> None:
    """Raise unless `state` has the type, shapes, dtypes and device of `part`, with which it is to be merged."""
    if isinstance(part, AttentionState):
        check_state(state, part.out.shape, part.out.dtype, part.out.device)
    else:
        check_ridge(state, part.moment.shape, part.moment.device)


class ShardedCMAB(ContextSharded[AttentionState]):
    """A `nn.CMAB` or `nn.CMABStack` whose inputs are spread over the ranks of a group: it returns what one process returns that has read
    all inputs.

    Each rank reads its own part of the inputs, of any length, also 0. One collective merges the states. The rest, whose cost does not
    depend on the inputs, runs on every rank, so every rank has the same result and the same state. Latents, batch and weights must be the
    same on all ranks.

    Args:
        module: the block or stack; it is the attribute `module`, so that names in the `state_dict` begin with "module.".
        group: a process group; None is the default one.

    The loss of every rank counts, as in `all_merge_state`. Where every rank takes the same loss from the result, `DistributedDataParallel`
    or `fully_shard` of this module gives the parameter gradients of one process that has read all inputs; gradients with respect to inputs
    are those of W losses.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)      # or started by torchrun, on any number
    >>> block = cmab_kernels.nn.CMAB(dim=16, num_latents=8, num_heads=2)
    >>> points, latents = torch.randn(1, 1000, 16), torch.randn(4, 16)
    >>> own = points.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]
    >>> torch.allclose(cmab_kernels.distributed.ShardedCMAB(block)(own, latents), block(points, latents), atol=1e-5)
    True
    >>> dist.destroy_process_group()
    """

    wraps = (CMAB, CMABStack)
    merge = staticmethod(merge_states)
    module: CMAB | CMABStack

    def forward(self, inputs: Tensor, latents: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the latents (B, L_I, dim) after they attended to the inputs of all ranks; arguments as in `CMAB.forward`."""
        return self._updated(inputs, latents, None, key_padding_mask).latents

    def update(
        self, new_inputs: Tensor, latents: Tensor, state: AttentionState | None = None, *, key_padding_mask: Tensor | None = None
    ) -> CMABUpdate:
        """Return the result over all inputs so far; every rank adds its own. Arguments as in `CMAB.update`.

        `state` is that of all ranks, as an earlier call returned it; with None the module's own stream is advanced, on all ranks alike.
        """
        stream = self.module.stream
        result = self._updated(new_inputs, latents, stream.held if state is None else state, key_padding_mask)
        if state is None:
            stream.state = result.state
        return result

    def _updated(self, inputs: Tensor, latents: Tensor, before: AttentionState | None, key_padding_mask: Tensor | None) -> CMABUpdate:
        module = self.module._computed()

        def read() -> AttentionState:
            module._check(inputs, latents, key_padding_mask)
            return module._read(inputs, None, key_padding_mask)

        state = self._read(read, before)
        nothing = inputs[:, :0]  # what follows a merged state needs no inputs
        return CMABUpdate(module.update(nothing, accepted(latents), state).latents, state)

    def init_state(self, batch: int) -> AttentionState:
        """Return the state of no inputs."""
        return self.module.init_state(batch)


class ShardedMultiheadAttention(ContextSharded[AttentionState]):
    """A `nn.MultiheadAttention` whose keys and values are spread over the ranks of a group, as `ShardedCMAB` does it for a block.

    The query is the same on all ranks. With `add_bias_kv` or `add_zero_attn` the extra keys count once.

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
    module: MultiheadAttention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """Return (out, None) over the keys of all ranks; arguments as in `torch.nn.MultiheadAttention` with `need_weights=False`.

        `RuntimeError` where dropout would apply, and a `TypeError` for a mask that is not bool.
        """
        return self._attend(query, key, value, None, key_padding_mask).out, None

    def attend_state(
        self, query: Tensor, inputs: Tensor, state: AttentionState | None = None, *, key_padding_mask: Tensor | None = None
    ) -> Attended:
        """Attend to a stream, to which every rank adds its own inputs. Arguments as in `MultiheadAttention.attend_state`.

        `state` is that of all ranks, as an earlier call returned it.
        """
        return self._attend(query, inputs, inputs, state, key_padding_mask)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, state: AttentionState | None, key_padding_mask: Tensor | None) -> Attended:
        module = computed(self.module)

        def read() -> AttentionState:
            module._refuse_to_drop()
            module._check(key_padding_mask, query=query, key=key, value=value)
            return module._read(module._project(0, query), key, value, None, key_padding_mask)

        updated = self._read(read, state)
        return Attended(module._answer(module._project(0, query), updated, query), updated)


class ShardedMultiheadIntention(ContextSharded[RidgeState]):
    """A `nn.MultiheadIntention` whose keys and values are spread over the ranks of a group, as `ShardedCMAB` does it for a block.

    The query is the same on all ranks. Sums and solves are those of `MultiheadIntention.update` and `predict`, in float64; `predict` of the
    wrapped `module` answers queries from a state of all ranks.

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
    module: MultiheadIntention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """Return (out, None) over the keys of all ranks; arguments as in `MultiheadIntention` with `need_weights=False`."""
        module = computed(self.module)

        def read() -> RidgeState:
            pairs = module._pairs(key, value, key_padding_mask)
            module._check(None, key=key, query=query)
            over_batch(split_heads(module._batch_first(query), module.num_heads), pairs["key"], len(pairs["key"]))
            return ridge_state(**pairs)

        sums = self._read(read)
        return module.predict(accepted(query), sums), None

    def update(
        self, key: Tensor, value: Tensor | None = None, *, state: RidgeState | None = None, key_padding_mask: Tensor | None = None
    ) -> RidgeState:
        """Return the state with the keys and values of all ranks added. Arguments as in `MultiheadIntention.update`.

        `state` is that of all ranks, as an earlier call returned it; with None the module's own stream is advanced, on all ranks alike.
        """
        before = self.module.stream.held if state is None else state
        updated = self._read(lambda: ridge_state(**self.module._pairs(key, value, key_padding_mask)), before)
        if state is None:
            self.module.stream.state = updated
        return updated

    def init_state(self, batch: int) -> RidgeState:
        """Return the state of no keys."""
        return self.module.init_state(batch)
