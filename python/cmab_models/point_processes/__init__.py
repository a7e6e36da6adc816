"""Models that predict the next event of a stream from the events so far."""

from .base import Continuation, LogProb, PointProcess
from .cmhp import CMHP, CMHPState
from .events import Events
from .mixture import LogNormalMixture
from .parts import NextEvent
from .scoring import event_scores, trivial_event_scores
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
    "event_scores",
    "trivial_event_scores",
]
