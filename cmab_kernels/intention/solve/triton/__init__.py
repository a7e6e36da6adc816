"""Batched regularised solves in Triton: each program solves one system after another.

- `solve`  the kernel: Cholesky, the exact condition number, and all right-hand sides
- `launch` the inputs that the kernel can run, its block sizes and its scratch memory
"""

from .launch import unsupported
from .solve import regularised_solve

__all__ = ["regularised_solve", "unsupported"]
