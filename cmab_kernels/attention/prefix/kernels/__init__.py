"""The states of all prefixes in Triton, blocked over time: the keys are cut into windows, and no program waits for another.

- `cut`      how the keys are cut into windows, and prefixes into runs
- `forward`  the state of each window, a scan over the windows, and the prefixes that end within a window on top of those before it
- `backward` a scan in reverse of what the prefixes send back, then the gradients of keys and of queries, as in attention's own kernels
"""

from ...kernels import unsupported
from .backward import prefix_backward
from .forward import prefix_forward

__all__ = ["prefix_backward", "prefix_forward", "unsupported"]
