"""Adapters that run this package's operators in models of other packages, which are imported only when a function here
is called."""

from .functional import scaled_dot_product_attention
from .transformers import register_transformers

__all__ = ["register_transformers", "scaled_dot_product_attention"]
