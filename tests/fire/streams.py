"""Streams with random pushes, merges, removals, saves and restores, and the errors of their states, for `python -m
tests.fire`.

Four distributions of the logits are four batch elements, whose results do not depend on each other.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck

LAWS = ("N(0, 1)", "N(0, 10²)", "spikes of 20", "spikes of 40")
SIZES = (1, 1, 1, 2, 5)
"""The sizes that chunks have, each with the same probability."""
WINDOW = 64
LIVE = 400
"""The number of points that a set holds before some are removed."""
BLOCK = 4096
EPS = torch.finfo(torch.float32).eps

Figures = dict[str, dict[str, Any]]
"""distribution -> the figures that were counted and measured"""


def logits(first: int, count: int) -> Tensor:
    """Return the logits (4, 1, count, 1) of the tokens `first`, `first` + 1, ... from the four distributions."""
    number, noise = torch.arange(first, first + count), torch.randn(4, 1, count, 1)
    noise[1] *= 10
    noise[2, 0, :, 0] += 20 * (number % 5_000 == 4_999)
    noise[3, 0, :, 0] += 40 * (number % 50_000 == 49_999)
    return noise


def chunks(chance: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys (4, 1, t, 1), which are the logits, and values (4, 1, t, 2), without end."""
    first = 0
    while True:
        cut = [chance.choice(SIZES) for _ in range(BLOCK // 2)]
        keys = logits(first, sum(cut))
        yield from zip(keys.split(cut, 2), torch.randn(*keys.shape[:3], 2).split(cut, 2), strict=True)
        first += sum(cut)


def restored(state: Any) -> Any:
    """Return the state as a file of tensors and ints returns it."""
    file = io.BytesIO()
    torch.save(state._asdict(), file)
    file.seek(0)
    return type(state)(**torch.load(file, weights_only=True))


def summary(errors: Tensor, **counted: Any) -> Figures:
    """Return the figures of each distribution from errors (4, number)."""
    ranks = torch.tensor([0.5, 0.999], dtype=errors.dtype)
    found: Figures = {}
    for i, law in enumerate(LAWS):
        median, most = (float(q) for q in _quantiles(errors[i], ranks))
        found[law] = {"median": median, "p999": most, "largest": float(errors[i].max())}
        found[law] |= {name: value[i] if isinstance(value, list) else value for name, value in counted.items()}
    return found


def _quantiles(errors: Tensor, ranks: Tensor) -> Tensor:
    ordered = errors.sort().values  # torch.quantile takes 16 million elements at most
    return ordered[(ranks * (len(ordered) - 1)).long()]


class Live:
    """The points that a set holds, in the chunks in which they were added."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.chunks, self.points = chance, [], 0

    def add(self, chunk: tuple[Tensor, Tensor]) -> None:
        self.chunks.append(chunk)
        self.points += chunk[0].shape[2]

    def take(self) -> tuple[Tensor, Tensor]:
        """Remove a random chunk, and return it."""
        at = self.chance.randrange(len(self.chunks))
        self.chunks[at], self.chunks[-1] = self.chunks[-1], self.chunks[at]
        gone = self.chunks.pop()
        self.points -= gone[0].shape[2]
        return gone

    def all(self) -> tuple[Tensor, Tensor]:
        return torch.cat([key for key, _ in self.chunks], 2), torch.cat([value for _, value in self.chunks], 2)


def attention_stream(steps: int, seed: int = 0, every: int = 1000) -> Figures:
    """Return the errors of an `AttentionState` relative to the weighted mean of the absolute values, at every
    `every`-th step.

    A row is recomputed from its points if a removal is not reliable, or if its history allows an error of 1e-2.
    `of_allowed` is the largest error as a multiple of the error that the history allows: a rounding of float32 at each
    step, divided by the share that each removal left.
    """
    torch.manual_seed(seed)
    chance, query = random.Random(seed), torch.ones(1, 1, 1, 1).expand(4, 1, 1, 1)
    live, source = Live(chance), chunks(chance)
    state, allowed = ck.empty_state(4, 1, 1, 2), torch.zeros(4, 1, 1, dtype=torch.float64)
    errors, ratios, afresh = [], [], torch.zeros(4, dtype=torch.int64)
    for step in range(1, steps + 1):
        before = state.lse
        if live.points > LIVE or (live.points > LIVE // 2 and chance.random() < 0.4):
            state, reliable = ck.remove_from_state(state, query, *live.take(), scale=1.0)
            kept = reliable & (allowed < 1e-2)
            if not kept.all():
                new = ck.attention_state(query, *live.all(), scale=1.0)
                state = ck.AttentionState(
                    torch.where(kept.unsqueeze(-1), state.out, new.out), torch.where(kept, state.lse, new.lse)
                )
                allowed = allowed.where(kept, 0.0)
                afresh += ~kept.view(4)
        else:
            chunk = next(source)
            live.add(chunk)
            if chance.random() < 0.1:
                state = ck.merge_states(state, ck.attention_state(query, *chunk, scale=1.0))
            else:
                state = ck.attention_state(query, *chunk, state=state, scale=1.0)
        share = (before - state.lse).exp().clamp(max=1 / EPS)  # above 1 for a removal: the growth of the errors
        allowed = ((share * allowed).square() + (share.clamp(min=1.0) * EPS).square()).sqrt()
        if chance.random() < 1e-3:
            state = restored(state)
        if step % every == 0:
            key, value = (t.double() for t in live.all())
            weight = key.softmax(2)
            size = (weight * value.abs()).sum((1, 2)).norm(dim=-1)
            error = (state.out[:, 0, 0] - (weight * value).sum((1, 2))).norm(dim=-1) / size
            errors.append(error)
            ratios.append(error / (allowed.view(4) + 4 * EPS))
    of_allowed = torch.stack(ratios, 1).amax(1).tolist()
    return summary(torch.stack(errors, 1), steps=steps, afresh=afresh.tolist(), of_allowed=of_allowed)


def ridge_stream(steps: int, seed: int = 0, every: int = 1000) -> Figures:
    """Return the errors of a `RidgeState` relative to the largest sums that it has had, at every `every`-th step;
    counts must be exact.

    A key is three columns: its logit, its value's first column, and 1.
    """
    torch.manual_seed(seed)
    chance = random.Random(seed)
    live, source = Live(chance), chunks(chance)
    state, errors, peak = ck.empty_ridge(4, 1, 3, 2), [], torch.zeros(4, dtype=torch.float64)
    for step in range(1, steps + 1):
        if live.points > LIVE or (live.points > LIVE // 2 and chance.random() < 0.4):
            state = ck.remove_ridge(state, *live.take())
        else:
            logit, value = next(source)
            chunk = torch.cat([logit, value[..., :1], torch.ones_like(logit)], -1), value
            live.add(chunk)
            alone = chance.random() < 0.1
            state = ck.merge_ridge(state, ck.ridge_state(*chunk)) if alone else ck.ridge_state(*chunk, state=state)
        if chance.random() < 1e-3:
            state = restored(state)
        peak = peak.maximum(state.gram.flatten(1).amax(1))
        if step % every == 0:
            key, value = (t.double() for t in live.all())
            assert (state.count == key.shape[2]).all()
            differences = [state.gram - key.mT @ key, state.moment - key.mT @ value]
            errors.append(torch.cat([each.flatten(1) for each in differences], 1).abs().amax(1) / peak)
    return summary(torch.stack(errors, 1), steps=steps)


def window_stream(start: Callable[..., Any], step: Callable[..., Any], steps: int, seed: int = 0) -> Figures:
    """Return the absolute errors of all outputs of a sliding window; values are N(0, 1).

    From time to time the state is saved and restored or copied, or an older state is also stepped, which must give the
    same bits.
    """
    torch.manual_seed(seed)
    chance = random.Random(seed)
    keys, values = logits(0, WINDOW), torch.randn(4, 1, WINDOW, 2)
    state, errors, taken = start(torch.ones_like(keys), keys, values), [], 0
    source, parts, outs = chunks(chance), [(keys, values)], []
    while taken < steps:
        key, value = next(source)
        query, older = torch.ones_like(key), None
        if chance.random() < 2e-3:
            state = restored(state) if chance.random() < 0.5 else copy.deepcopy(state)
        if chance.random() < 2e-3:
            older = state
        out, state = step(state, query, key, value)
        if older is not None:
            assert torch.equal(step(older, query, key, value).out, out), "an older state gives other bits"
        outs.append(out)
        parts.append((key, value))
        taken += 1
        if len(outs) == BLOCK or taken == steps:
            keys, values = (torch.cat(each, 2).double() for each in zip(*parts, strict=True))
            weight = keys[:, 0, :, 0].unfold(1, WINDOW, 1).softmax(-1)[:, 1:]
            right = torch.einsum("btn,bten->bte", weight, values[:, 0].unfold(1, WINDOW, 1)[:, 1:])
            errors.append((torch.cat(outs, 2)[:, 0] - right).abs().flatten(1).float())
            outs, parts = [], [(keys[:, :, 1 - WINDOW :].float(), values[:, :, 1 - WINDOW :].float())]
            parts = [tuple(torch.cat([torch.zeros_like(t[:, :, :1]), t], 2) for t in parts[0])]
    return summary(torch.cat(errors, 1), steps=steps, outputs=sum(each.shape[1] for each in errors) // 2)


def _nystrom_start(query: Tensor, key: Tensor, value: Tensor) -> Any:
    one = torch.ones(1, 2, 1)
    return ck.continual_nystrom_init(query, key, value, landmarks=(one, one), scale=1.0)


STREAMS: dict[str, Callable[[int], Figures]] = {
    "attention_state": attention_stream,
    "ridge_state": ridge_stream,
    "continual_nystrom_step": lambda steps: window_stream(_nystrom_start, ck.continual_nystrom_step, steps),
    "continual_attention_step": lambda steps: window_stream(
        lambda *first: ck.continual_attention_init(*first, scale=1.0), ck.continual_attention_step, steps
    ),
}
"""operator -> its stream of this number of steps, and the figures of each distribution"""
