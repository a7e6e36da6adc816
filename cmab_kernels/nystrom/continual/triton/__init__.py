"""The steps of continual attention in Triton: one launch for a step of any number of tokens, one program per head.

- `window`    the rings of tokens, logits, and a query's sums over the window
- `sliding_rows` guarded rows of sums that slide with the window
- `landmarks` landmarks that follow the stream, their pseudo-inverse, and the outputs through them
- `nystrom`, `attention`  the two kernels
- `backward`  the gradient of steps, one launch
- `launch`    block sizes and memory
"""

from .launch import (
    continual_attention_recorded_step,
    continual_attention_step,
    continual_nystrom_recorded_step,
    continual_nystrom_step,
    step_backward,
    unsupported,
)

__all__ = [
    "continual_attention_recorded_step",
    "continual_attention_step",
    "continual_nystrom_recorded_step",
    "continual_nystrom_step",
    "step_backward",
    "unsupported",
]
