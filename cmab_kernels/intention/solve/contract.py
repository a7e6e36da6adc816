"""The contracts of the operators: their arguments, in the order of the schema."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RegularisedSolve(NamedTuple):
    """The arguments of `cmab::regularised_solve`, whose results are (gram + alpha I)^-1 rhs and its info."""

    gram: Tensor
    rhs: Tensor
    alpha: Tensor
    impl: str = "auto"


class RidgeSolve(NamedTuple):
    """The arguments of `cmab::ridge_solve`, whose results are the solution, K'WK and the info of the solution."""

    key: Tensor
    value: Tensor
    weights: Tensor | None
    key_padding_mask: Tensor | None
    alpha: Tensor
    impl: str = "auto"
