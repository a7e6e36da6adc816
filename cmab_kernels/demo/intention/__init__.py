"""The demo `intention`: ten classes learnt from 5 examples each, and a map of points learnt from 5 pairs.

The demo compares Intention with attention over the same examples and with estimators of scikit-learn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...runtime.backends import explain, use_impl
from .. import checked_output, require
from . import cloud, digits


def run(output: str) -> None:
    """Measure both tasks, print tables, and draw them to `output`.

    Raises `SystemExit` with one line if a package is missing or `output` cannot be written.
    """
    require("sklearn", "skimage", "matplotlib", "tqdm")
    target = checked_output(output)
    rows = explain("intention", *3 * [torch.empty(1, 1, 1, digits.WIDTH)])
    impl = next(row.impl for row in rows if row.usable)
    with use_impl(impl), torch.no_grad():
        print(
            f"Intention (cmab_kernels' {impl} implementation, torch {torch.__version__}) beside attention over the "
            "same examples.\n"
        )
        lessons, outcomes = _learn()
        for line in _digit_lines(lessons, outcomes):
            print(line)
        clouds = [cloud.measure(noise) for noise in cloud.NOISES]
        for line in _cloud_lines(clouds):
            print(line)
        from .plot import draw

        existed = target.exists()
        draw(lessons, outcomes, clouds[0], target)
    print(f"{target} {'replaced' if existed else 'written'}")


def _learn() -> tuple[digits.Lessons, list[digits.Outcome]]:
    """Run every learner. Return the lessons, and an outcome for each learner, the most accurate first."""
    from tqdm import tqdm

    trials, lessons = digits.draw(digits.TRIALS, half=0), digits.draw(digits.LESSONS, half=1)
    steps = sum(len(learner.settings) + 1 for learner in digits.LEARNERS.values())
    with tqdm(total=steps, leave=False, bar_format="{desc:<40}{percentage:3.0f}% |{bar:40}| {elapsed}") as bar:
        outcomes = []
        for name, learner in digits.LEARNERS.items():
            bar.set_description(name)
            outcomes.append(digits.outcome(name, learner, trials, lessons, bar.update))
    return lessons, sorted(outcomes, key=lambda outcome: -outcome.accuracy)


def _digit_lines(lessons: digits.Lessons, outcomes: list[digits.Outcome]) -> Iterator[str]:
    """Yield the lines of the table of the digits."""
    draws, images = lessons.query.shape
    yield (
        f"Ten classes of digits from {digits.SHOTS} examples each: {draws} draws of examples, each tested on "
        f"{images} other images."
    )
    yield f"Settings are the best of a grid in {digits.TRIALS} draws from images that the test does not see."
    yield f"{'':<34}{'accuracy':>16}   setting"
    for one in outcomes:
        yield f"{one.name:<34}{f'{one.accuracy:.1%} +- {one.error:.1%}':>16}   {one.told}"
    yield ""


def _cloud_lines(clouds: list[cloud.Comparison]) -> Iterator[str]:
    """Yield the lines of the table of the point cloud, with a column for each noise."""
    yield (
        f"A cloud of {cloud.POINTS:,} points rotated, scaled and shifted, learnt from {cloud.PAIRS} pairs: root "
        "mean square error"
    )
    yield (
        f"as a share of the cloud's radius, median of {cloud.DRAWS} draws of pairs. Attention's temperature is the "
        "best for the answer."
    )
    yield f"{'':<34}" + "".join(f"{_noise(comparison.noise):>20}" for comparison in clouds)
    for name in cloud.METHODS:
        yield f"{name:<34}" + "".join(f"{comparison.errors[name]:>20.1e}" for comparison in clouds)
    yield ""


def _noise(share: float) -> str:
    return f"{share:.0%} noise in pairs" if share else "exact pairs"
