"""Every public operator and module beside its peers. A row is one implementation of one case; see scans/."""

import pytest

from .scans import CASES
from .scans.intention_state import errors_of_additions

ROWS = [pytest.param(case, name, id=f"{case}-{name}") for case in CASES for name in case.implementations]


@pytest.mark.parametrize(("case", "implementation"), ROWS)
def bench_operator(case, implementation, replay):
    replay(case, implementation)


def bench_a_million_additions(tell):
    """What float64 sums are for."""
    for name, error in errors_of_additions(1_000_000).items():
        tell(f"relative error of K'K after 1,000,000 additions of one key, {name}", error)
