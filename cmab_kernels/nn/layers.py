"""The sub-layers of `CMAB`: pre-norm attention and feed-forward layers, each with a residual connection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import AttentionState, attention_state, latent_attention
from ..checks import autocasts, wrong

CHUNK = 16_384
"""Rows of a context that are normed and projected at a time where no gradient needs them later."""


def split_heads(features: Tensor, heads: int) -> Tensor:
    """Return features (..., N, H D) as heads (..., H, N, D), a view."""
    return features.unflatten(-1, (heads, -1)).transpose(-3, -2)


def join_heads(features: Tensor) -> Tensor:
    """Return heads (..., H, L, D) as features (..., L, H D)."""
    return features.transpose(-3, -2).flatten(-2)


def check_features(name: str, features: Tensor, allowed: str, dims: tuple[int, ...], width: int, weight: Tensor) -> None:
    """Raise unless `features` has a number of dimensions in `dims`, `width` columns, and the dtype and device of the module's `weight`."""
    if features.is_nested:
        raise ValueError(wrong(name, "is a nested tensor", "pad it, and pass a mask"))
    if features.dim() not in dims or features.shape[-1] != width:
        raise ValueError(wrong(name, f"has shape {tuple(features.shape)}", f"{allowed} is needed, with {width} columns"))
    if features.device != weight.device:
        raise ValueError(wrong(name, f"is on {features.device}", f"the module is on {weight.device}; move them together"))
    if features.dtype != weight.dtype and not (features.is_floating_point() and autocasts(features.device)):
        raise TypeError(wrong(name, f"is {features.dtype}", f"the module is {weight.dtype}; cast them alike, or use autocast"))


def bool_mask(key_padding_mask: Tensor | None) -> Tensor | None:
    """Return a bool mask as it is, and a float mask, which is added to logits, as the bool mask of its -inf.

    `torch.nn.TransformerEncoderLayer` makes such float masks of bool ones. A number other than 0 and -inf in it is a `ValueError`, or,
    where its values cannot be read (under a compiler, on a GPU), an assertion on the device.
    """
    if key_padding_mask is None or not key_padding_mask.is_floating_point():
        return key_padding_mask
    ignore = key_padding_mask == -torch.inf
    sound = (ignore | (key_padding_mask == 0)).all()
    message = wrong("key_padding_mask", "is to be added to logits, which are not there", "a bool mask, or only 0 and -inf, is needed")
    if key_padding_mask.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(sound, message)
    elif not sound:
        raise ValueError(message)
    return ignore


def hide_padding(features: Tensor, ignore: Tensor | None) -> Tensor:
    """Return features (..., C) with 0 where `ignore` (...) is True, if a gradient may be taken; else as they are.

    The operators do not read ignored keys, whose gradient is 0. But the gradient of a projection's weight is a product of that gradient
    and the projection's input, and 0 times a NaN in the padding is NaN.
    """
    return features if ignore is None or not torch.is_grad_enabled() else features.masked_fill(ignore.unsqueeze(-1), 0.0)


class FeedForward(nn.Module):
    """Feed-forward layer: x + contract(a * gelu(gate)) with (a, gate) = expand(norm(x)), and gelu by the error function."""

    def __init__(self, dim: int, ff_dim: int, **factory: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, **factory)
        self.expand = nn.Linear(dim, 2 * ff_dim, **factory)
        self.contract = nn.Linear(ff_dim, dim, **factory)

    def forward(self, latents: Tensor) -> Tensor:
        features, gate = self.expand(self.norm(latents)).chunk(2, dim=-1)
        return latents + self.contract(features * F.gelu(gate))


class _Attention(nn.Module):
    """Base class of both attentions: a norm, projections to query, key and value without bias, and an output projection with bias."""

    def __init__(self, dim: int, num_heads: int, **factory: Any) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim, **factory)
        self.query = nn.Linear(dim, dim, bias=False, **factory)
        self.key = nn.Linear(dim, dim, bias=False, **factory)
        self.value = nn.Linear(dim, dim, bias=False, **factory)
        self.output = nn.Linear(dim, dim, **factory)

    def heads(self, projection: nn.Module, features: Tensor) -> Tensor:
        return split_heads(projection(features), self.num_heads)

    def add(self, latents: Tensor, attended: Tensor) -> Tensor:
        """Return latents (B, L, C), or (L, C) shared over the batch, plus the output projection of the attention result (B, H, L, D)."""
        return latents + self.output(join_heads(attended).to(self.output.weight.dtype))


class SelfAttention(_Attention):
    """Self-attention: x + output(attention of norm(x) over itself)."""

    def forward(self, latents: Tensor) -> Tensor:
        normed = self.norm(latents)
        return self.add(latents, latent_attention(*(self.heads(part, normed) for part in (self.query, self.key, self.value))))


class CrossAttention(_Attention):
    """Cross-attention: x + output(attention of norm(x) over context_norm(context)), computed by way of an `AttentionState`."""

    def __init__(self, dim: int, num_heads: int, **factory: Any) -> None:
        super().__init__(dim, num_heads, **factory)
        self.context_norm = nn.LayerNorm(dim, **factory)

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:
        return self.add(latents, self.read(latents, context).out)

    def read(
        self, latents: Tensor, context: Tensor, state: AttentionState | None = None, key_padding_mask: Tensor | None = None
    ) -> AttentionState:
        """Return `state` updated with the context (B, N, C); a `state` of None is that of no rows.

        With grad mode off, keys and values are computed chunk by chunk, so that nothing of size N is allocated. With it on they are
        computed at once, because the backward pass needs them all.
        """
        query = self.heads(self.query, self.norm(latents))
        rows = context.shape[1] if torch.is_grad_enabled() else CHUNK
        chunks = context.split(rows, dim=1)
        masks = [None] * len(chunks) if key_padding_mask is None else key_padding_mask.split(rows, dim=1)
        for chunk, mask in zip(chunks, masks, strict=True):
            normed = self.context_norm(hide_padding(chunk, mask))
            state = attention_state(query, self.heads(self.key, normed), self.heads(self.value, normed), state=state, key_padding_mask=mask)
        assert state is not None  # a split has at least one chunk
        return state


class LatentLayer(nn.Module):
    """Cross-attention of latents over a context, feed-forward, self-attention, feed-forward."""

    def __init__(self, dim: int, num_heads: int, ff_dim: int, **factory: Any) -> None:
        super().__init__()
        self.cross_attention = CrossAttention(dim, num_heads, **factory)
        self.cross_feed_forward = FeedForward(dim, ff_dim, **factory)
        self.self_attention = SelfAttention(dim, num_heads, **factory)
        self.self_feed_forward = FeedForward(dim, ff_dim, **factory)

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:
        return self.after_context(self.cross_attention(latents, context))

    def after_context(self, latents: Tensor) -> Tensor:
        """Apply what follows the cross-attention; its cost does not depend on the context."""
        return self.self_feed_forward(self.self_attention(self.cross_feed_forward(latents)))
