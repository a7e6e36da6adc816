"""Models that predict a function at targets from points of it."""

from .base import Batch, NeuralProcess, PaddedBatch
from .bootstrap import BANP, BNP
from .canp import CANP
from .cmanp import CMANP, CMANPAND
from .cnp import CNP
from .eqtnp import EQTNP
from .inctnp import IncTNP
from .latent import ANP, NP
from .lbanp import LBANP, LBANPND
from .likelihood import Mixture
from .tnp import TNPD, TNPND
from .tnpa import TNPA, Chain

__all__ = [
    "ANP",
    "BANP",
    "BNP",
    "CANP",
    "CMANP",
    "CMANPAND",
    "CNP",
    "EQTNP",
    "LBANP",
    "LBANPND",
    "NP",
    "TNPA",
    "TNPD",
    "TNPND",
    "Batch",
    "Chain",
    "IncTNP",
    "Mixture",
    "NeuralProcess",
    "PaddedBatch",
]
