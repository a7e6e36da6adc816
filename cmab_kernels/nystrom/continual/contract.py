"""The contracts of the operators: their arguments, in the order of the schema."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...runtime.operator import Extent


class NystromStep(NamedTuple):
    """The arguments of `cmab::continual_nystrom_step`: the fields of a state without `spare`, then those of the
    step."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    sums: Tensor
    landmark_queries: Tensor
    landmark_keys: Tensor
    inverse: Tensor
    scale: Tensor
    position: Tensor
    window: Extent
    iterations: int
    fixed: int
    query: Tensor
    key: Tensor
    value: Tensor
    retroactive: bool
    impl: str = "auto"


class AttentionStep(NamedTuple):
    """The arguments of `cmab::continual_attention_step`, as in `NystromStep`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    sums: Tensor
    scale: Tensor
    position: Tensor
    window: Extent
    query: Tensor
    key: Tensor
    value: Tensor
    retroactive: bool
    impl: str = "auto"
