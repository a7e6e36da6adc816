"""The contracts of the operators: their arguments, in the order of the schema."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Needs = tuple[bool, bool, bool, bool]
"""Whether the gradients of query, key, value and key_bias are needed."""


class Attention(NamedTuple):
    """The arguments of `cmab::attention`, whose results are the state (out, lse) of all keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    state_out: Tensor | None = None
    state_lse: Tensor | None = None
    key_bias: Tensor | None = None
    """(B, H, N), in the dtype of `state_out`: added to every score of its key. -inf excludes a key as a mask does."""
    scale: float = 1.0
    impl: str = "auto"


class AttentionBackward(NamedTuple):
    """The arguments of `cmab::attention_backward`, whose results are the gradients of query, key, value and
    key_bias."""

    dout: Tensor
    dlse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    out: Tensor
    lse: Tensor
    key_bias: Tensor | None
    scale: float
    needs: Needs
    impl: str = "auto"
