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
