"""How calls are timed on a GPU: captured once, their replays in turn with what they are compared with, on inputs that no cache holds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cmab_kernels.measure import interleave

Call = Callable[[], Any]
ROUNDS = 30
SAMPLE = 1e-3
"""Seconds that a sample takes at least, as a row of calls: an event's own cost is some microseconds."""


def captured(call: Call) -> Call:
    """Its replay. What it needs besides, compiled kernels and handles, it gets from a first call on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def in_turn(calls: Sequence[Call]) -> Call:
    """Each time the next of them."""
    following = itertools.cycle(calls)
    return lambda: next(following)()


def samples_of(calls: Mapping[str, Call], rounds: int = ROUNDS, device: str = "cuda") -> dict[str, list[float]]:
    """Seconds, all of them in turn within a round; `calls` are ready to be timed."""
    once = {name: times[-1] for name, times in interleave(calls, 3, device).items()}
    repeats = {name: max(1, min(500, int(SAMPLE / max(seconds, 1e-7)))) for name, seconds in once.items()}
    return interleave(calls, rounds, device, repeats)


def seconds_of(calls: Sequence[Call], rounds: int = ROUNDS) -> float:
    """The median of one call; the calls differ in their inputs."""
    return statistics.median(samples_of({"": in_turn([captured(call) for call in calls])}, rounds)[""])


def spread(samples: Sequence[float]) -> float:
    """The distance of the quartiles as a share of the median."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def ratios(samples: Sequence[float], others: Sequence[float]) -> list[float]:
    """The quartiles of the ratios within each round."""
    return statistics.quantiles([a / b for a, b in zip(samples, others, strict=True)], n=4, method="inclusive")


def cold_copies(bytes_read: int) -> int:
    """How many inputs there must be, that one has left the cache when its turn comes."""
    return min(1 + 4 * torch.cuda.get_device_properties(0).L2_cache_size // max(bytes_read, 1), 16)


def memory_of(call: Call) -> int:
    """Bytes beyond what was there, at the peak, results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
