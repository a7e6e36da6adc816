"""The Constant Memory Attention Block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ...attention import AttentionState, subtract_state
from ...checks import check_count, check_heads, check_mask, wrong
from ..inputs import check_features, for_part
from ..parts import computed, plain_parameters
from ..stream import AttentionStream, follow_weights, refuse_to_record, with_own_streams
from . import official, one_call
from .layers import CrossAttention, LatentLayer

if TYPE_CHECKING:
    from typing import Self


class CMABUpdate(NamedTuple):
    """What `CMAB.update` returns: the result of the block, and the state to continue from."""

    latents: Tensor
    """(B, L_I, dim)"""
    state: AttentionState


class CMABRemoval(NamedTuple):
    """What `CMAB.remove` returns: the result of the block, the state to continue from, and which rows of that state are accurate."""

    latents: Tensor
    """(B, L_I, dim)"""
    state: AttentionState
    reliable: Tensor
    """(B, H, L_B) bool, as in `cmab_kernels.Removal`."""


class CMAB(nn.Module):
    """Attention of latents over a set of any size, in memory that does not depend on that size, and updated in O(new points).

    CMAB(L_I, X) = SA(CA(L_I, SA(CA(L_B, X)))), where the block latents L_B are parameters and each CA and SA is followed by a feed-forward
    layer. Only CA(L_B, X) reads the data, and its result is kept as an `AttentionState`; the cost of the rest is constant. Source: Memory
    Efficient Neural Processes via Constant Memory Attention Block (Feng et al., ICML 2024), section 4.

    Args:
        dim: columns of the inputs and of all latents.
        num_latents: L_B, the number of block latents, which are drawn from N(0, 1).
        num_heads: H, a divisor of dim (`ValueError` otherwise).
        ff_dim: hidden width of the feed-forward layers; None means 2 * dim.
        device, dtype: of the parameters: float64, float32, bfloat16 or float16.
        residual: "input": each layer adds its result to its input x, as in a pre-norm Transformer; "normed": to norm(x), as in the authors'
            code. `from_official` makes such blocks.

    Inputs (B, N, dim), any N, also 0; latents (B, L_I, dim), or (L_I, dim) shared over the batch; both in the module's dtype. A
    `key_padding_mask` (B, N) bool is True at inputs to ignore; their values do not matter, be they NaN. A wrong shape, dtype or device is a
    `ValueError` or `TypeError` that names the argument, and leaves every state as it was.

    Inputs are normed and projected inside the operator (`cmab_kernels.projected_attention_state`), so that memory is constant in N, in
    training too, beyond the inputs' own gradient. On a GPU that holds for heads up to 256 wide, and in training for `dim` up to 128:
    beyond that keys and values are written, in chunks with grad mode off, or all at once where the backward pass needs them. Autocast
    makes a copy of the inputs in its dtype.

    `update` and `remove` take a state and return the next. Without one they advance the module's own stream, `stream.state`: None before
    the first update and after `stream.state = None`, else a state that is part of the `state_dict`, in float32 even in a half-precision
    module (see `AttentionStream`). The own stream holds no autograd graph: to advance it with a gradient is a `RuntimeError`. `forward`
    neither reads nor writes it. A state is valid only with the weights that made it. Heads may be cut off; where those that read the inputs
    were, a new `stream = AttentionStream(heads, latents, width)` keeps what is left.

    Parameters, in the order of the computation, so that weights trained elsewhere can be mapped: `latents` (L_B, dim); then `compress`
    (block latents over inputs) and `retrieve` (latents over block latents), each of `cross_attention`, `cross_feed_forward`,
    `self_attention`, `self_feed_forward`. An attention has `norm`, `query`, `key`, `value` (no bias), `output`, and a cross-attention
    `context_norm`; a feed-forward layer has `norm`, `expand` (features first, then gate) and `contract`. A hook on any of them makes
    `forward` call them one by one, and so do `update` and `remove`, but for `compress` and its `cross_attention`: a stream keeps what
    stands between the two halves of that call.

    >>> block = cmab_kernels.nn.CMAB(dim=16, num_latents=8, num_heads=2).eval()
    >>> points, latents = torch.randn(1, 1000, 16), torch.randn(4, 16)
    >>> with torch.no_grad():
    ...     whole = block(points, latents)
    ...     for chunk in points.split(300, dim=1):
    ...         streamed = block.update(chunk, latents).latents
    >>> torch.allclose(whole, streamed, atol=1e-5)
    True
    """

    def __init__(
        self,
        dim: int,
        num_latents: int,
        num_heads: int,
        ff_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        residual: str = "input",
    ) -> None:
        super().__init__()
        dim, num_heads = check_heads("dim", dim, num_heads)
        num_latents = check_count("num_latents", num_latents, least=0)
        ff_dim = 2 * dim if ff_dim is None else check_count("ff_dim", ff_dim)
        self.latents = nn.Parameter(torch.randn(num_latents, dim, device=device, dtype=dtype))
        self.compress = LatentLayer(dim, num_heads, ff_dim, residual, device=device, dtype=dtype)
        self.retrieve = LatentLayer(dim, num_heads, ff_dim, residual, device=device, dtype=dtype)
        self.stream = AttentionStream(num_heads, num_latents, dim // num_heads, device=device, dtype=dtype)
        self.register_load_state_dict_post_hook(follow_weights)

    __copy__ = with_own_streams

    @classmethod
    def from_official(cls, state_dict: Mapping[str, Tensor], *, num_heads: int) -> Self:
        """Return a block with the weights that the authors' code saves of one of its blocks, and with that code's residual.

        Args:
            state_dict: names, as `latents` and `layer_cross_attn.fn.to_q.weight`, and tensors, which are copied.
            num_heads: H, which the weights do not tell.

        `ValueError` names weights that are missing, that belong to another model, or that have another shape.

        Source: https://github.com/BorealisAI/constant-memory-anp, with whose outputs those of the block are compared in the tests.
        """
        official.check_weights(state_dict)
        for needed in ("latents", "cross_ff.fn.net.2.weight"):
            if needed not in state_dict:
                raise ValueError(wrong("state_dict", f"lacks {needed!r}", f"the weights of a {cls.__name__} are needed"))
        latents, ff_dim = state_dict["latents"], state_dict["cross_ff.fn.net.2.weight"].shape[-1]
        if latents.dim() != 2:
            raise ValueError(wrong("state_dict", f"has 'latents' of shape {tuple(latents.shape)}", "(L_B, dim) is needed"))
        made = cls(latents.shape[1], len(latents), num_heads, ff_dim, latents.device, latents.dtype, residual="normed")
        official.load(made, state_dict, official.name_in_block)
        return made

    def forward(self, inputs: Tensor, latents: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the latents (B, L_I, dim) after they attended to all inputs. No state is read or written."""
        self = self._computed()
        self._check(inputs, latents, key_padding_mask)
        result = one_call.forward([self], inputs, latents, key_padding_mask)
        if result is not None:
            return result
        if calls_compress(self):
            return self.retrieve(over_batch(latents, inputs), self.compress(for_part(self.latents), inputs, key_padding_mask))
        return self._retrieve(latents, self._read(inputs, None, key_padding_mask).out)

    def update(
        self, new_inputs: Tensor, latents: Tensor, state: AttentionState | None = None, *, key_padding_mask: Tensor | None = None
    ) -> CMABUpdate:
        """Return the result over all inputs so far, in time O(new inputs). With `state` None the module's own stream is advanced.

        Streaming equals `forward` over all inputs at once, for any chunking. Gradients flow through a chain of passed states.
        """
        self = self._computed()
        self._check(new_inputs, latents, key_padding_mask)
        if state is None:
            refuse_to_record("update", "update(..., state)")
        before = self.stream.held if state is None else state
        found = one_call.update([self], new_inputs, latents, before, key_padding_mask)
        if found is None:
            updated = self._read(new_inputs, before, key_padding_mask)
            found = self._retrieve(latents, updated.out), updated
        result = CMABUpdate(*found)
        if state is None:
            self.stream.state = result.state
        return result

    def remove(
        self, old_inputs: Tensor, latents: Tensor, state: AttentionState | None = None, *, key_padding_mask: Tensor | None = None
    ) -> CMABRemoval:
        """Return the result without `old_inputs`, in time O(old inputs). With `state` None the module's own stream is changed.

        The inputs must be part of the state. A removal loses digits to cancellation; see `cmab_kernels.remove_from_state` for `reliable`.
        `RuntimeError` if the module's own stream has seen no input.
        """
        if state is None:
            refuse_to_record("remove", "remove(..., state)")
        self = self._computed()
        before = self.stream.started(state)
        self.stream._check(before)
        self._check(old_inputs, latents, key_padding_mask)
        left, reliable = subtract_state(before, self._read(old_inputs, None, key_padding_mask))
        result = CMABRemoval(self._retrieve(latents, left.out), left, reliable)
        if state is None:
            self.stream.state = left
        return result

    def init_state(self, batch: int) -> AttentionState:
        """Return the state of no inputs, to start a stream that the caller keeps: out (batch, H, L_B, dim / H), lse (batch, H, L_B)."""
        return self.stream.init_state(batch)

    def _computed(self) -> CMAB:
        return computed(self)

    def _check(self, inputs: Tensor, latents: Tensor, key_padding_mask: Tensor | None) -> None:
        check_inputs(inputs, latents, key_padding_mask, self.latents)

    def _read(self, inputs: Tensor, state: AttentionState | None, key_padding_mask: Tensor | None) -> AttentionState:
        """Return the state of CA(L_B, X), which comes before the output projection."""
        return self.compress.cross_attention.read(for_part(self.latents), inputs, state, key_padding_mask)

    def _retrieve(self, latents: Tensor, out: Tensor) -> Tensor:
        """Compute SA(CA(L_I, SA(CA(L_B, X)))) from the `out` of the state of CA(L_B, X)."""
        result = one_call.attend([self], latents, out)
        if result is not None:
            return result
        block = self.compress.after_context(self.compress.cross_attention.add(for_part(self.latents), out))
        return self.retrieve(over_batch(latents, out), block)


def calls_compress(block: CMAB) -> bool:
    """Whether `forward` must call `compress`, which, or whose cross-attention, is not just its kind. Streams call its parts."""
    compress = block.compress
    return plain_parameters(compress, LatentLayer) is None or plain_parameters(compress.cross_attention, CrossAttention) is None


def over_batch(latents: Tensor, batched: Tensor) -> Tensor:
    """Return latents (B, L, C), also of (L, C), for the B of `batched`."""
    latents = for_part(latents)
    return latents if latents.dim() == 3 else latents.expand(batched.shape[0], -1, -1)


def check_inputs(inputs: Tensor, latents: Tensor, key_padding_mask: Tensor | None, weight: Tensor) -> None:
    """Raise unless the arguments of a block or a stack fit each other and the module's parameter `weight` (..., dim)."""
    check_features("inputs", inputs, "(B, N, dim)", (3,), weight.shape[-1], weight)
    check_latents(latents, inputs.shape[0], "inputs have", weight)
    check_mask(key_padding_mask, inputs, inputs.shape[:2])


def check_latents(latents: Tensor, batch: int, whose: str, weight: Tensor) -> None:
    """Raise unless the latents fit the module's parameter `weight` (..., dim) and the batch of what is `whose`."""
    check_features("latents", latents, "(B, L_I, dim) or (L_I, dim)", (2, 3), weight.shape[-1], weight)
    if latents.dim() == 3 and latents.shape[0] != batch:
        raise ValueError(wrong("latents", f"has batch {latents.shape[0]}", f"{whose} batch {batch}"))
