"""Family A beside its peers. A row is one implementation of one case; see attention.py."""

import pytest

from .attention import CASES

ROWS = [pytest.param(case, name, id=f"{case}-{name}") for case in CASES for name in case.implementations]


@pytest.mark.parametrize(("case", "implementation"), ROWS)
def bench_attention(case, implementation, replay):
    replay(case, implementation)
