"""Training with Lightning, checkpoints from which it can be resumed, and records of the results."""

from .checkpoint import BadCheckpoint
from .errors import Diverged, Interrupted
from .loop import Run, first_losses, fitted, train
from .records import append, provenance, records

__all__ = [
    "BadCheckpoint",
    "Diverged",
    "Interrupted",
    "Run",
    "append",
    "first_losses",
    "fitted",
    "provenance",
    "records",
    "train",
]
