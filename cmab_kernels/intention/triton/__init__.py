"""Intention in Triton.

Sums over runs of keys are computed in parallel and added in a fixed order; other kernels work row by row.

- `sums`   K'WK and K'WV, and their addition to a state
- `row_products` the gradients of these sums, and rows times a matrix
- `prefix` the sums over all prefixes and their gradient; `scan` adds up matrices along time
- `launch` precision of the matrix products, block sizes, runs of keys
"""

from ...runtime.triton_launch import unsupported
from .prefix import prefix_ridge, prefix_ridge_backward
from .row_products import apply_rows, gram_backward
from .sums import gram, ridge_update

__all__ = [
    "apply_rows",
    "gram",
    "gram_backward",
    "prefix_ridge",
    "prefix_ridge_backward",
    "ridge_update",
    "unsupported",
]
