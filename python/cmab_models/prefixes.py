"""The states of a stack of blocks after every input of a sequence, for a loss at every length of the context."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from cmab_kernels import AttentionState, prefix_attention_states
from cmab_kernels.nn import CMAB, CMABStack


def prefix_states(stack: CMABStack, inputs: Tensor, *, every: int = 1) -> AttentionState:
    """Return the states of the stack after every `every`-th of the inputs (B, N, dim), and after the last, in one pass.

    The result is a batch of B T states, T = ceil(N / every), with the states of a sequence next to each other: out (K,
    B T, H, L_B, E) and lse (K, B T, H, L_B). `stack.retrieve` accepts this form.
    """
    found = [_prefixes(cast("CMAB", block), inputs, every) for block in stack.blocks]
    outs, lses = zip(*found, strict=True)
    return AttentionState(
        torch.stack(outs).transpose(2, 3).flatten(1, 2), torch.stack(lses).transpose(2, 3).flatten(1, 2)
    )


def _prefixes(block: CMAB, inputs: Tensor, every: int) -> AttentionState:
    """Return the states of the block's first cross-attention: out (B, H, T, L_B, E), lse (B, H, T, L_B)."""
    attention = block.compress.cross_attention
    normed = attention.context_norm(inputs)
    query = attention.heads(attention.query, attention.norm(block.latents))
    return prefix_attention_states(
        query, attention.heads(attention.key, normed), attention.heads(attention.value, normed), every=every
    )
