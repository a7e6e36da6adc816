"""Latent cross-attention in Triton.

The keys are split into runs that are processed in parallel; the states of the runs are merged in a fixed order.

- `runs`     the keys that a program processes, and the slot where it stores its result
- `forward`  the state of each run of keys, and the merge
- `row_terms` the terms of each query that the gradients need, and the sum of dQ
- `backward` one pass over the keys, without atomics
- `backward_in_parts` the same for float32, with products in tf32 parts
- `removal`  a state without some of its keys
- `launch`   precision of the matrix products, and block sizes

Exponentials are base 2 with the scale folded into the product. Scores, sums and states are float32, or float64 for
float64 inputs.
"""

from ...runtime.triton_launch import unsupported
from .backward import attention_backward
from .forward import attention_forward
from .removal import attention_removal

__all__ = ["attention_backward", "attention_forward", "attention_removal", "unsupported"]
