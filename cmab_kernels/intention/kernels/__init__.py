"""Intention in Triton: sums over keys that are split over the multiprocessors and added in a fixed order, and what passes row by row.

- `sums`   K'WK and K'WV
- `rows`   their gradients, and rows times a solution
- `launch` products, block sizes, runs of keys
"""

from ...triton_common import unsupported
from .rows import apply_rows, gram_backward
from .sums import gram

__all__ = ["apply_rows", "gram", "gram_backward", "unsupported"]
