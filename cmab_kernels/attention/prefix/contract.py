"""The contracts of the operators: their arguments, in the order of the schema."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Needs = tuple[bool, bool, bool, bool, bool, bool, bool]
"""Whether the gradients of query, key, value, state_out, state_lse, key_bias and log_decay are
needed. The values for state_out and state_lse must be equal."""


class PrefixAttention(NamedTuple):
    """The arguments of `cmab::prefix_attention`, whose results are the states (out, lse) of all prefixes."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    state_out: Tensor | None = None
    state_lse: Tensor | None = None
    key_bias: Tensor | None = None
    """(B, H, N), in the dtype of `state_out`: added to every score of its key. -inf excludes a key as a mask does."""
    log_decay: Tensor | None = None
    """(B, H, T), float64: added, before each chunk, to the lse of all earlier keys. None means
    zeros."""
    every: int = 1
    scale: float = 1.0
    impl: str = "auto"


class PrefixAttentionBackward(NamedTuple):
    """The arguments of `cmab::prefix_attention_backward`, whose results are the gradients of query, key, value,
    state, key_bias and log_decay."""

    dout: Tensor
    dlse: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None
    state_out: Tensor | None
    state_lse: Tensor | None
    out: Tensor
    lse: Tensor
    key_bias: Tensor | None
    log_decay: Tensor | None
    every: int
    scale: float
    needs: Needs
    impl: str = "auto"
