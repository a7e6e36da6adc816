"""The base class of a block and of a stack of blocks: streams whose update time depends on the new inputs only."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from ...attention import AttentionState, check_state, decayed, subtract_state
from ...runtime.checks import as_decay, check_mask, kind_of, mismatch
from ..inputs import check_features
from ..stream import AttentionStream, follow_weights, refuse_to_record, with_own_streams
from . import one_call
from .window import WindowStream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from .block import CMAB


class CMABUpdate(NamedTuple):
    """The return value of `update`: the result of the block or stack, and the state to continue from."""

    latents: Tensor
    """(B, L_I, dim)"""
    state: AttentionState


class CMABRemoval(NamedTuple):
    """The return value of `remove`: the result of the block or stack, the state to continue from, and accurate rows.

    `reliable` says which rows of the state are accurate.
    """

    latents: Tensor
    """(B, L_I, dim)"""
    state: AttentionState
    reliable: Tensor
    """bool (B, H, L_B), or (K, B, H, L_B) for a stack, as in `cmab_kernels.Removal`."""


class StreamingBlocks(nn.Module):
    """Base class of `CMAB` and `CMABStack`: one pass over inputs makes a state, and the rest has a constant cost."""

    stream: AttentionStream
    """The module's own stream. It is the last submodule, because `follow_weights` looks at the submodules before it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(follow_weights)

    __copy__ = with_own_streams

    def update(
        self,
        new_inputs: Tensor,
        latents: Tensor,
        state: AttentionState | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        decay: float | Tensor | None = None,
    ) -> CMABUpdate:
        """Return the result over all inputs so far, in time O(new inputs).

        With `state` None the update advances the module's own stream. Streaming equals `forward` over all inputs at
        once, for any division into chunks. Gradients flow through a chain of states that the caller
        passes. `decay` reduces the weight of the earlier inputs, as in
        `cmab_kernels.attention_state`: a number in (0, 1], or a tensor of such numbers that
        broadcasts to the state's `lse`.

        In a module with a `window`, the module's own stream holds the newest `window` chunks. The
        inputs of a call are one chunk, and the result covers all chunks that the stream holds. A
        window drops old chunks at full weight, so a `decay` raises a `ValueError`. A `state` that
        the caller passes has no window.
        """
        if state is None:
            refuse_to_record("update", "update(..., state)")
        self = self._computed()
        self._check_streamed()
        self._check(new_inputs, latents, key_padding_mask)
        if state is None and isinstance(self.stream, WindowStream):
            return self._slide(self.stream, new_inputs, latents, key_padding_mask, decay)
        before = self.stream.held if state is None else state
        if decay is not None:
            before = self._decayed(before, decay, new_inputs)
        found = one_call.update(self._blocks, new_inputs, latents, before, key_padding_mask, self.stream.lead)
        if found is None:
            after = self._read(new_inputs, before, key_padding_mask)
            found = self._retrieve(latents, after), after
        if state is None:
            self.stream.state = found[1]
        return CMABUpdate(*found)

    def _slide(
        self,
        stream: WindowStream,
        new_inputs: Tensor,
        latents: Tensor,
        key_padding_mask: Tensor | None,
        decay: float | Tensor | None,
    ) -> CMABUpdate:
        """`update` of the module's own stream, which holds a window."""
        if decay is not None:
            raise ValueError(
                mismatch("decay", kind_of(decay), "None, because the module's own window drops inputs at full weight")
            )
        window = stream.pushed(self._read(new_inputs, None, key_padding_mask))
        state = window.state
        result = CMABUpdate(self._retrieve(latents, state), state)
        stream.hold(window)
        return result

    def _decayed(
        self, state: AttentionState | None, decay: float | Tensor, new_inputs: Tensor
    ) -> AttentionState | None:
        """Return the state with the weight of its inputs multiplied by `decay`; None stays None."""
        shape = (*self.stream.lead, new_inputs.shape[0], *self.stream.shape)
        decay = as_decay(decay, shape[:-1], new_inputs.device)
        if state is None:
            return None
        check_state(state, shape, self.stream.state_dtype, new_inputs.device)
        return decayed(state, decay)

    def remove(
        self,
        old_inputs: Tensor,
        latents: Tensor,
        state: AttentionState | None = None,
        *,
        key_padding_mask: Tensor | None = None,
    ) -> CMABRemoval:
        """Return the result without `old_inputs`, in time O(old inputs).

        With `state` None the removal changes the module's own stream. The state must contain the old inputs. A removal
        loses digits to cancellation; see `cmab_kernels.remove_from_state` for `reliable`. A `RuntimeError` is raised if
        the module's own stream has seen no input. A window drops its inputs itself. So without
        `state`, a module with a `window` raises a `ValueError`.
        """
        if state is None:
            refuse_to_record("remove", "remove(..., state)")
            if isinstance(self.stream, WindowStream):
                raise ValueError(
                    mismatch("state", None, "a state, because the module's own window drops inputs itself")
                )
        self = self._computed()
        self._check_streamed()
        before = self.stream.started(state)
        self.stream._check(before)
        self._check(old_inputs, latents, key_padding_mask)
        left, reliable = subtract_state(before, self._read(old_inputs, None, key_padding_mask))
        result = CMABRemoval(self._retrieve(latents, left), left, reliable)
        if state is None:
            self.stream.state = left
        return result

    def init_state(self, batch: int) -> AttentionState:
        """Return the state of no inputs, to start a stream that the caller keeps.

        The docstring of the class describes `out` and `lse`.
        """
        return self.stream.init_state(batch)

    @property
    @abstractmethod
    def _blocks(self) -> Sequence[CMAB]:
        """The blocks, first to last."""

    @abstractmethod
    def _computed(self) -> Self:
        """Return the module, or a stand-in with computed values if the module has parametrizations."""

    @abstractmethod
    def _read(self, inputs: Tensor, state: AttentionState | None, key_padding_mask: Tensor | None) -> AttentionState:
        """Return the state of CA(L_B, X) over these inputs and the inputs of `state`."""

    @abstractmethod
    def _retrieve(self, latents: Tensor, state: AttentionState) -> Tensor:
        """Return the latents after all layers that follow CA(L_B, X), given the state of CA(L_B, X)."""

    def _check(self, inputs: Tensor, latents: Tensor, key_padding_mask: Tensor | None) -> None:
        """Raise unless the arguments fit. A wrapper may hide the latents of its block; such a block
        checks the arguments when it is called."""
        for block in self._blocks:
            weight = getattr(block, "latents", None)
            if weight is not None:
                check_inputs(inputs, latents, key_padding_mask, weight)
                return

    def _check_streamed(self) -> None:
        """Raise if a block has no state. Some wrappers have none."""
        for i, block in enumerate(self._blocks):
            if not hasattr(block, "_read"):
                raise TypeError(
                    mismatch(
                        f"blocks[{i}]",
                        kind_of(block),
                        "a CMAB, because only a CMAB has a state; `forward` calls any block",
                    )
                )


def check_inputs(inputs: Tensor, latents: Tensor, key_padding_mask: Tensor | None, weight: Tensor) -> None:
    """Raise unless the arguments of a block or a stack fit each other and the module's parameter `weight` (...,
    dim)."""
    check_features("inputs", inputs, "(B, N, dim)", (3,), weight.shape[-1], weight)
    check_latents(latents, inputs.shape[0], "inputs", weight)
    check_mask(key_padding_mask, inputs, inputs.shape[:2])


def check_latents(latents: Tensor, batch: int, whose: str, weight: Tensor) -> None:
    """Raise unless the latents fit the module's parameter `weight` (..., dim) and `batch`.

    `whose` names, in the error message, the argument that has this batch size.
    """
    check_features("latents", latents, "(B, L_I, dim) or (L_I, dim)", (2, 3), weight.shape[-1], weight)
    if latents.dim() == 3 and latents.shape[0] != batch:
        raise ValueError(mismatch("latents", f"batch {latents.shape[0]}", f"batch {batch}, that of {whose}"))
