"""The load of other programs on the machine during a timing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
NOISY = 0.05
"""If other programs take more than this share of all processors, they may have disturbed a time. With two processors,
it is a tenth of one."""


class Usage(NamedTuple):
    """Seconds of processor time since some moment."""

    every: float
    """Seconds of all processors, idle or not."""
    busy: float
    """Seconds of every program, and of other guests of the same host."""
    own: float
    """Seconds of this process."""


def usage() -> Usage | None:
    """The seconds used so far; None if the system does not report them, which is the case except on Linux."""
    if not STAT.exists():
        return None
    user, nice, system, idle, waiting, *interrupts_and_stolen = map(
        int, STAT.read_text().partition("\n")[0].split()[1:9]
    )
    busy, ticks = user + nice + system + sum(interrupts_and_stolen), os.sysconf("SC_CLK_TCK")
    return Usage((busy + idle + waiting) / ticks, busy / ticks, time.process_time())


def others_since(before: Usage | None) -> float | None:
    """The share of all processors that other programs have taken since `before`;
    None if the system does not report it."""
    now = usage()
    if before is None or now is None or now.every <= before.every:
        return None
    return max(0.0, (now.busy - before.busy) - (now.own - before.own)) / (now.every - before.every)


def others(seconds: float) -> float | None:
    """The share that other programs take now, measured while this process sleeps."""
    before = usage()
    time.sleep(seconds)
    return others_since(before)
