"""Training: the loop, checkpoints that can be resumed, and records of what came out."""

from .checkpoint import BadCheckpoint
from .loop import Diverged, Interrupted, Run, train
from .records import append, provenance, records

__all__ = ["BadCheckpoint", "Diverged", "Interrupted", "Run", "append", "provenance", "records", "train"]
