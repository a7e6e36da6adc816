"""Costs and likelihoods of neural processes against a size, as measured: the kinds of figures 3, 4, 6 and 7 of the
paper of CMANP (arXiv 2305.14567)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cmab_kernels.measure import peak_memory, seconds

from ..neural_processes import Batch
from ..systems import SYSTEMS
from . import colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYSTEMS_OF_SIZES = ("cmanp", "cmanp-and", "lbanp", "lbanp-nd", "eqtnp", "tnp-d", "tnp-nd", "tnp-a")
POINTS = (100, 300, 1_000, 3_000, 10_000)
TARGETS = (30, 100, 300, 1_000, 3_000)
OTHERS = 100
"""Targets where contexts grow, and points of the context where targets grow."""
CONTEXTS = (500, 1_000, 2_000)
BLOCKS_OF_TARGETS = (1, 2, 5, 10, 20, 50, 100, 200)
BLOCKS_OF_POINTS = (1, 5, 20, 100, 500, 2_000)
SECONDS, MEBIBYTES, LIKELIHOOD = "Seconds, one thread", "MiB beyond the inputs", "Log-likelihood of a target"
SLOW, REPEATS = 2.0, 5
"""The time is the shortest of 5 calls; a call of more than 2 seconds runs once."""
BUDGET = 40.0
MOST_MEMORY = 3_000.0
"""The limits of a measurement, in seconds and MiB. Sizes that may exceed one of them are left out."""


class Point(NamedTuple):
    """A point of a line: values by unit."""

    line: str
    at: int
    values: dict[str, float]


def over_context(sizes: Sequence[int] = POINTS, systems: Iterable[str] = SYSTEMS_OF_SIZES) -> list[Point]:
    """Return the costs of the likelihood of 100 targets, against the points of the context."""
    return _costs(systems, sizes, lambda size: (size, OTHERS))


def over_targets(sizes: Sequence[int] = TARGETS, systems: Iterable[str] = SYSTEMS_OF_SIZES) -> list[Point]:
    """Return the costs of the likelihood, given 100 points, against the targets."""
    return _costs(systems, sizes, lambda size: (OTHERS, size))


def over_blocks_of_targets(
    blocks: Sequence[int] = BLOCKS_OF_TARGETS, contexts: Iterable[int] = CONTEXTS
) -> list[Point]:
    """Return the costs of a CMANP-AND's likelihood of as many targets as the largest block, against b_Q."""
    with _one_thread():
        return [
            Point(f"{points:,} points", size, _cost(_likelihood, "cmanp-and", points, max(blocks), size))
            for points in contexts
            for size in blocks
        ]


def over_blocks_of_points(blocks: Sequence[int] = BLOCKS_OF_POINTS, contexts: Iterable[int] = CONTEXTS) -> list[Point]:
    """Return the costs of the state of a CMANP, against the number of points b_C that are read at a time."""
    with _one_thread():
        return [
            Point(f"{points:,} points", size, _cost(_reading, points, size))
            for points in contexts
            for size in blocks
            if size <= points
        ]


@torch.no_grad()
def over_trained_blocks(model: Any, batches: Sequence[Batch], blocks: Iterable[int], line: str) -> list[Point]:
    """Return the likelihoods of a trained joint model, against the targets that are predicted at a time."""
    return [
        Point(
            line,
            size,
            {
                LIKELIHOOD: torch.stack([model.log_prob(*each, block_size=size).mean() for each in batches])
                .mean()
                .item()
            },
        )
        for size in blocks
    ]


def _costs(systems: Iterable[str], sizes: Sequence[int], both: Callable[[int], tuple[int, int]]) -> list[Point]:
    found = []
    with _one_thread():
        for system in systems:
            for size, larger in zip(sizes, [*sizes[1:], sizes[-1]], strict=True):
                found.append(Point(system, size, _cost(_likelihood, system, *both(size), None)))
                # Attention between all rows costs the square of their number.
                growth = (larger / size) ** 2
                if growth * found[-1].values[SECONDS] > BUDGET or growth * found[-1].values[MEBIBYTES] > MOST_MEMORY:
                    break
    return found


def _cost(prepare: Callable[..., Callable[[], list[Tensor]]], *arguments: Any) -> dict[str, float]:
    peak = peak_memory(prepare, *arguments, warm_up=arguments, limit=600)
    task = prepare(*arguments)
    first = seconds(task)  # the first call in a process also sets up threads and libraries
    best = min(seconds(task) for _ in range(1 if first > SLOW else REPEATS))
    return {SECONDS: best, MEBIBYTES: peak.extra / 2**20}


def _likelihood(system: str, points: int, targets: int, block_size: int | None) -> Callable[[], list[Tensor]]:
    """Return a call that evaluates a likelihood with a model of the papers' size. Inputs are made before the call."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, count, width, generator=generator) for count in (points, targets) for width in (2, 3)]
    model: Any = SYSTEMS[system](dim_x=2, dim_y=3).eval()

    def task() -> list[Tensor]:
        with torch.no_grad():
            return [model.log_prob(*inputs, block_size=block_size)]

    return task


def _reading(points: int, block: int) -> Callable[[], list[Tensor]]:
    """Return a call that reads a context in blocks."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, points, width, generator=generator) for width in (2, 3))
    model: Any = SYSTEMS["cmanp"](dim_x=2, dim_y=3).eval()

    def task() -> list[Tensor]:
        with torch.no_grad():
            state = None
            for some_x, some_y in zip(x.split(block, 1), y.split(block, 1), strict=True):
                state = model.condition(some_x, some_y, state)
        assert state is not None
        return list(state)

    return task


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def figure(points: Sequence[Point], size: str, title: str) -> Figure:
    """Return the picture of points: an axis for each unit, against `size`."""
    from matplotlib import pyplot as plt

    units = list(points[0].values)
    made, several = plt.subplots(1, len(units), figsize=(4.4 * len(units) + 1.2, 3.6), squeeze=False)
    lines = list(dict.fromkeys(point.line for point in points))
    for axes, unit in zip(several[0], units, strict=True):
        for i, line in enumerate(lines):
            each = [point for point in points if point.line == line and unit in point.values]
            marker, dashes = "os^Dv<>P"[i % 8], ("-", "--", ":")[i % 3]
            axes.plot(
                [point.at for point in each],
                [point.values[unit] for point in each],
                linestyle=dashes,
                marker=marker,
                color=colour(line),
                markersize=4,
                label=line,
            )
        axes.set(xscale="log", yscale="linear" if unit == LIKELIHOOD else "log", xlabel=size, title=unit)
        axes.grid(True, color="0.92")
    several[0, -1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    made.suptitle(title, x=0.01, ha="left")
    made.set_layout_engine("constrained")
    return made
