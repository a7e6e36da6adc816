"""The calls whose host time is measured are one launch each; times are not tested, since a machine may be busy."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from .driver import Launched, stub
from .host_time import calls


def test_one_launch_a_call() -> None:
    launched: list[Launched] = []
    with stub(90, launched.append):
        for name, call in calls():
            for _ in range(3):
                launched.clear()
                call()
            assert len(launched) == 1, name
