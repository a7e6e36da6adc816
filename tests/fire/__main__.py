"""`python -m tests.fire [STEPS]` runs the random streams of this folder, a million steps each, and writes
bench/results/streams.json."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..record import write
from .streams import STREAMS


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with torch.no_grad():
        for operator, stream in STREAMS.items():
            figures[operator] = stream(steps)
            print(operator, *figures[operator].items(), sep="\n  ", flush=True)
    print(write("streams", {"steps": steps, "streams": figures}))


if __name__ == "__main__":
    main()
