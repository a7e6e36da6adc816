"""The contracts of the operators: their arguments, in the order of the schema."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Needs = tuple[bool, bool, bool, bool]
"""Whether the gradients of query, inputs, weight and bias are needed."""


class ProjectedAttention(NamedTuple):
    """The arguments of `cmab::projected_attention`, whose results are the state (out, lse) of all inputs."""

    query: Tensor
    inputs: Tensor
    weight: Tensor
    bias: Tensor
    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    state_out: Tensor | None = None
    state_lse: Tensor | None = None
    scale: float = 1.0
    eps: float | None = None
    impl: str = "auto"


class ProjectedAttentionBackward(NamedTuple):
    """The arguments of `cmab::projected_attention_backward`, whose results are the gradients of query, inputs, weight
    and bias."""

    dout: Tensor
    dlse: Tensor
    query: Tensor
    inputs: Tensor
    weight: Tensor
    bias: Tensor
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    out: Tensor
    lse: Tensor
    scale: float
    eps: float | None
    needs: Needs
    impl: str = "auto"
