"""Transformer Hawkes Processes, which keep every event."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..encoder import EncoderLayer
from .base import PointProcess
from .parts import EventEmbedding, EventHead, LogGaps


class THPState(NamedTuple):
    """All events so far."""

    tokens: Tensor
    """(B, events, dim), embedded"""
    time: Tensor
    """(B,) float64, of the last event"""


class THP(PointProcess):
    """A point process on a Transformer encoder with a causal mask: the baseline of `CMHP`, with its embedding, heads
    and arguments.

    The state keeps all events, and each prediction reads all of them. This is the Transformer Hawkes Process (Zuo et
    al., ICML 2020) on `torch.nn.TransformerEncoder`. Two differences from the published code make likelihoods
    comparable. The published code computes the likelihood of an event from features that already depend on this event
    and its mark (question 10 of its repository). It also estimates integrals of the intensity by Monte Carlo. The
    package easy-tpp corrects the first point, but not the second. This model predicts an event from the events before
    it, and its likelihood is exact.

    Args:
        depth: layers of the encoder.
        The other arguments are those of `CMHP`.

    >>> model = cmab_models.THP(num_marks=5, dim=16, num_heads=2).eval()
    >>> times, marks = torch.rand(3, 20).cumsum(1), torch.randint(5, (3, 20))
    >>> model.log_prob(times, marks).time.shape
    torch.Size([3, 20])
    """

    state_type = THPState

    def __init__(
        self,
        num_marks: int,
        dim: int = 32,
        num_heads: int = 4,
        depth: int = 2,
        ff_dim: int | None = None,
        components: int = 16,
        log_gap_mean: float = 0.0,
        log_gap_std: float = 1.0,
        period: float = 1.0,
    ) -> None:
        super().__init__()
        log_gaps = LogGaps(log_gap_mean, log_gap_std)
        self.num_marks = num_marks
        self.embedding = EventEmbedding(num_marks, dim, log_gaps, period)
        self.start = nn.Parameter(torch.randn(dim))
        layer = EncoderLayer(dim, num_heads, 2 * dim if ff_dim is None else ff_dim, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = EventHead(dim, num_marks, log_gaps, components)

    def _read(self, state: THPState | None, time: Tensor, embedded: Tensor) -> THPState:
        return THPState(embedded if state is None else torch.cat([state.tokens, embedded], 1), time)

    def _summary(self, state: THPState | None) -> Tensor:
        tokens = self.start.new_zeros(1, 0, len(self.start)) if state is None else state.tokens
        return self._summaries(tokens, torch.empty(0))[:, -1]

    def _summaries(self, embedded: Tensor, there: Tensor) -> Tensor:
        tokens = torch.cat([self.start.expand(len(embedded), 1, -1), embedded], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device, tokens.dtype)
        result: Tensor = self.encoder(tokens, mask=mask, is_causal=True)
        return result
