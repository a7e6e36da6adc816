"""What follows the first cross-attention of a Constant Memory Attention Block, seven layers, in one native call forward and one back.

A few latents of little width are done sooner than seven operators are called. The definition is `composed`, those operators one after the
other; it also gives the derivatives of second and higher order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..autograd import gradient_of_formula
from ..backends import kernel
from ..tracing import is_differentiated
from .schema import attention, feed_forward

SIZES = (2, 6, 7, 6, 9, 6, 7, 6)
"""The numbers of parameters of the parts. First the output projection of the first cross-attention: weight and bias. Then, in the
order of `composed`, those of each feed-forward layer (norm, expand and contract: weight and bias) and of each attention (norm, and for the
one across the context norm: weight and bias; query, key and value: weight; output: weight and bias)."""


def composed(x: Tensor, attended: Tensor, block: Tensor, *parameters: Tensor, num_heads: int, eps: float) -> Tensor:
    """The definition:

        m = feed-forward(self-attention(feed-forward(block + output(attended))))
        y = feed-forward(self-attention(feed-forward(cross-attention(x, m))))

    for latents x (B, L, C), block latents (M, C) and the result (B, H, M, C / H) of the first cross-attention.
    """
    output, *parts = _parts(parameters)
    scale = (x.shape[-1] // num_heads) ** -0.5

    def forward(features: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return feed_forward(features.flatten(0, 1), *weights, eps=eps, activation="geglu", impl="native").view_as(features)

    def attend(features: Tensor, context: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
        norm, (query, key, value, weight, bias) = weights[:-5], weights[-5:]
        norms = (*norm, None, None) if context is None else norm
        projections = query, None, key, None, value, None, weight, bias
        numbers = {"num_heads": num_heads, "scale": scale, "eps": eps, "context_eps": eps}
        return attention(features, context, None, *norms, *projections, **numbers, impl="native")

    joined = attended.transpose(1, 2).flatten(2).to(x.dtype)
    m = forward(block + torch.nn.functional.linear(joined, *output), parts[0])
    m = forward(attend(m, None, parts[1]), parts[2])
    y = forward(attend(x, m, parts[3]), parts[4])
    return forward(attend(y, None, parts[5]), parts[6])


def _parts(parameters: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    parts, first = [], 0
    for size in SIZES:
        parts.append(parameters[first : first + size])
        first += size
    return parts


class _LatentBlock(torch.autograd.Function):
    """The native calls, and the derivatives of the definition where a gradient is to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, num_heads: int, eps: float, *tensors: Tensor) -> Tensor:
        y, kept = kernel("layers", "native", "latent_block")(*tensors[:3], tensors[3:], num_heads, eps, keep=True)
        ctx.num_heads, ctx.eps = num_heads, eps
        ctx.save_for_backward(kept, *tensors)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        kept, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            grads = gradient_of_formula(lambda *given: [composed(*given, num_heads=ctx.num_heads, eps=ctx.eps)], tensors, [dy])
        else:
            back, needs = kernel("layers", "native", "latent_block_backward"), ctx.needs_input_grad[5:]
            grads = back(dy, kept, *tensors[:3], tensors[3:], ctx.num_heads, ctx.eps, needs)
        return None, None, *grads


def latent_block(x: Tensor, attended: Tensor, block: Tensor, parameters: Sequence[Tensor], num_heads: int, eps: float) -> Tensor:
    """Return what `composed` does, in the native code; all tensors are plain and on the CPU, and the parameters are of one dtype."""
    if is_differentiated(x, attended, block, *parameters):
        result: Tensor = _LatentBlock.apply(num_heads, eps, x, attended, block, *parameters)
        return result
    y, _ = kernel("layers", "native", "latent_block")(x, attended, block, parameters, num_heads, eps, keep=False)
    return y
