"""torch's encoder layer and attention, with every submodule called: if a model has adapters or hooks, it predicts in
the same way as it trains."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cmab_kernels.nn import TransformerEncoderLayer
from cmab_kernels.nn.multihead import torchs_attention


class EncoderLayer(TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer`, batch first and without dropout, in torch's own arithmetic.

    It runs no operator of `cmab_kernels`, because the models that use it are the baselines of models with such
    operators. Submodules that were replaced or hooked are called, also without gradients; torch's layer would read
    their weights instead.

    Args:
        dim: width of all features.
        num_heads: a divisor of dim.
        ff_dim: hidden width of the feed-forward network.
        norm_first: whether norms come before the attention and the network (True), or after them.
    """

    def __init__(self, dim: int, num_heads: int, ff_dim: int, *, norm_first: bool = False) -> None:
        super().__init__(dim, num_heads, ff_dim, dropout=0.0, batch_first=True, norm_first=norm_first)

    def why_torch(self, *args: Any, **kwargs: Any) -> str:
        """Return why torch's own code runs; it always does."""
        return "a model that others are compared with has torch's own layers"


def attended(attention: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the first result of a module with the arguments of `torch.nn.MultiheadAttention`.

    torch's module reads the weight of its `out_proj`. If `out_proj` was replaced or hooked, it is called instead."""
    found: Tensor = torchs_attention.call(attention, query, key, value, need_weights=False)[0]
    return found
