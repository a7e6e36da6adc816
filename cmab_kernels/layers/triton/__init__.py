"""The layers of a transformer in Triton.

- `residuals`     a block of rows: its residual, and the gradient of its norm
- `activation`    the activation of hidden features, and its gradient
- `feed_forward`  feed-forward layers
- `projections`   the projection after the heads of an attention layer, and the way back through those before
- `attention`     attention layers: the kernels of `cmab_kernels.attention` run between the projections
- `launch`        the inputs that the kernels can run

Norms, the projections before the heads, gradients of matrices, and block sizes are those of
`attention.projected.triton`.
"""

from .attention import attention_layer, attention_layer_backward
from .feed_forward import feed_forward_layer, feed_forward_layer_backward
from .launch import unsupported

__all__ = [
    "attention_layer",
    "attention_layer_backward",
    "feed_forward_layer",
    "feed_forward_layer_backward",
    "unsupported",
]
