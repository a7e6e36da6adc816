"""Intention in Triton: sums over runs of keys, processed in parallel and added in a fixed order, and kernels that work row by row.

- `sums`   K'WK and K'WV, and those added to a state
- `rows`   their gradients, and rows times a matrix
- `launch` precision of the matrix products, block sizes, runs of keys
"""

from ...triton_common import unsupported
from .rows import apply_rows, gram_backward
from .sums import gram, ridge_update

__all__ = ["apply_rows", "gram", "gram_backward", "ridge_update", "unsupported"]
