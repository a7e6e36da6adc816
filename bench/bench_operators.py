"""Every public operator and module beside its peers. A row is one implementation of one case; see scans/."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .scans import all_cases
from .scans.case import Case
from .scans.intention_state import errors_of_additions

ROWS = [pytest.param(case, name, id=f"{case}-{name}") for case in all_cases() for name in case.implementations]


@pytest.mark.parametrize(("case", "implementation"), ROWS)
def bench_operator(case: Case, implementation: str, replay: Callable[[Case, str], None]) -> None:
    replay(case, implementation)


def bench_a_million_additions(tell: Callable[[str, float], None]) -> None:
    """What float64 sums are for."""
    for name, error in errors_of_additions(1_000_000).items():
        tell(f"relative error of K'K after 1,000,000 additions of one key, {name}", error)
