"""Stacked Constant Memory Attention Blocks in one native call forward and one back.

For a few narrow latents, the calls of a block's operators take longer than their arithmetic. The first cross-attentions
of all blocks share one pass over the inputs. `composed` is the definition, with one operator after the other. It also
provides the derivatives of second and higher order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import projected_attention_state
from ..runtime.autograd import gradient_of_formula
from ..runtime.backends import kernel
from ..runtime.dtypes import state_dtype
from ..runtime.tracing import as_row, has_memory, is_differentiated
from .contract import AttentionLayer, FeedForwardLayer
from .reference import in_dtype, layer_norm
from .schema import attention, feed_forward

PARTS = (1, 9, 6, 7, 6, 9, 6, 7, 6)
"""The number of tensors in each part of a block. The first part is the latents (M, C). The other parts are in the order
of `composed`: the parameters of each cross-attention (norm and context norm: weight and bias; query, key and value:
weight; output: weight and bias), each feed-forward layer (norm, expand and contract: weight and bias) and each
self-attention (as a cross-attention, without the context norm)."""


class Settings(NamedTuple):
    """Settings that all layers of stacked blocks share, besides their sizes."""

    num_heads: int
    eps: float
    """The eps of all norms."""
    residual: str
    """One of `reference.RESIDUALS`."""


def composed(
    x: Tensor,
    inputs: Tensor | None,
    mask: Tensor | None,
    attended: Tensor | None,
    *parameters: Tensor,
    settings: Settings,
    all_blocks: bool = False,
) -> Tensor:
    """The definition: for each block, with block latents b,

        m = feed-forward(self-attention(feed-forward(cross-attention(b, inputs))))
        x = feed-forward(self-attention(feed-forward(cross-attention(x, m))))

    for latents x (B, L, C) and inputs (B, N, C); inputs where `mask` (B, N) is True are ignored. Without inputs,
    `attended` (K B, H, M, C / H) holds the results of the first cross-attentions before their output projection. With
    `all_blocks` the result is x after each block, (K, B, L, C).
    """
    num_heads, eps, residual = settings
    scale = (x.shape[-1] // num_heads) ** -0.5
    blocks = _blocks(parameters)

    def forward(features: Tensor, weights: Sequence[Tensor]) -> Tensor:
        given: list[Any] = [features.flatten(0, 1), *weights, eps, "geglu", residual, "native"]
        y: Tensor = feed_forward(FeedForwardLayer(*given))
        return y.view_as(features)

    def attend(features: Tensor, context: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
        norm, (query, key, value, weight, bias) = weights[:-5], weights[-5:]
        norms = (*norm, None, None) if context is None else norm
        projections = query, None, key, None, value, None, weight, bias
        given: list[Any] = [
            features,
            context,
            None,
            *norms,
            *projections,
            num_heads,
            scale,
            eps,
            eps,
            residual,
            False,
            "native",
        ]
        return attention(AttentionLayer(*given))

    def normed(block: Tensor, weights: Sequence[Tensor]) -> Tensor:
        rows, *of_norm = in_dtype(state_dtype(block.dtype), block, *weights[:2])
        return layer_norm(rows, of_norm, eps).to(block.dtype)

    def read(block: Tensor, given: Tensor, weights: Sequence[Tensor]) -> Tensor:
        query, key, value = weights[4:7]
        queries = F.linear(normed(block, weights), query).unflatten(-1, (num_heads, -1)).transpose(0, 1)
        norm = weights[2], weights[3], eps
        state = projected_attention_state(
            queries, given, key, value, context_norm=norm, key_padding_mask=mask, scale=scale, impl="native"
        )
        return state.out

    given, after = [None] * len(blocks) if attended is None else attended.chunk(len(blocks)), []
    for (block, *parts), out in zip(blocks, given, strict=True):
        if out is None:
            assert inputs is not None
            out = read(block[0], inputs, parts[0])
        rows = normed(block[0], parts[0]) if residual == "normed" else block[0]
        m = rows + F.linear(out.transpose(1, 2).flatten(2).to(x.dtype), *parts[0][-2:])
        m = forward(attend(forward(m, parts[1]), None, parts[2]), parts[3])
        x = forward(attend(forward(attend(x, m, parts[4]), parts[5]), None, parts[6]), parts[7])
        after.append(x)
    return torch.stack(after) if all_blocks else x


def _blocks(parameters: Sequence[Tensor]) -> list[list[Sequence[Tensor]]]:
    """The parameters of each block, split into the parts that `PARTS` lists."""
    blocks = []
    for first in range(0, len(parameters), sum(PARTS)):
        parts, at = [], first
        for size in PARTS:
            parts.append(parameters[at : at + size])
            at += size
        blocks.append(parts)
    return blocks


class _BlockStack(torch.autograd.Function):
    """The native calls. Autograd through the definition computes higher derivatives and batches of gradients."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, all_blocks: bool, *tensors: Any) -> Tensor:
        x, inputs, mask, attended, *parameters = tensors
        forward = kernel("layers", "native", "block_stack")
        y, *kept = forward(
            x, inputs, mask, (None, None), attended, tuple(parameters), settings, keep=True, all_blocks=all_blocks
        )
        ctx.settings, ctx.all_blocks = settings, all_blocks
        ctx.save_for_backward(y if all_blocks else None, *kept, *tensors)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        y, out, lse, kept, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled() or not has_memory(dy):
            _, _, mask, *_ = tensors
            floating = [*tensors[:2], *tensors[3:]]

            def definition(x: Tensor, inputs: Any, *rest: Any) -> list[Tensor]:
                return [composed(x, inputs, mask, *rest, settings=ctx.settings, all_blocks=ctx.all_blocks)]

            dx, dinputs, *grads = gradient_of_formula(definition, floating, [dy])
        else:
            backward = kernel("layers", "native", "block_stack_backward")
            dx, dinputs, *grads = backward(
                dy, y, out, lse, kept, *tensors[:4], tuple(tensors[4:]), ctx.settings, ctx.needs_input_grad[2:]
            )
        return None, None, dx, dinputs, None, *grads


def attended_blocks(
    x: Tensor, attended: Tensor, parameters: Sequence[Tensor], settings: Settings, *, all_blocks: bool = False
) -> Tensor:
    """The result of `composed` for `attended`, by native code.

    All tensors must be plain and on the CPU, and the parameters must have one dtype.
    """
    if is_differentiated(x, attended, *parameters):
        result: Tensor = _BlockStack.apply(settings, all_blocks, x, None, None, attended, *parameters)
        return result
    forward = kernel("layers", "native", "block_stack")
    with as_row("cmab::block_stack"):
        y, *_ = forward(
            x, None, None, (None, None), attended, tuple(parameters), settings, keep=False, all_blocks=all_blocks
        )
    return y


def differentiated_blocks(
    x: Tensor,
    inputs: Tensor,
    mask: Tensor | None,
    parameters: Sequence[Tensor],
    settings: Settings,
    *,
    all_blocks: bool = False,
) -> Tensor:
    """The result of `composed` for the inputs, with a gradient."""
    result: Tensor = _BlockStack.apply(settings, all_blocks, x, inputs, mask, None, *parameters)
    return result


def updated_blocks(
    x: Tensor,
    inputs: Tensor,
    mask: Tensor | None,
    state: tuple[Tensor | None, Tensor | None],
    parameters: Sequence[Tensor],
    settings: Settings,
    *,
    all_blocks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, out, lse), without a gradient: y is the result of `composed` for all inputs.

    (out, lse) is the state of the first cross-attentions after all inputs. `state` is (out, lse) of the earlier inputs;
    out is (K B, H, M, C / H), lse is (K B, H, M).
    """
    forward = kernel("layers", "native", "block_stack")
    with as_row("cmab::block_stack"):
        y, out, lse, _ = forward(
            x, inputs, mask, state, None, tuple(parameters), settings, keep=False, all_blocks=all_blocks
        )
    return y, out, lse


def read_blocks(
    inputs: Tensor,
    mask: Tensor | None,
    state: tuple[Tensor | None, Tensor | None],
    parameters: Sequence[Tensor],
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Return only the state (out, lse) that `updated_blocks` returns.

    `parameters` holds the first eight parameters of each block: latents, norm, context norm, query, key and value.
    """
    read = kernel("layers", "native", "block_stack_read")
    with as_row("cmab::block_stack_read"):
        result: tuple[Tensor, Tensor] = read(inputs, mask, state, tuple(parameters), settings)
    return result
