"""The load of other programs follows from the system's counts, and is None where the system has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import load

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes seconds of user, nice, system, idle, waiting, two kinds of interrupts and stolen time, and of this
    process."""
    monkeypatch.setattr(load, "STAT", tmp_path / "stat")

    def count(*seconds: float, own: float) -> None:
        ticks = [round(part * TICKS) for part in seconds]
        load.STAT.write_text(f"cpu  {' '.join(map(str, ticks))} 7 7\ncpu0 1 2 3\n")
        monkeypatch.setattr("time.process_time", lambda: own)

    return count


@pytest.mark.parametrize(("stolen", "own", "share"), [(0, 1, 0.0), (0, 0, 0.05), (4, 1, 0.2), (0, 1.02, 0.0)])
def test_others_are_all_that_is_busy_but_this_process(stolen: float, own: float, share: float, counted):
    """All processors together have 20 seconds; idle ones, and those that wait for a disk, count as free."""
    counted(5, 0, 1, 50, 3, 0, 0, 2, own=7)
    before = load.usage()
    counted(5.5, 0.2, 1.2, 60 - stolen, 12, 0.05, 0.05, 2 + stolen, own=7 + own)
    assert load.others_since(before) == pytest.approx(share, abs=0.002)


def test_without_counts_nothing_is_known(counted):
    assert load.usage() is None and load.others_since(None) is None and load.others(0) is None
    counted(1, 0, 0, 1, 0, 0, 0, 0, own=0)
    assert load.others_since(load.usage()) is None, "no time has passed"
