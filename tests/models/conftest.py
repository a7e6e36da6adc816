"""Some baselines share their parts with others, and are tested in all ways by `make test-thorough` only.

`test_baselines.py` compares each with the published code in the ordinary tests.
"""

from __future__ import annotations

import pytest

SHARING = ("anp", "bnp", "canp", "eqtnp", "lbanpnd")
"""Names of classes in lower case."""
SLOW = ("test_a_changed_layer_is_called", "banp")
"""A test, and another baseline that takes long there."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = getattr(item, "callspec", None)
        if given is None or not isinstance(item, pytest.Function):
            continue
        of = given.params.get("system", given.params.get("kind"))
        name = str(getattr(of, "__name__", of)).lower().replace("-", "")
        if name in SHARING or (item.originalname, name) == SLOW:
            item.add_marker(pytest.mark.thorough)
