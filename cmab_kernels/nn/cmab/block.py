"""The Constant Memory Attention Block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...attention import AttentionState
from ...runtime.checks import check_count, check_heads, mismatch
from ..constructors import naming_options
from ..inputs import for_part
from ..parts import computed, plain_parameters
from . import official, one_call
from .layers import CrossAttention, LatentLayer
from .streaming import StreamingBlocks
from .window import own_stream

if TYPE_CHECKING:
    from typing import Self


class CMAB(StreamingBlocks):
    """Attention of latents over a set of any size, with memory independent of the size and updates in O(new points).

    CMAB(L_I, X) = SA(CA(L_I, SA(CA(L_B, X)))). The block latents L_B are parameters, and a feed-forward layer follows
    each CA and each SA. Only CA(L_B, X) reads the data. Its result is kept as an `AttentionState`, and all other layers
    have a constant cost. Source: Memory Efficient Neural Processes via Constant Memory Attention Block (Feng et al.,
    ICML 2024), section 4.

    Args:
        dim: columns of the inputs and of all latents.
        num_latents: L_B, the number of block latents. They are drawn from N(0, 1).
        num_heads: H, a divisor of dim (`ValueError` otherwise).
        ff_dim: hidden width of the feed-forward layers; None means 2 * dim.
        device, dtype: of the parameters: float64, float32, bfloat16 or float16.
        residual: "input": each layer adds its result to its input x, as in a pre-norm Transformer. "normed": each layer
            adds its result to norm(x), as in the authors' code. `from_official` makes blocks of this kind.
        window: None, or an int >= 1 (`ValueError` otherwise): the module's own stream then holds
            the newest `window` chunks, and `update` drops older ones (see
            `cmab_kernels.StateWindow`).

    Inputs are (B, N, dim) for any N, including 0. Latents are (B, L_I, dim), or (L_I, dim) shared over the batch. Both
    have the module's dtype. A `key_padding_mask` (B, N) bool is True at inputs to ignore. The values of ignored inputs
    do not matter and may be NaN. A wrong shape, dtype or device raises a `ValueError` or `TypeError` that names the
    argument, and every state stays unchanged.

    The operator normalises and projects the inputs inside (`cmab_kernels.projected_attention_state`). Memory is
    therefore constant in N, in training too, apart from the inputs' own gradient. On a GPU this holds for heads up to
    256 wide, and in training for `dim` up to 128. Above these limits keys and values are written to memory: in chunks
    with grad mode off, and all at once where the backward pass needs them. Autocast makes a copy of the inputs in its
    dtype.

    `update` and `remove` take a state and return the next one. Without a state they advance the module's own stream,
    `stream.state`. It is None before the first update and after `stream.state = None`. Otherwise it is a state that is
    part of the `state_dict`, in float32 even in a half-precision module (see `AttentionStream`). The module's own
    stream holds no autograd graph, so advancing the stream with a gradient raises a `RuntimeError`. `forward` neither
    reads nor writes the stream. A state is valid only with the weights that made it. Heads may be pruned. After heads
    that read the inputs are pruned, assign `stream = AttentionStream(heads, latents, width)`, or a `WindowStream`, with
    the sizes that remain.

    The parameters are listed in the order of the computation, so that weights trained elsewhere can
    be mapped. `latents` (L_B, dim) is the first. `compress` (block latents over inputs) and
    `retrieve` (latents over block latents) follow. Each of the two has `cross_attention`,
    `cross_feed_forward`, `self_attention` and `self_feed_forward`. An attention has `norm`,
    `query`, `key`, `value` (no bias) and `output`, and a cross-attention also has `context_norm`. A
    feed-forward layer has `norm`, `expand` (features first, then gate) and `contract`. A hook on
    any of these modules makes `forward`, `update` and `remove` call the modules one by one. There
    is one exception: `update` and `remove` do not call `compress` or its `cross_attention`, because
    a stream keeps the state between the two halves of that call.

    >>> block = cmab_kernels.nn.CMAB(dim=16, num_latents=8, num_heads=2).eval()
    >>> points, latents = torch.randn(1, 1000, 16), torch.randn(4, 16)
    >>> with torch.no_grad():
    ...     whole = block(points, latents)
    ...     for chunk in points.split(300, dim=1):
    ...         streamed = block.update(chunk, latents).latents
    >>> torch.allclose(whole, streamed, atol=1e-5)
    True
    """

    @naming_options
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
        window: int | None = None,
    ) -> None:
        dim, num_heads = check_heads("dim", dim, num_heads)
        num_latents = check_count("num_latents", num_latents, least=0)
        ff_dim = 2 * dim if ff_dim is None else check_count("ff_dim", ff_dim)
        super().__init__()
        self.latents = nn.Parameter(torch.randn(num_latents, dim, device=device, dtype=dtype))
        self.compress = LatentLayer(dim, num_heads, ff_dim, residual, device=device, dtype=dtype)
        self.retrieve = LatentLayer(dim, num_heads, ff_dim, residual, device=device, dtype=dtype)
        self.stream = own_stream(window, num_heads, num_latents, dim // num_heads, device=device, dtype=dtype)

    @classmethod
    def from_official(cls, state_dict: Mapping[str, Tensor], *, num_heads: int) -> Self:
        """Return a block with weights that the authors' code saved for one block, and with the residual of that code.

        Args:
            state_dict: maps names such as `latents` and `layer_cross_attn.fn.to_q.weight` to tensors, which are copied.
            num_heads: H. The weights do not show this number.

        `ValueError` names weights that are missing, that belong to another model, or that have another shape.

        Source: https://github.com/BorealisAI/constant-memory-anp. The tests compare the block's outputs with that
        code's outputs.
        """
        official.check_weights(state_dict)
        for needed in ("latents", "cross_ff.fn.net.2.weight"):
            if needed not in state_dict:
                raise ValueError(mismatch("state_dict", f"no {needed!r}", f"the weights of a {cls.__name__}"))
        latents, ff_dim = state_dict["latents"], state_dict["cross_ff.fn.net.2.weight"].shape[-1]
        if latents.dim() != 2:
            raise ValueError(mismatch("state_dict['latents']", f"shape {tuple(latents.shape)}", "(L_B, dim)"))
        made = cls(latents.shape[1], len(latents), num_heads, ff_dim, latents.device, latents.dtype, residual="normed")
        official.load(made, state_dict, official.name_in_block)
        return made

    def forward(self, inputs: Tensor, latents: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the latents (B, L_I, dim) after attention to all inputs. `forward` reads and writes no state."""
        self = self._computed()
        self._check(inputs, latents, key_padding_mask)
        result = one_call.forward([self], inputs, latents, key_padding_mask)
        if result is not None:
            return result
        if calls_compress(self):
            return self.retrieve(
                over_batch(latents, inputs), self.compress(for_part(self.latents), inputs, key_padding_mask)
            )
        return self._retrieve(latents, self._read(inputs, None, key_padding_mask))

    @property
    def _blocks(self) -> list[CMAB]:
        return [self]

    def _computed(self) -> CMAB:
        return computed(self)

    def _read(self, inputs: Tensor, state: AttentionState | None, key_padding_mask: Tensor | None) -> AttentionState:
        """Return the state of CA(L_B, X), taken before the output projection."""
        return self.compress.cross_attention.read(for_part(self.latents), inputs, state, key_padding_mask)

    def _retrieve(self, latents: Tensor, state: AttentionState) -> Tensor:
        """Compute SA(CA(L_I, SA(CA(L_B, X)))) from the state of CA(L_B, X)."""
        result = one_call.attend([self], latents, state.out)
        if result is not None:
            return result
        block = self.compress.after_context(self.compress.cross_attention.add(for_part(self.latents), state.out))
        return self.retrieve(over_batch(latents, state.out), block)


def calls_compress(block: CMAB) -> bool:
    """Return whether `forward` must call `compress`: it, or its cross-attention, was replaced, wrapped or hooked.

    Streams call the parts of `compress` instead.
    """
    compress = block.compress
    return (
        plain_parameters(compress, LatentLayer) is None
        or plain_parameters(compress.cross_attention, CrossAttention) is None
    )


def over_batch(latents: Tensor, batched: Tensor) -> Tensor:
    """Return latents (B, L, C) with the batch size B of `batched`; latents (L, C) are expanded."""
    latents = for_part(latents)
    return latents if latents.dim() == 3 else latents.expand(batched.shape[0], -1, -1)
