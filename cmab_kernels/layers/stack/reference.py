"""The definition of stacked Constant Memory Attention Blocks. For each block, with block latents b,

    m = feed-forward(self-attention(feed-forward(cross-attention(b, inputs))))
    x = feed-forward(self-attention(feed-forward(cross-attention(x, m))))

for latents x (B, L, C) and inputs (B, N, C) (Memory Efficient Neural Processes via Constant Memory
Attention Block, Feng et al., 2024, section 4). Inputs where the mask (B, N) is True are ignored.
The layers are those of `layers.reference`. Only the first cross-attentions read the inputs: (out,
lse), their result before its output projection, is a state that grows by merging, as in
`attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.dtypes import default_scale, state_dtype
from ..reference import attend, attention_layer_reference, feed_forward_reference, in_dtype, layer_norm

PARTS = (1, 9, 6, 7, 6, 9, 6, 7, 6)
"""The number of parameters in each part of a block. The first part is the latents (M, C). The other parts are those of
its layers in order: each cross-attention (norm and context norm: weight and bias; query, key and value: weight; output:
weight and bias), each feed-forward layer (norm, expand and contract: weight and bias) and each self-attention (as a
cross-attention, without the context norm)."""

OF_BLOCK, OF_READING = sum(PARTS), 8
"""The number of parameters of a block, and the number of its first parameters, which read the
inputs: the latents, and the first cross-attention without its output projection."""


def block_stack_read_reference(
    inputs: Tensor,
    mask: Tensor | None,
    state_out: Tensor | None,
    state_lse: Tensor | None,
    parameters: Sequence[Tensor],
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The state (out, lse), (K B, H, M, C / H) and (K B, H, M), of the first cross-attentions of all blocks."""
    (rows,) = in_dtype(state_dtype(inputs.dtype), inputs)
    rows = rows if mask is None else rows.masked_fill(mask.unsqueeze(-1), 0.0)  # a NaN in padding has no effect
    found = []
    for first in range(0, len(parameters), OF_READING):
        latents, *norms, query, key, value = in_dtype(rows.dtype, *parameters[first : first + OF_READING])
        own, seen = layer_norm(latents, norms[:2], eps), layer_norm(rows, norms[2:], eps)
        projected = F.linear(own, query).expand(len(rows), -1, -1), F.linear(seen, key), F.linear(seen, value)
        heads = [t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in projected]
        found.append(attend(heads, mask, _scale(latents, num_heads)))
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    if state_out is None or state_lse is None:
        return out, lse
    total = torch.logaddexp(lse, state_lse)
    largest = total.masked_fill(total == -math.inf, 0.0)
    ours, before = ((part - largest).exp().unsqueeze(-1).to(out.dtype) for part in (lse, state_lse))
    return ours * out + before * state_out, total


def block_stack_reference(
    x: Tensor,
    inputs: Tensor | None,
    mask: Tensor | None,
    state_out: Tensor | None,
    state_lse: Tensor | None,
    parameters: Sequence[Tensor],
    num_heads: int,
    eps: float,
    residual: str,
    all_blocks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, out, lse): the latents after the last block, or after each block, and the state. Without
    inputs, state_out is read, and out and lse are empty."""
    blocks = list(_blocks(parameters))
    if inputs is None:
        assert state_out is not None
        attended, state = state_out, (state_out.new_empty(0), x.new_empty(0, dtype=torch.float64))
    else:
        readings = [tensor for latents, first, *_ in blocks for tensor in (*latents, *first[:-2])]
        state = block_stack_read_reference(inputs, mask, state_out, state_lse, readings, num_heads, eps)
        attended = state[0]
    scale, after = _scale(x, num_heads), []

    def forward(rows: Tensor, weights: Sequence[Any]) -> Tensor:
        given: list[Any] = [rows, *weights, eps, "geglu", residual]
        return feed_forward_reference(*given)

    def attention(rows: Tensor, context: Tensor | None, weights: Sequence[Any]) -> Tensor:
        *norms, query, key, value, weight, bias = weights
        norms = norms if context is not None else [*norms, None, None]
        projections = query, None, key, None, value, None, weight, bias
        given: list[Any] = [rows, context, None, *norms, *projections, num_heads, scale, eps, eps, residual, False]
        return attention_layer_reference(*given)[0]

    for (latents, first, *parts), out in zip(blocks, attended.chunk(len(blocks)), strict=True):
        own, *norm, weight, bias = in_dtype(out.dtype, *latents, *first[:2], *first[-2:])
        rows = layer_norm(own, norm, eps) if residual == "normed" else own
        m = (rows + F.linear(out.transpose(1, 2).flatten(2), weight, bias)).to(x.dtype)
        m = forward(attention(forward(m, parts[0]), None, parts[1]), parts[2])
        x = forward(attention(forward(attention(x, m, parts[3]), parts[4]), None, parts[5]), parts[6])
        after.append(x)
    return torch.stack(after) if all_blocks else x, *state


def _scale(rows: Tensor, num_heads: int) -> float:
    """The factor of the scores of heads of these rows."""
    return default_scale(rows.shape[-1] // num_heads)


def _blocks(parameters: Sequence[Tensor]) -> Iterator[list[Sequence[Tensor]]]:
    """The parameters of each block, in its `PARTS`."""
    given = iter(parameters)
    return ([tuple(islice(given, size)) for size in PARTS] for _ in range(len(parameters) // OF_BLOCK))
