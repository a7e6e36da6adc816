"""Intention, regularised least squares as an attention layer, with an exact streaming state."""

from . import variants
from .api import (
    RidgeStep,
    intention,
    prefix_ridge_states,
    remove_ridge,
    ridge_state,
    ridge_step,
    sigma_intention,
    solve_ridge,
)
from .solve import RidgeSolution, regularised_inverse, regularised_solve
from .state import RidgeState, check_ridge, decayed_ridge, empty_ridge, merge_ridge, unlikely_ridge

__all__ = [
    "RidgeSolution",
    "RidgeState",
    "RidgeStep",
    "check_ridge",
    "decayed_ridge",
    "empty_ridge",
    "intention",
    "merge_ridge",
    "prefix_ridge_states",
    "regularised_inverse",
    "regularised_solve",
    "remove_ridge",
    "ridge_state",
    "ridge_step",
    "sigma_intention",
    "solve_ridge",
    "unlikely_ridge",
    "variants",
]
