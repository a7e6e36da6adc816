"""C: Intention, regularised least squares as an attention layer, with an exact streaming state."""

from . import variants
from .api import (
    intention,
    regularised_inverse,
    regularised_solve,
    remove_ridge,
    ridge_state,
    sigma_intention,
    solve_ridge,
)
from .state import RidgeSolution, RidgeState, empty_ridge, merge_ridge

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
