"""Attention over projected inputs in Triton.

A program projects its run of the inputs tile by tile, for one head of one block.

- `tiles`    a tile of rows, normed and projected; no key and no value is written
- `forward`  the state of each run, merged like the states of given keys
- `backward` one pass for the queries and the projections, and one for the inputs
- `launch`   precision of the matrix products, and block sizes

The heads of all K stacked blocks are neighbours in the grid, so that they read a run of the inputs while it is in the
GPU's cache; it is read from memory once. Heads wider than 64 are processed in chunks of columns. bfloat16 is multiplied
as such, except where keys are projected: their scores take the keys in two parts. float16 is multiplied as float32.
"""

from .backward import projected_attention_backward
from .forward import projected_attention_forward
from .launch import unsupported

__all__ = ["projected_attention_backward", "projected_attention_forward", "unsupported"]
