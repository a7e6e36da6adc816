"""The m x m part of Nyström attention in Triton: up to 64 landmarks, one program for each matrix, which keeps all iterates to itself; up to
256, a launch for each product.

- `squares`   the iteration on one matrix, and its gradient
- `pinv`      the iterative pseudo-inverse of a batch, and its gradient
- `landmarks` softmax, pseudo-inverse and product with the values in one launch, and their gradients
- `blocks`    products of matrices that one program cannot keep to itself
- `large`     the four operators for more than 64 landmarks, and for more than 32 in float64 where shared memory is little
- `launch`    launch options: tile size, precision of products, number of warps
"""

from .landmarks import landmark_values, landmark_values_backward
from .launch import unsupported
from .pinv import iterative_pinv, iterative_pinv_backward

__all__ = ["iterative_pinv", "iterative_pinv_backward", "landmark_values", "landmark_values_backward", "unsupported"]
