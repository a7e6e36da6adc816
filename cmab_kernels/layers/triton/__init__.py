"""The layers of a transformer in Triton.

- `rows`          a block of rows, and its norm, forward and backward
- `activation`    the activation of hidden features, and its gradient
- `feed_forward`  feed-forward layers
- `projections`   the projections before and after the heads of an attention layer
- `attention`     attention layers: the kernels of `cmab_kernels.attention` run between the projections
- `launch`        the inputs that the kernels can run, precision of the matrix products, and block sizes
"""

from .attention import attention_layer, attention_layer_backward
from .feed_forward import feed_forward_layer, feed_forward_layer_backward
from .launch import unsupported

__all__ = ["attention_layer", "attention_layer_backward", "feed_forward_layer", "feed_forward_layer_backward", "unsupported"]
