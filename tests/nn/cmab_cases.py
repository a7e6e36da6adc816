"""An `nn.CMAB` in which every part affects the result, and its result in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_iter

from cmab_kernels.nn import CMAB

DIM, BLOCK, HEADS, BATCH, INPUTS, LATENTS = 12, 5, 3, 2, 41, 4


def block(dtype: torch.dtype = torch.float64) -> CMAB:
    """Return a block in which every parameter affects the result: no bias is 0, no norm is 1, and attention is
    sharp."""
    made = CMAB(DIM, BLOCK, HEADS, dtype=dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return made


def points(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return inputs and latents."""
    return 3 * torch.randn(BATCH, INPUTS, DIM, dtype=dtype), torch.randn(BATCH, LATENTS, DIM, dtype=dtype)


def close(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    for mine, other in zip(tree_iter(ours), tree_iter(theirs), strict=True):
        torch.testing.assert_close(
            mine, other, rtol=tolerance, atol=tolerance * max(1.0, float(other.detach().abs().max()))
        )


def definition(weights: dict[str, Tensor], inputs: Tensor, latents: Tensor, ignore: Tensor | None = None) -> Tensor:
    """Return the output of the block as the paper describes it; only the names of the weights come from the package."""

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def attention(name: str, x: Tensor, context: Tensor | None, ignore: Tensor | None = None) -> Tensor:
        normed = norm(f"{name}.norm", x)
        context = normed if context is None else norm(f"{name}.context_norm", context)
        q, k, v = (
            (y @ weights[f"{name}.{part}.weight"].T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part, y in (("query", normed), ("key", context), ("value", context))
        )
        scores = q @ k.mT / math.sqrt(DIM / HEADS)
        if ignore is not None:
            scores = scores.masked_fill(ignore[:, None, None], -math.inf)
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return x + out @ weights[f"{name}.output.weight"].T + weights[f"{name}.output.bias"]

    def feed_forward(name: str, x: Tensor) -> Tensor:
        wide = norm(f"{name}.norm", x) @ weights[f"{name}.expand.weight"].T + weights[f"{name}.expand.bias"]
        half = wide.shape[-1] // 2
        return (
            x
            + (wide[..., :half] * F.gelu(wide[..., half:])) @ weights[f"{name}.contract.weight"].T
            + weights[f"{name}.contract.bias"]
        )

    def layer(name: str, x: Tensor, context: Tensor, ignore: Tensor | None) -> Tensor:
        x = feed_forward(f"{name}.cross_feed_forward", attention(f"{name}.cross_attention", x, context, ignore))
        return feed_forward(f"{name}.self_feed_forward", attention(f"{name}.self_attention", x, None))

    compressed = layer("compress", weights["latents"].expand(len(inputs), -1, -1), inputs, ignore)
    return layer("retrieve", latents, compressed, None)
