"""Ridge regression that adds and forgets examples, with the methods of an estimator of scikit-learn."""

from .estimator import OnlineRidge
from .sums import Solution, Sums

_Solution, _Sums = Solution, Sums  # pickles of earlier versions look for these names here

__all__ = ["OnlineRidge"]
