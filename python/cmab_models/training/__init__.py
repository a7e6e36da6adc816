"""Training: the loop, checkpoints that can be resumed, and records of what came out."""

from .checkpoint import BadCheckpoint
from .loop import Diverged, Interrupted, Run, first_losses, train
from .records import append, provenance, records

__all__ = [
    "BadCheckpoint",
    "Diverged",
    "Interrupted",
    "Run",
    "append",
    "first_losses",
    "provenance",
    "records",
    "train",
]
