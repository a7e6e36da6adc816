"""How results judge a claim: by one rule, with the standard error over seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .results import Results, Side, Spread, number

SEEDS = 3
"""The smallest number of seeds with which a claim is judged. With fewer, the standard error is not known."""
EQUAL = 1.25
"""CPU seconds count as equal if the larger number is at most this many times the smaller."""


class Verdict(NamedTuple):
    """Whether a claim held here."""

    held: bool | None
    """None means that the claim could not be judged at this scale."""
    reason: str


class Claim(NamedTuple):
    """A sentence of a paper."""

    text: str
    source: str
    judge: Callable[[Results], Verdict]
    published: str = ""
    """The paper's own figures."""
    sides: tuple[Side, ...] = ()
    """The scores that the claim compares."""
    is_published: bool = True
    """Whether the paper has it; else it is about a variant of our own."""


def judged(claim: Claim, results: Results) -> Verdict:
    """Return the verdict. If a run is missing, the claim could not be judged."""
    try:
        return claim.judge(results)
    except KeyError as missing:
        return Verdict(None, str(missing.args[0]))


def compared(
    results: Results, ours: Side, theirs: Side, allowed: float | None = 0.0, equal_seconds: bool = False
) -> Verdict:
    """Judge that one side is better than another, or at most `allowed` worse. None means that the paper does not state
    how much worse is allowed.

    The claim held if the difference is on the right side of `allowed` by more than two standard errors, over three
    seeds or more. It was refuted if the difference is on the wrong side of `allowed` by more than two standard errors.
    It is not judged in between. It is also not judged in two other cases: if a baseline that should fail is not clearly
    worse than the claim requires; and, with `equal_seconds`, if one side was trained for longer.
    """
    mine, other = results.spread(*ours), results.spread(*theirs)
    asked = Spread(other.mean - results.sign(ours.score) * (allowed or 0.0), other.deviation, other.seeds)
    told = f"{_named(ours, theirs)} {mine}, {_named(theirs, ours)} {other}"
    if equal_seconds:
        seconds = [results.seconds(side.experiment, side.system) for side in (ours, theirs)]
        told += (
            f"; steps {results.steps(ours):,} and {results.steps(theirs):,}, CPU seconds {seconds[0]:.0f} and "
            f"{seconds[1]:.0f}"
        )
        if max(seconds) > EQUAL * min(seconds):
            return Verdict(None, f"{told}: not equal")
    for name, baseline in results.baselines(ours, theirs).items():
        if results.sign(ours.score) * (asked.mean - baseline.mean) <= _error(asked, baseline):
            return Verdict(None, f"{told}: {name} also passes, or nearly, with {number(baseline.mean)}")
    if min(mine.seeds, other.seeds) < SEEDS:
        return Verdict(None, f"{told}: fewer than {SEEDS} seeds")
    difference = results.sign(ours.score) * (mine.mean - asked.mean)
    if abs(difference) <= _error(mine, asked):
        return Verdict(None, f"{told}: the difference is within the scatter of the seeds")
    if allowed is None and difference < 0:
        return Verdict(None, f"{told}: worse, and the paper does not say how much worse is still near")
    return Verdict(difference > 0, told)


def _error(one: Spread, other: Spread) -> float:
    """Return two standard errors of the difference of means."""
    return 2 * float(one.deviation**2 / one.seeds + other.deviation**2 / other.seeds) ** 0.5


def _named(side: Side, other: Side) -> str:
    """Return the words that tell one side from the other: system and variant, and the score if both are the same."""
    return f"{side.label}, {side.score.replace('_', ' ')}" if side.label == other.label else side.label
