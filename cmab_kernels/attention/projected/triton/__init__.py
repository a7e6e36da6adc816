"""Attention over projected inputs in Triton: rows are projected in chunks, which the kernels of `attention` read.

- `chunks`      the cut of the rows, and both passes
- `projections` rows times matrices after a norm, and the gradients of matrices and rows; the layers use them too
- `row_pieces`  a block of rows in pieces of columns: norm, products, and the layout of heads
- `shares`      gradients that are sums over rows
- `launch`      precision of the matrix products, and block sizes

bfloat16 is multiplied as such, except for keys: they are projected and stored in float32, and their scores take them in
parts. float16 is multiplied as float32.
"""

from .chunks import projected_attention_backward, projected_attention_forward
from .launch import unsupported

__all__ = ["projected_attention_backward", "projected_attention_forward", "unsupported"]
