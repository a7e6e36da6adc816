"""What continual attention keeps of a stream between steps: a ring of the window's tokens, and a few sums over it.

States are values: a step returns a new one and leaves the one that it was given as good as it was. It costs nothing extra, since the step
of a state that nobody else shares writes where no state looks: into the free row of the ring, and into `spare`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ContinualNystromState(NamedTuple):
    """A window of n tokens under continual Nyström attention. Its size is constant: (n + 1)(2 D + E) + 2 m (E + 3) + 2 m D + m^2 a head."""

    queries: Tensor
    """(B, H, C, D), a ring of C > n rows in the dtype of the tokens: token p = 0, 1, ... of the stream is in row p % C."""
    keys: Tensor
    """(B, H, C, D), likewise."""
    values: Tensor
    """(B, H, C, E), likewise."""
    sums: Tensor
    """(B, H, m, E + 3) in the state dtype. Row r of log-scale c: exp(-c) Delta V, exp(-c) phi(Delta), c, and the peak of its scaled phi."""
    spare: Tensor
    """Like `sums`: where the next step writes."""
    landmark_queries: Tensor
    """(B, H, m, D) in the state dtype, oldest first."""
    landmark_keys: Tensor
    """(B, H, m, D), likewise."""
    inverse: Tensor
    """(B, H, m, m) in the state dtype: the pseudo-inverse of Gamma_phi."""
    scale: Tensor
    """() float64 on the CPU: what logits are multiplied by."""
    position: int | Tensor
    """How many tokens the stream has had. On a GPU (B, H) int64 there, so that a captured step advances it."""
    window: int
    """n"""
    pinv_iterations: int
    """Of the pseudo-inverse; 0: exact."""
    fixed: int
    """1 where landmarks were given and stay, 0 where they follow the window."""


class ContinualAttentionState(NamedTuple):
    """A window of n tokens under exact attention: (n + 1)(2 D + E) a head, and 2 n (E + 3) more once retroactive outputs were asked for."""

    queries: Tensor
    """(B, H, C, D), a ring of C > n rows in the dtype of the tokens: token p = 0, 1, ... of the stream is in row p % C."""
    keys: Tensor
    """(B, H, C, D), likewise."""
    values: Tensor
    """(B, H, C, E), likewise."""
    sums: Tensor
    """(B, H, n, E + 3) in the state dtype: as in `ContinualNystromState`, row i for the query of the window's i-th token. (B, H, 0, E + 3)
    while only single outputs are asked for."""
    spare: Tensor
    """Like `sums`: where the next step writes."""
    scale: Tensor
    """() float64 on the CPU: what logits are multiplied by."""
    position: int | Tensor
    """How many tokens the stream has had. On a GPU (B, H) int64 there, so that a captured step advances it."""
    window: int
    """n"""
