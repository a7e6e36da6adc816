"""What there is to measure: a scan is all cases of one public operator or module."""

from __future__ import annotations

from collections import defaultdict

from ..harness import Case
from . import attention, attention_state, intention, module, nystrom

CASES: list[Case] = [*attention.CASES, *attention_state.CASES, *module.CASES, *intention.CASES, *nystrom.CASES]


def scans() -> dict[str, list[Case]]:
    """Name of a scan -> its cases."""
    found: dict[str, list[Case]] = defaultdict(list)
    for case in CASES:
        found[case.scan].append(case)
    return dict(found)
