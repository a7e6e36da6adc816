"""The states of all prefixes in Triton, blocked over time.

The keys are cut into windows, and no program waits for another.

- `cut`      the cut of the keys into windows, and of the prefixes into runs
- `forward`  the state of each window, a scan over the windows, and the prefixes that end within a window
- `backward` a scan in reverse of what prefixes send back, then gradients as in the kernels of attention
"""

from ...triton import unsupported
from .backward import prefix_backward
from .forward import prefix_forward

__all__ = ["prefix_backward", "prefix_forward", "unsupported"]
