"""`python -m cmab_models.reproduce.figures`: measure the figures of the paper of CMANP on this machine, and write
FIGURES.md.

Costs are those of models of the papers' size. Likelihoods are those of small models after few steps: they show the
form of a curve, and are no published numbers.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cmab_kernels.info import processor

from ..cli import kept
from ..neural_processes import Batch
from ..pictures import save, scans
from ..tasks import seeded
from ..tasks.functions import FunctionTask
from ..tasks.images import Digits
from ..training import Run, provenance
from .jobs import Experiment
from .results import number
from .runner import finished, run_all

PAGE = Path(__file__).parents[1] / "FIGURES.md"
LATENTS = (1, 2, 4, 8, 16, 32)
STEPS = 1_000
"""Steps of each training: a fifth to a tenth of those of `make reproduce`."""
SMALL_DIGITS = {"shrink": 2, "size": 14, "most_points": 100}
BATCHES = 100
"""Batches of functions on which a trained model is evaluated."""


class Part(NamedTuple):
    """A figure: how it is measured, what its sizes are, and its title."""

    measure: Callable[[Path, float], list[scans.Point]]
    size: str
    title: str
    text: str


def _latents(folder: Path, share: float) -> list[scans.Point]:
    """Return the likelihoods of trained models against their numbers of latents."""
    found = []
    for latents in LATENTS:
        settings = {"model.num_latents": latents}
        for run in _trained(f"latents {latents}", ("cmanp", "lbanp"), folder, share, settings):
            score = (finished(run) or {})["scores"]["log_likelihood"]
            found.append(scans.Point(run.system, latents, {scans.LIKELIHOOD: score}))
    return sorted(found, key=lambda point: point.line)


def _blocks(folder: Path, share: float) -> list[scans.Point]:
    """Return the likelihoods of a trained CMANP-AND against its block size."""
    (run,) = _trained("blocks", ("cmanp-and",), folder, share, {})
    task, generator = run.task, seeded(1)
    assert isinstance(task, FunctionTask)
    batches = [task.batch(generator) for _ in range(max(1, round(share * BATCHES)))]
    return scans.over_trained_blocks(kept(run), batches, (1, 2, 3, 5, 10, 20, 50), "cmanp-and")


def _plateau(
    name: str, settings: dict[str, Any], budgets: Sequence[int], folder: Path, share: float
) -> list[scans.Point]:
    """Return likelihoods of digits over training steps: given their pixels, given another image's, and without a
    model."""
    found = []
    for steps in budgets:
        run, *_ = _trained(f"{name} {steps}", ("cmanp",), folder, share, settings, steps, "digits")
        task, record = run.task, finished(run) or {}
        assert isinstance(task, Digits)
        own, other = likelihoods_of_contexts(kept(run), list(task._batches("seen")))
        mean = task.references()["pixel_mean_seen"]
        seconds = {"CPU seconds": record["cpu_seconds"]}
        found.append(scans.Point("cmanp", steps, {scans.LIKELIHOOD: own} | seconds))
        for line, score in (("cmanp, pixels of another image", other), ("mean of each pixel", mean)):
            found.append(scans.Point(line, steps, {scans.LIKELIHOOD: score}))
    return sorted(found, key=lambda point: point.line)


@torch.no_grad()
def likelihoods_of_contexts(model: Any, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return the mean likelihood of targets given their own context, and given the values of another function's."""
    scores = [
        [model.log_prob(x, values, *targets).mean() for values in (y, y.roll(1, 0))] for x, y, *targets in batches
    ]
    own, other = torch.tensor(scores).mean(0).tolist()
    return own, other


def _trained(
    name: str,
    systems: tuple[str, ...],
    folder: Path,
    share: float,
    settings: dict[str, Any],
    steps: int = STEPS,
    task: str = "gp-rbf",
) -> Sequence[Run]:
    """Return finished runs on a task, functions of a Gaussian process if it is not named."""
    few = {"steps": max(1, round(share * steps)), "evaluation_batches": max(1, round(share * BATCHES))}
    runs = list(Experiment(name, task, systems, (0,), few | settings).runs(folder))
    failed = run_all(runs, 1, lambda run, code: print(f"{run.folder.name}, {name}: {'failed' if code else 'done'}"))
    if failed:
        raise RuntimeError(f"{failed[0].folder / 'log.txt'} says why a training failed")
    return runs


def _scan(measured: Callable[..., list[scans.Point]], sizes: Sequence[int]) -> Callable[..., list[scans.Point]]:
    """Return a measurement that takes a share of the sizes."""
    return lambda _, share: measured(sizes[: max(2, round(share * len(sizes)))])


FIGURES: dict[str, Part] = {
    "context": Part(
        _scan(scans.over_context, scans.POINTS),
        "points of the context",
        "The likelihood of 100 targets",
        "Figure 3 of the paper, over the context. CMANP-AND predicts blocks of 5 targets. Sizes at which a system may "
        f"take more than {scans.BUDGET:g} s or {scans.MOST_MEMORY:,.0f} MiB are left out.",
    ),
    "targets": Part(
        _scan(scans.over_targets, scans.TARGETS),
        "targets",
        "The likelihood of targets given 100 points",
        "Figure 3 of the paper, over the targets. The joint models that predict all targets at once have a covariance "
        "of all their values; CMANP-AND has one of each block of 5 targets.",
    ),
    "latents": Part(
        _latents,
        "latents",
        f"Functions of a Gaussian process, {STEPS:,} steps",
        f"Figure 4 of the paper, with a small budget: width 32, 2 blocks, {STEPS:,} steps, one seed, {BATCHES} "
        "batches. L_I and L_B are the same number.",
    ),
    "trained_blocks": Part(
        _blocks,
        "targets of a block",
        f"A CMANP-AND after {STEPS:,} steps",
        "The likelihood of one trained model over its block size, with the same budget. In training all targets are "
        "one block, as in the authors' code.",
    ),
    "plateau": Part(
        partial(_plateau, "digits", SMALL_DIGITS, (1_000, 3_000, 10_000, 30_000)),
        "training steps",
        "Digits of 14 x 14 pixels",
        "Not in the paper: when does a CMANP begin to read the known pixels? Width 32, 2 blocks, 16 latents, batches "
        "of 16 images of 2,800, one seed for each number of steps. A model that reads the known pixels loses if they "
        "are those of another image.",
    ),
    "whole_digits": Part(
        partial(_plateau, "whole digits", {}, (3_000, 10_000, 30_000, 100_000)),
        "training steps",
        "Digits of 28 x 28 pixels",
        "The same model on whole images, with up to 200 known pixels.",
    ),
    "blocks_of_targets": Part(
        _scan(scans.over_blocks_of_targets, scans.BLOCKS_OF_TARGETS),
        "targets of a block",
        "A CMANP-AND's likelihood of 200 targets",
        "Figures 6 and 7 of the paper: time over the block size, with contexts of up to 2,000 points; here for blocks "
        "of targets, b_Q.",
    ),
    "blocks_of_points": Part(
        _scan(scans.over_blocks_of_points, scans.BLOCKS_OF_POINTS),
        "points that are read at a time",
        "A CMANP reads its context",
        "The same for blocks of points of the context, b_C.",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cmab_models.reproduce.figures", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"which (default: all): {', '.join(FIGURES)}")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/figures"), help="where measurements and runs are kept"
    )
    parser.add_argument("--output", type=Path, default=PAGE, help="the page to write (default: that of the package)")
    parser.add_argument("--share", type=float, default=1.0, help="take this share of sizes and steps (default: 1)")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.figures if name not in FIGURES]:
        parser.error(f"there is no figure {unknown[0]!r}")
    for name in asked.figures or FIGURES:
        points = FIGURES[name].measure(asked.folder, asked.share)
        where = provenance() | {"processor": next(processor()), "cores": os.cpu_count(), "load": _load()}
        measured = {"points": points, "share": asked.share, "where": where}
        asked.folder.mkdir(parents=True, exist_ok=True)
        (asked.folder / f"{name}.json").write_text(json.dumps(measured))
        print(f"measured {name}")
    write(asked.output, asked.folder)
    print(f"wrote {asked.output}")


def write(page: Path, folder: Path) -> None:
    """Write the page and the pictures of all figures that were measured into `folder`."""
    told = [
        "# Figures",
        "Written by `python -m cmab_models.reproduce.figures`: the kinds of figures 3, 4, 6 and 7 of Feng et al., "
        "Memory Efficient Neural Processes via Constant Memory Attention Block (arXiv 2305.14567), measured on the "
        "machine that is named below each table, with one thread. Costs are those of models of the papers' size for "
        "points of 2 coordinates and 3 values, without gradients; a time is the shortest of 5 calls, and of one call "
        "where it takes more than 2 seconds. Where the "
        "load is above the number of cores, times are too long, by up to several times; memory is not affected.",
    ]
    for name, part in FIGURES.items():
        file = folder / f"{name}.json"
        if not file.exists():
            continue
        measured = json.loads(file.read_text())
        points = [scans.Point(*point) for point in measured["points"]]
        picture = page.parent / "pictures_of_results" / f"figure_{name}.png"
        save(partial(scans.figure, points, part.size, part.title), picture)
        told += [
            f"## {part.title}, over {part.size}",
            part.text,
            *([] if measured["share"] == 1.0 else [f"**Only {100 * measured['share']:g}% of sizes and steps.**"]),
            f"![{part.title}]({picture.relative_to(page.parent).as_posix()})",
            *(_table(points, unit) for unit in points[0].values),
            _where(measured["where"]),
        ]
    page.write_text("\n\n".join(told) + "\n")


def _table(points: Sequence[scans.Point], unit: str) -> str:
    """Return the values of a unit: a row for each line that has it, and a column for each size."""
    points = [point for point in points if unit in point.values]
    sizes = sorted({point.at for point in points})
    lines = [f"| {unit} | " + " | ".join(f"{size:,}" for size in sizes) + " |", "|---|" + "---:|" * len(sizes)]
    for line in dict.fromkeys(point.line for point in points):
        values = {point.at: number(point.values[unit]) for point in points if point.line == line}
        lines.append(f"| {line} | " + " | ".join(values.get(size, "") for size in sizes) + " |")
    return "\n".join(lines)


def _where(where: dict[str, Any]) -> str:
    machine = f"{where['processor']} of {where['cores']} cores"
    if where["load"] is not None:
        machine += f", with a load of {where['load']:.1f} over the last 5 minutes"
    return f"{machine}; cmab_kernels {where['cmab_kernels']}, torch {where['torch']}, {where['time']}."


def _load() -> float | None:
    """Return how many processes of this machine were running; None where that is not known."""
    return os.getloadavg()[1] if hasattr(os, "getloadavg") else None


if __name__ == "__main__":
    main()
