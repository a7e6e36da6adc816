"""How results judge a claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .results import Results, Spread


class Verdict(NamedTuple):
    """Whether a claim held here."""

    held: bool | None
    """None: it could not be judged at this scale."""
    reason: str


class Claim(NamedTuple):
    """A sentence of a paper."""

    text: str
    source: str
    judge: Callable[[Results], Verdict]


def judged(claim: Claim, results: Results) -> Verdict:
    """Return the verdict; where a run is missing, it could not be judged."""
    try:
        return claim.judge(results)
    except KeyError as missing:
        return Verdict(None, str(missing.args[0]))


def above(results: Results, experiment: str, score: str, higher: str, lower: str, by: float = 0.0) -> Verdict:
    """Judge that one system's score is above another's."""
    return compared(higher, results.spread(experiment, higher, score), lower, results.spread(experiment, lower, score), by)


def compared(higher: str, ours: Spread, lower: str, theirs: Spread, by: float = 0.0) -> Verdict:
    """Judge that one score is above another, by more than the seeds scatter: two standard errors of the difference."""
    error = 2 * (ours.deviation**2 / ours.seeds + theirs.deviation**2 / theirs.seeds) ** 0.5
    difference, told = ours.mean - theirs.mean - by, f"{higher} {ours}, {lower} {theirs}"
    if abs(difference) <= error and ours.seeds > 1:
        return Verdict(None, f"{told}: the seeds scatter as much")
    return Verdict(difference > 0, told)


def within(results: Results, experiment: str, score: str, system: str, reference: str, distance: float) -> Verdict:
    """Judge that one system's score is less than `distance` below another's."""
    ours, theirs = (results.spread(experiment, each, score) for each in (system, reference))
    return Verdict(theirs.mean - ours.mean <= distance, f"{system} {ours}, {reference} {theirs}; at most {distance:g} below is asked")


def times_below(results: Results, experiment: str, score: str, lower: str, higher: str, times: float) -> Verdict:
    """Judge that one system's error is so many times below another's."""
    ours, theirs = (results.spread(experiment, system, score).mean for system in (lower, higher))
    return Verdict(times * ours <= theirs, f"{lower} {ours:.2g}, {higher} {theirs:.2g}: {theirs / ours:.0f} times")
