"""The m x m part of Nyström attention in Triton: one program a matrix, whose iterates never leave it.

- `squares`   the iteration and its adjoint on one matrix
- `pinv`      the iterative pseudo-inverse of a batch, and its gradient
- `landmarks` softmax, iteration and product in one launch, and its gradients
- `launch`    products and warps
"""

from .landmarks import landmark_values, landmark_values_backward
from .launch import unsupported
from .pinv import iterative_pinv, iterative_pinv_backward

__all__ = ["iterative_pinv", "iterative_pinv_backward", "landmark_values", "landmark_values_backward", "unsupported"]
