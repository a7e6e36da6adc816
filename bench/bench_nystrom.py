"""Family B beside its peers. A row is one implementation of one case; see nystrom.py."""

import pytest

from .nystrom import CASES

ROWS = [pytest.param(case, name, id=f"{case}-{name}") for case in CASES for name in case.implementations]


@pytest.mark.parametrize(("case", "implementation"), ROWS)
def bench_nystrom(case, implementation, replay):
    replay(case, implementation)
