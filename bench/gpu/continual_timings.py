"""A continual step of one token: captured, fed eagerly, and eager torch's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.scans.nystrom_eager import EagerNystrom

from .continual_parity import Problem, Tokens, start, step
from .graphs import captured, memory_of, samples_of, spread
from .rates import measured_rates
from .sections import Row, Task
from .timings import beside_floor

HEADS = (1, 64, 1024)
LAUNCH = 2e-6
"""Seconds that an empty kernel of a graph takes on the GPUs that we know."""
PROBLEM = Problem("float32")
"""m = 16, n = d = 64, single outputs."""


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    makers = {"cuda, captured": _captured, "cuda, eager": _eager, "torch, eager": _torch}
    return [
        Task(
            f"{heads} heads; {name}",
            lambda heads=heads, name=name, make=make: _measure(heads, name, make, device),
            name.startswith("torch"),
        )
        for heads in HEADS
        for name, make in makers.items()
    ]


def _captured(tokens: Tokens, token: Tokens) -> Callable[[], Any]:
    state = start(PROBLEM, tokens)
    return captured(lambda: step(PROBLEM, state, token, "cuda"))


def _eager(tokens: Tokens, token: Tokens) -> Callable[[], Any]:
    held = [start(PROBLEM, tokens)]

    def advance() -> None:
        held[0] = step(PROBLEM, held[0], token, "cuda").state

    return advance


def _torch(tokens: Tokens, token: Tokens) -> Callable[[], Any]:
    """It makes tensors on the default device; to set that costs it a microsecond for each of its operations."""
    new = tuple(t[0] if t.shape[1] > 1 else t[0, 0] for t in token)
    with torch.device(tokens[0].device):
        stream = EagerNystrom(*(t[0] for t in tokens), PROBLEM.width**-0.5, PROBLEM.landmarks, None, 6)

    def advance() -> None:
        with torch.device(tokens[0].device):
            stream.step(*new)

    return advance


def _measure(heads: int, name: str, make: Callable[[Tokens, Tokens], Callable[[], Any]], device: str) -> Row:
    torch.manual_seed(0)
    tokens, token = (tuple(torch.randn(1, heads, n, 64, device=device) for _ in range(3)) for n in (64, 1))
    advance = make(tokens, token)
    advance()
    samples = samples_of({"": advance})[""]
    # Read: landmarks, inverse, sums and a token of each ring; written: sums, and a token.
    moved = heads * 4 * (2 * 16 * 64 + 16 * 16 + 2 * 16 * 67 + 8 * 64)
    least = max(LAUNCH, moved / measured_rates(device).memory)
    return {
        "shape": f"{heads} heads, m 16, n 64, d 64",
        "pass": "step",
        "impl": name,
        "seconds": statistics.median(samples),
        "spread": spread(samples),
        "memory": memory_of(advance),
        **beside_floor(statistics.median(samples), least, "launch" if least == LAUNCH else "memory"),
    }
