"""Intention in Triton: sums over keys that are split over the multiprocessors and added in a fixed order, and what passes row by row.

- `sums`   K'WK and K'WV
- `rows`   their gradients, and rows times a solution
- `launch` products, block sizes, runs of keys
"""

from torch import Tensor

from ...triton_common import unsupported
from ..solve.schema import solve
from .rows import apply_rows, gram_backward
from .sums import gram

__all__ = ["apply_rows", "gram", "gram_backward", "ridge_solve", "unsupported"]


def ridge_solve(
    key: Tensor, value: Tensor, weights: Tensor | None, key_padding_mask: Tensor | None, alpha: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """((K'WK + alpha I)^-1 K'WV, K'WK, info) in float64."""
    matrix, moment = gram(key, value, weights, key_padding_mask, (True, True), exact=False)
    weight, info = solve(matrix.flatten(0, 1), moment.flatten(0, 1), alpha.flatten())
    return weight.view(moment.shape), matrix, info.view(alpha.shape)
