"""Intention, regularised least squares as an attention layer, with an exact streaming state."""

from . import variants
from .api import (
    intention,
    remove_ridge,
    ridge_state,
    sigma_intention,
    solve_ridge,
)
from .solve import RidgeSolution, regularised_inverse, regularised_solve
from .state import RidgeState, empty_ridge, merge_ridge

__all__ = [
    "RidgeSolution",
    "RidgeState",
    "empty_ridge",
    "intention",
    "merge_ridge",
    "regularised_inverse",
    "regularised_solve",
    "remove_ridge",
    "ridge_state",
    "sigma_intention",
    "solve_ridge",
    "variants",
]
