"""Batched regularised systems: (A + alpha I)^-1 B by Cholesky, with `info` on the accuracy of every solution."""

from .api import RidgeSolution, regularised_inverse, regularised_solve

__all__ = ["RidgeSolution", "regularised_inverse", "regularised_solve"]
