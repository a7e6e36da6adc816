"""Steps of continual attention in the fastest eager torch, as peers for the continual kernels.

These are the papers' equations with their errors corrected. The logits are small enough for plain exponentials. There
are few operations, on views that are made in advance, because only this matters at small shapes. Matrices (M, rows,
columns) lose their first dimension if M is 1, since torch is then faster.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.nystrom.reference import segment_ends, segment_means

from .case import identity, wide

ITERATIONS = 6
"""Iterations of the pseudo-inverse, unless others are given."""


def eager_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """The iterated pseudo-inverse of (m, m) or (M, m, m), with five operations per iteration."""
    size = matrix.abs()
    norms = size.sum(-2, keepdim=True).amax(-1, keepdim=True) * size.sum(-1, keepdim=True).amax(-2, keepdim=True)
    add_product = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    seven, thirteen, fifteen = (number * identity(matrix) for number in (7, 13, 15))
    z = matrix.mT / norms
    for _ in range(iterations):
        product = matrix @ z
        inner = add_product(fifteen, product, seven - product, alpha=-1)
        z = add_product(z, z, add_product(thirteen, product, inner, alpha=-1), beta=0, alpha=0.25)
    return z


def eager_attention(query: Tensor, key: Tensor, value: Tensor, number: int) -> Tensor:
    """Whole windows (B, H, N, *): torch's fused attention on both sides of the pseudo-inverse, whose values half
    precision cannot resolve."""
    scale, dtype = key.shape[-1] ** -0.5, wide(key.dtype)
    near, far = (segment_means(part, number) for part in (query, key))
    averaged = F.scaled_dot_product_attention(near.to(key.dtype), key, value).to(dtype)
    return F.scaled_dot_product_attention(query.to(dtype), far, _inverse(near, far, scale) @ averaged).to(query.dtype)


def eager_start(
    query: Tensor, key: Tensor, value: Tensor, number: int, fixed: tuple[Tensor, Tensor] | None
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """The start of a stream after its first window (B, H, n, *):
    rings with a spare row, sums with phi, the pseudo-inverse."""
    near, far = fixed or (segment_means(part, number) for part in (query, key))
    scale = key.shape[-1] ** -0.5
    weights = (scale * near @ key.to(near.dtype).mT).exp_()
    sums = torch.cat([weights @ value.to(near.dtype), weights.sum(-1, keepdim=True)], dim=-1)
    return eager_rings(query, key, value), sums, _inverse(near, far, scale)


def _inverse(near: Tensor, far: Tensor, scale: float) -> Tensor:
    gamma = (scale * near @ far.mT).softmax(-1)
    return eager_pinv(_one(gamma.flatten(0, -3)), ITERATIONS).view_as(gamma)


def eager_rings(*tokens: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.pad(part, (0, 0, 0, 1)) for part in tokens)


class Ring:
    """The newest n + 1 tokens, each in row p % (n + 1), with the first row repeated after the last. So a new token is
    in the row before the evicted token."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        """Starts from a first window (M, n, D), (M, n, E); each value is followed by a 1, so that the sum of these is
        phi."""
        self.rows = key.shape[1] + 1
        self.keys = _one(key.new_zeros(len(key), self.rows + 1, key.shape[2]))
        self.values = _one(value.new_ones(len(value), self.rows + 1, value.shape[2] + 1))
        self.keys[..., : self.rows - 1, :], self.values[..., : self.rows - 1, :-1] = _one(key), _one(value)
        self.keys[..., -1, :], self.values[..., -1, :] = self.keys[..., 0, :], self.values[..., 0, :]
        self.position = self.rows - 1
        places = range(self.rows + 1)
        self._places = [(self.keys[..., i : i + 1, :], self.values[..., i : i + 1, :-1]) for i in places]
        self._pairs = [(self.keys[..., i : i + 2, :].mT, self.values[..., i : i + 2, :]) for i in places]

    def push(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The new key and the evicted key, (D, 2), and their values, (2, E + 1)."""
        place = self.position % self.rows
        self.position += 1
        for i in (0, self.rows) if place == 0 else (place,):
            keys, values = self._places[i]
            keys.copy_(key)
            values.copy_(value)
        return self._pairs[place]

    def window(self) -> tuple[Tensor, Tensor, int]:
        """Keys and values in any order, with one additional row, and the index of that row."""
        return self.keys[..., : self.rows, :], self.values[..., : self.rows, :], self.position % self.rows


class EagerNystrom:
    """A stream of continual Nyström attention, single outputs."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        number: int,
        fixed: tuple[Tensor, Tensor] | None,
        iterations: int,
    ) -> None:
        """Starts from a first window (M, n, D); fixed landmarks are (M, m, D)."""
        self.ring = Ring(key, value)
        self.window, self.number, self.scale, self.iterations = key.shape[1], number, scale, iterations
        near, far = fixed or (segment_means(part[None], number)[0] for part in (query, key))
        self.queries, self.keys = scale * _one(near), _one(far).clone()
        keys, values, evicted = self.ring.window()
        weights = (self.queries @ keys.mT).exp_()
        weights[..., evicted] = 0
        self.sums = weights @ values
        self.signs = key.new_tensor([1.0, -1.0])
        self._mean, self._phi = self.sums[..., :-1], self.sums[..., -1:]
        self._ends = {end % self.window for end in segment_ends(self.window, number)} if fixed is None else set()
        self._segment: list[tuple[Tensor, Tensor]] = []
        self._invert()

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(1, E) or (M, 1, E) of a token (1, D) or (M, 1, D)."""
        keys, values = self.ring.push(key, value)
        if self._ends:
            self._segment.append((query, key))
            if self.ring.position % self.window in self._ends:
                self._replace()
        weights = (self.queries @ keys).exp_().mul_(self.signs)
        (self.sums.addmm_ if self.sums.dim() == 2 else self.sums.baddbmm_)(weights, values)
        if not self._segment and self._ends:
            self._recompute_last()
        return (query @ self.far).softmax(-1) @ self.inverse @ (self._mean / self._phi)

    def _invert(self) -> None:
        self.far = (self.scale * self.keys).mT
        self.inverse = eager_pinv((self.queries @ self.keys.mT).softmax(-1), self.iterations)

    def _replace(self) -> None:
        """The mean of the segment replaces the oldest landmark; the last row of the sums is computed after the other
        rows have moved up."""
        near, far = (torch.cat(part, dim=-2).mean(-2, keepdim=True) for part in zip(*self._segment, strict=True))
        self._segment.clear()
        self.queries = torch.cat([self.queries[..., 1:, :], self.scale * near], dim=-2)
        self.keys = torch.cat([self.keys[..., 1:, :], far], dim=-2)
        self.sums[..., :-1, :] = self.sums[..., 1:, :].clone()
        self._invert()

    def _recompute_last(self) -> None:
        keys, values, evicted = self.ring.window()
        weights = (self.queries[..., -1:, :] @ keys.mT).exp_()
        weights[..., evicted] = 0
        self.sums[..., -1:, :] = weights @ values


class EagerRetroactive(EagerNystrom):
    """A stream with fixed landmarks that gives the outputs of the whole window:
    each query's weights are kept with its token."""

    def __init__(self, query: Tensor, *rest: Any) -> None:
        super().__init__(query, *rest)
        self.weights = (_one(query) @ self.far).softmax(-1)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(n, E) or (M, n, E), oldest token first."""
        super().step(query, key, value)
        self.weights = torch.cat([self.weights[..., 1:, :], (query @ self.far).softmax(-1)], dim=-2)
        return self.weights @ (self.inverse @ (self._mean / self._phi))


class EagerBlocks:
    """The same with fixed landmarks for blocks of tokens: a band that contains the window of each token, with matrix
    products alone."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        fixed: tuple[Tensor, Tensor],
        iterations: int,
        block: int,
    ) -> None:
        self.key, self.value, self.window = _one(key), _one(value), key.shape[1]
        self.queries, far = scale * _one(fixed[0]), _one(fixed[1])
        self.far = (scale * far).mT
        self.inverse = eager_pinv((self.queries @ far.mT).softmax(-1), iterations)
        self.band = band(block, self.window, key).to(key.dtype)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = torch.cat([self.key, key], dim=-2), torch.cat([self.value, value], dim=-2)
        self.key, self.value = keys[..., -self.window :, :], values[..., -self.window :, :]
        weights = (self.queries @ keys.mT).exp_()
        near = (query @ self.far).softmax(-1) @ self.inverse
        return ((near / (self.band @ weights.mT)) @ weights).mul_(self.band) @ values


class EagerExact:
    """A stream of exact attention: a ring buffer, whose order does not matter for a softmax, and torch's own attention
    over it."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        """Starts from a first window (1, H, n, D)."""
        self.keys, self.values, self.position = key.clone(), value.clone(), 0
        self._places = list(zip(self.keys.split(1, dim=2), self.values.split(1, dim=2), strict=True))

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._places[self.position % len(self._places)]
        self.position += 1
        keys.copy_(key)
        values.copy_(value)
        return F.scaled_dot_product_attention(query, self.keys, self.values)


class EagerExactBlocks:
    """The same for blocks of tokens; each block has a band that contains its windows as a mask."""

    def __init__(self, key: Tensor, value: Tensor, block: int) -> None:
        self.key, self.value, self.window = key, value, key.shape[2]
        self.band = band(block, self.window, key)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        self.key, self.value = keys[:, :, -self.window :], values[:, :, -self.window :]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=self.band)


def band(tokens: int, window: int, like: Tensor) -> Tensor:
    """(t, n + t): for each of t tokens, whether a key is in its window. The keys are the n before the tokens, and the t
    tokens."""
    age = torch.arange(tokens, device=like.device)[:, None] + window - torch.arange(window + tokens, device=like.device)
    return (age >= 0) & (age < window)


def _one(matrices: Tensor) -> Tensor:
    return matrices[0] if len(matrices) == 1 else matrices
