"""Models that predict the next event of a stream from the events so far."""

from .base import Continuation, LogProb, PointProcess
from .cmhp import CMHP, CMHPState
from .events import Events
from .mixture import LogNormalMixture
from .parts import NextEvent
from .thp import THP, THPState

__all__ = [
    "CMHP",
    "THP",
    "CMHPState",
    "Continuation",
    "Events",
    "LogNormalMixture",
    "LogProb",
    "NextEvent",
    "PointProcess",
    "THPState",
]
