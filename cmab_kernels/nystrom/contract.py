"""The contracts of the operators: their arguments, in the order of the schema."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pinv(NamedTuple):
    """The arguments of `cmab::iterative_pinv`, whose result is the pseudo-inverse of each matrix (M, m, m)."""

    matrix: Tensor
    iterations: int
    impl: str = "auto"


class PinvBackward(NamedTuple):
    """The arguments of `cmab::iterative_pinv_backward`, whose result is the gradient of the matrices."""

    dinverse: Tensor
    matrix: Tensor
    iterations: int
    impl: str = "auto"


class LandmarkValues(NamedTuple):
    """The arguments of `cmab::landmark_values`, whose result is W (M, m, E).

    The landmarks are (M, m, D), the values (M, m, E), and `absent` is (M, m) bool, True for rows without a landmark.
    """

    landmark_query: Tensor
    landmark_key: Tensor
    values: Tensor
    absent: Tensor | None
    scale: float
    iterations: int
    impl: str = "auto"


class LandmarkValuesBackward(NamedTuple):
    """The arguments of `cmab::landmark_values_backward`, whose results are the gradients of landmarks and values."""

    dout: Tensor
    landmark_query: Tensor
    landmark_key: Tensor
    values: Tensor
    absent: Tensor | None
    scale: float
    iterations: int
    impl: str = "auto"
