"""Constant Memory Hawkes Processes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmab_kernels import AttentionState
from cmab_kernels.nn import CMABStack
from cmab_kernels.runtime.checks import mismatch

from ..prefixes import prefix_states
from .base import PointProcess
from .parts import EventEmbedding, EventHead, LogGaps

QUERIES = ("newest", "latents")
"""The values of a CMHP's `queries`."""


class CMHPState(NamedTuple):
    """A summary of the events so far, of a size that does not depend on their number."""

    attention: AttentionState
    """out (K, B, num_heads, num_latents, dim / num_heads), lse of the same shape without the last axis"""
    newest: Tensor
    """(B, dim), the last event's embedding; with `queries="latents"` it is not read"""
    time: Tensor
    """(B,) float64, of the last event"""


class CMHP(PointProcess):
    """A point process in constant memory: a `cmab_kernels.nn.CMABStack` reads the events, and its latents predict the
    next event.

    Observing an event and predicting the next one take constant time. In training, the losses of all events cost one
    pass over the sequence: `cmab_kernels.prefix_attention_states` gives the states of the first cross-attentions after
    each event. Source: Constant Memory Attention Block (Feng et al., 2023), and Memory Efficient Neural Processes via
    Constant Memory Attention Block (Feng et al., ICML 2024), appendix B.1. The model is the encoder of a Transformer
    Hawkes Process with `CMAB`s as layers; its heads read the flattened latents.

    The queries of the first cross-attention are the same for all events. So the states alone contain little information
    about which event was the last. With `queries="newest"` the embedding of the newest event is added to the latents.
    In a causal Transformer, this event is also the query.

    Args:
        num_marks: marks are 0 to num_marks - 1.
        dim: width of all features, even.
        num_latents: L_B, the number of latents of each block.
        output_latents: L_I, the number of latents that the heads read, flattened.
        num_heads: a divisor of dim.
        depth: the number of blocks.
        ff_dim: hidden width of feed-forward layers; None means 2 dim.
        components: number of log-normal distributions in the mixture of the next event's time.
        log_gap_mean, log_gap_std: mean and standard deviation of the logarithms of the times between events in the
            training data.
        period: a time after which patterns of events recur, such as a day, or else a typical time between events: see
            `EventEmbedding`.
        queries: the queries with which the blocks read the events. "latents": learned latents alone, as in the papers.
            "newest": latents plus the embedding of the newest event.

    >>> model = cmab_models.CMHP(num_marks=5, dim=16, num_latents=4, num_heads=2).eval()
    >>> with torch.no_grad():
    ...     state = model.observe(None, torch.tensor([0.7]), torch.tensor([4]))
    ...     state = model.observe(state, torch.tensor([1.2]), torch.tensor([0]))
    ...     time, mark = model.next_event(state)
    >>> time.mean.shape, mark.probs.shape, time.intensity(torch.tensor(0.3)).shape
    (torch.Size([1]), torch.Size([1, 5]), torch.Size([1]))
    """

    state_type = CMHPState

    def __init__(
        self,
        num_marks: int,
        dim: int = 32,
        num_latents: int = 8,
        output_latents: int = 4,
        num_heads: int = 4,
        depth: int = 1,
        ff_dim: int | None = None,
        components: int = 16,
        log_gap_mean: float = 0.0,
        log_gap_std: float = 1.0,
        period: float = 1.0,
        queries: str = "newest",
    ) -> None:
        super().__init__()
        if queries not in QUERIES:
            raise ValueError(mismatch("queries", repr(queries), f"one of {', '.join(QUERIES)}"))
        log_gaps = LogGaps(log_gap_mean, log_gap_std)
        self.num_marks, self.queries = num_marks, queries
        self.embedding = EventEmbedding(num_marks, dim, log_gaps, period)
        self.latents = nn.Parameter(torch.randn(output_latents, dim))
        self.blocks = CMABStack(dim, num_latents, num_heads, depth, ff_dim)
        self.head = EventHead(output_latents * dim, num_marks, log_gaps, components)

    def _read(self, state: CMHPState | None, time: Tensor, embedded: Tensor) -> CMHPState:
        return CMHPState(self.blocks.read(embedded, None if state is None else state.attention), embedded[:, 0], time)

    def _summary(self, state: CMHPState | None) -> Tensor:
        if state is None:
            return self._retrieved(*self._nothing())
        return self._retrieved(state.attention, state.newest)

    def _summaries(self, embedded: Tensor, there: Tensor) -> Tensor:
        rows = there.flatten().nonzero().squeeze(1)  # computing padding would only cost time
        nothing, zero = self._nothing()
        states = zip(nothing, prefix_states(self.blocks, embedded), strict=True)
        attention = AttentionState(*(torch.cat([before, after.index_select(1, rows)], 1) for before, after in states))
        summaries = self._retrieved(attention, torch.cat([zero, embedded.flatten(0, 1).index_select(0, rows)]))
        # Rows of summaries; row 0 is the summary of no events.
        place = F.pad(there.flatten().cumsum(0).view_as(there).where(there, 0), (1, 0))
        return summaries.index_select(0, place.flatten()).unflatten(0, place.shape)

    def _nothing(self) -> tuple[AttentionState, Tensor]:
        """Return the state of no events, and zeros (1, dim) in place of the newest event."""
        return self.blocks.init_state(1), self.latents.new_zeros(1, self.latents.shape[1])

    def _retrieved(self, attention: AttentionState, newest: Tensor) -> Tensor:
        queries = self.latents + newest.unsqueeze(1) if self.queries == "newest" else self.latents
        return self.blocks.retrieve(queries, attention).flatten(1)
