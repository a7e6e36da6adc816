"""How busy other programs keep the machine while something is timed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
NOISY = 0.05
"""Share of all processors beyond which a time may be the neighbours' doing: a tenth of one, where there are two."""


class Usage(NamedTuple):
    """Seconds of processors since some moment."""

    every: float
    """Those of all of them, idle or not."""
    busy: float
    """Those of every program, and of other guests of the same host."""
    own: float
    """Those of this process."""


def usage() -> Usage | None:
    """What was used until now; None where the system does not tell, as elsewhere than on Linux."""
    if not STAT.exists():
        return None
    user, nice, system, idle, waiting, *interrupts_and_stolen = map(int, STAT.read_text().partition("\n")[0].split()[1:9])
    busy, ticks = user + nice + system + sum(interrupts_and_stolen), os.sysconf("SC_CLK_TCK")
    return Usage((busy + idle + waiting) / ticks, busy / ticks, time.process_time())


def others_since(before: Usage | None) -> float | None:
    """The share of all processors that other programs have taken since `before`; None where the system does not tell."""
    now = usage()
    if before is None or now is None or now.every <= before.every:
        return None
    return max(0.0, (now.busy - before.busy) - (now.own - before.own)) / (now.every - before.every)


def others(seconds: float) -> float | None:
    """The share that other programs take now: what they do while this process sleeps."""
    before = usage()
    time.sleep(seconds)
    return others_since(before)
