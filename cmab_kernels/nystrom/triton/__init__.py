"""The m x m part of Nyström attention in Triton.

For up to 64 landmarks, one program computes each matrix and keeps all iterates in its registers and shared memory. For
65 to 256 landmarks, there is one launch for each product.

- `squares`   the iteration on one matrix, and its gradient
- `pinv`      the iterative pseudo-inverse of a batch, and its gradient
- `landmarks` softmax, pseudo-inverse and product with the values in one launch, and their gradients
- `blocks` products of matrices that do not fit in one program
- `large` the four operators for more than 64 landmarks, or for more than 32 in float64 if there is little shared memory
- `launch`    launch options: tile size, precision of products, number of warps
"""

from .landmarks import landmark_values, landmark_values_backward
from .launch import unsupported
from .pinv import iterative_pinv, iterative_pinv_backward

__all__ = ["iterative_pinv", "iterative_pinv_backward", "landmark_values", "landmark_values_backward", "unsupported"]
