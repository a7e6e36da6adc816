"""Steps that record a gradient and have a fused backward pass."""

from .steps import recorded_step

__all__ = ["recorded_step"]
