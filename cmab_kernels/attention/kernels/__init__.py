"""Latent cross-attention in Triton: the keys are split over the multiprocessors, and their states merged in a fixed order.

- `runs`     which keys a program takes, and where it leaves what it found
- `tiles`    loads of any strides, and matrix products
- `forward`  the state of each run of keys, and the merge
- `backward` one pass over the keys, without atomics
- `launch`   what a GPU must offer, and the block sizes

Exponentials are base 2 with the scale folded into the product. Scores, sums and states are float32, or float64 for float64 inputs.
"""

from .backward import attention_backward
from .forward import attention_forward
from .launch import unsupported

__all__ = ["attention_backward", "attention_forward", "unsupported"]
