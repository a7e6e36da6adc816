"""What is asked of the scans of a family: axes along which one parameter varies, something quick, names of their own."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence

from bench import harness
from bench.harness import Case

LENGTHS = ("N", "n")


def by_scan(cases: Iterable[Case]) -> dict[str, list[Case]]:
    scans = defaultdict(list)
    for case in cases:
        scans[case.scan].append(case)
    return dict(scans)


def differing(first: Case, second: Case) -> list[str] | None:
    """The parameters in which two groups differ; None where they are not of the same parameters."""
    mine, theirs = first.parameters, second.parameters
    return None if mine.keys() != theirs.keys() else [key for key in mine if mine[key] != theirs[key]]


def beside_an_axis(cases: Sequence[Case]) -> list[str]:
    """Groups that no other differs from in exactly one parameter."""
    return [str(case) for case in cases if not any(len(differing(case, other) or ()) == 1 for other in cases)]


def alike(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Pairs of groups that a plot could not tell apart."""
    return [(str(a), str(b)) for i, a in enumerate(cases) for b in cases[:i] if differing(a, b) == []]


def points(cases: Sequence[Case], axis: str) -> int:
    """Of the longest axis along a parameter."""
    lines = defaultdict(set)
    for case in cases:
        if axis in case.parameters:
            lines[tuple((key, value) for key, value in case.parameters.items() if key != axis)].add(case.parameters[axis])
    return max(map(len, lines.values()), default=0)


def check_scan(cases: Sequence[Case]) -> None:
    with harness.threads(2):  # as many as a run has
        assert not beside_an_axis(cases)
        assert not alike(cases)
        for axis in LENGTHS:
            assert points(cases, axis) == 0 or points(cases, axis) >= 4, axis
    assert any(case.quick for case in cases)
    assert len({str(case) for case in cases}) == len(cases)
    for case in cases:
        assert set(case.baselines) & set(case.implementations), case
        assert str(case) == str(pickle.loads(pickle.dumps(case)))
