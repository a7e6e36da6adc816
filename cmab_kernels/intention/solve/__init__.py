"""Batched regularised systems: (A + alpha I)^-1 B by Cholesky, with a verdict on every solution."""

from .api import RidgeSolution, regularised_inverse, regularised_solve

__all__ = ["RidgeSolution", "regularised_inverse", "regularised_solve"]
